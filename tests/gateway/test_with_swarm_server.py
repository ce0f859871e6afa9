"""The gateway against the real swarm server and its data plane, with a scripted vLLM behind them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from gateway.observability.logs import TextFormatter
from swarm.job import LoraSettings
from swarm.kept_adapters import BASE, kept_model
from tests.gateway.conftest import BODY, CHAT, Http, gateway_before
from tests.standins.upstream import Upstream
from tests.standins.vllm import (
    ENGINE_MODEL,
    PROMPT,
    completion_chunk,
    plain,
    plain_choice,
    role_chunk,
    several,
    status,
    streamed,
    token_chunk,
    usage_chunk,
)
from tests.standins.vllm_rules import VllmRules
from tests.swarm.server import conftest as server
from tests.swarm.server.dataplane.test_raw import told
from tests.swarm.server.journal.test_journal import full_disk

pytestmark = pytest.mark.anyio

overrides = server.overrides
rig = server.rig


#: vLLM has no grammar for it.
SET = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}


@pytest.fixture
async def gateway(rig: server.Rig, tmp_path: Path) -> AsyncGenerator[Http]:
    async with gateway_before(str(rig.client.base_url), tmp_path) as http:
        yield http


async def none_running(rig: server.Rig) -> None:
    async with asyncio.timeout(30):
        while rig.controller.pool.information().running_episodes:
            await rig.client.get("/health")


async def test_a_group_is_sampled_from_the_policy_recorded_and_finished(rig: server.Rig, gateway: Http) -> None:
    rig.vllm.script.append(several(plain_choice([1]), plain_choice([1, 2, 3], index=1)))
    response = await gateway.post(CHAT, json={**BODY, "temperature": 0.0, "seed": 3, "odd": True})
    assert response.headers["x-swarm-trained"] == "true"
    choice = response.json()["choices"][0]
    assert choice["message"]["content"] == "t1 t2 t3" and "token_ids" not in choice and choice["logprobs"] is None
    [(_, sent)] = rig.vllm.requests
    assert (sent["temperature"], sent["n"], sent["odd"]) == (0.9, 2, True) and "seed" not in sent
    assert response.json()["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    information = rig.controller.pool.information()
    assert (information.completed_tasks, information.completed_episodes, information.running_episodes) == (1, 2, 0)


async def test_a_wrong_token_is_not_told_as_a_server_that_is_down(rig: server.Rig, tmp_path: Path) -> None:
    settings = {"swarm_token": "wrong", "offline_wait_seconds": 0.0}
    async with gateway_before(str(rig.client.base_url), tmp_path, **settings) as http:
        answer = await http.post(CHAT, json=BODY)
        [told_of] = (await http.get("/status")).json()["swarms"]
        health = (await http.get("/health")).json()
    assert health["engine"] == "refuses the token"
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "swarm_refused")
    assert "set the gateway's swarm_token" in answer.json()["error"]["message"]
    assert told_of["engine"] == "refuses the token"


@pytest.mark.parametrize("overrides", [{"token": "secret"}])
@pytest.mark.parametrize("train", ["true", "false"])
async def test_a_token_may_end_as_a_file_of_secrets_does(rig: server.Rig, tmp_path: Path, train: str) -> None:
    async with gateway_before(str(rig.client.base_url), tmp_path, swarm_token="secret\n") as http:
        answer = await http.post(CHAT, json=BODY, headers={"x-swarm-train": train})
    assert answer.status_code == 200 and answer.headers["x-swarm-trained"] == train


async def test_what_a_trained_answer_does_not_heed_is_told_of_it_alone(rig: server.Rig, gateway: Http) -> None:
    body = BODY | {"temperature": 0.2, "seed": 3, "max_tokens": 101}
    named = {
        train: [note.partition(":")[0] for note in answer.headers["x-swarm-left-out"].split("; ")]
        for train in ("true", "false")
        if (answer := await gateway.post(CHAT, json=body, headers={"x-swarm-train": train})).status_code == 200
    }
    assert named == {"true": ["max_tokens", "temperature", "seed"], "false": ["max_tokens"]}
    trained, straight = (sent for _, sent in rig.vllm.requests)
    assert (trained["temperature"], straight["temperature"], straight["seed"]) == (0.9, 0.2, 3)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, BODY),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"max_tokens": 9, "messages": BODY["messages"]}),
    ],
)
@pytest.mark.parametrize("train", ["true", "false"])
async def test_a_temperature_that_vllm_refuses_is_refused_trained_or_not(
    rig: server.Rig, gateway: Http, path: str, body: dict[str, Any], train: str
) -> None:
    rig.vllm.rules = VllmRules()
    answer = await gateway.post(path, json=body | {"temperature": -1}, headers={"x-swarm-train": train})
    assert answer.status_code == 400
    assert "temperature must be non-negative, got -1" in answer.json()["error"]["message"]
    assert (answer.json().get("type") == "error") == (path == "/v1/messages")
    await none_running(rig)


@pytest.mark.parametrize("stream", [False, True])
async def test_while_a_whole_batch_waits_for_the_trainer_one_untrained_answer_will_do_if_the_request_says_so(
    rig: server.Rig, gateway: Http, stream: bool
) -> None:
    rig.controller.rollout_ready(structs.replace(server.ready(rig.vllm_address), serving="always"))
    trainer = asyncio.create_task(rig.controller.next_batch())
    for _ in range(2 * server.JOB.batch_size):
        assert (await gateway.post(CHAT, json=BODY)).headers["x-swarm-trained"] == "true"
    assert len((await trainer).groups) == server.JOB.batch_size
    rig.vllm.requests.clear()
    if stream:
        rig.vllm.script.append(streamed(role_chunk(), token_chunk([1], "stop"), usage_chunk(1)))
    single = {"x-swarm-when-batch-waits": "single"}
    response = await gateway.post(CHAT, json=BODY | {"stream": stream}, headers=single)
    assert response.status_code == 200
    assert (response.headers["x-swarm-trained"], response.headers["x-swarm-drop-reason"]) == ("false", "batch_waits")
    assert [sent.get("n", 1) for _, sent in rig.vllm.requests] == [1]
    assert (await gateway.get("/status")).json()["errors"] == {}


@pytest.mark.parametrize("stream", [False, True])
async def test_without_its_trainer_vllm_answers_at_once_and_untrained(
    rig: server.Rig, gateway: Http, stream: bool
) -> None:
    assert (await gateway.post(CHAT, json=BODY)).headers["x-swarm-trained"] == "true"
    rig.controller.trainer_died("killed")
    response = await gateway.post(CHAT, json=BODY | {"stream": stream})
    assert response.status_code == 200
    assert (response.headers["x-swarm-trained"], response.headers["x-swarm-drop-reason"]) == ("false", "trainer_away")
    rig.controller.rollout_ready(server.ready(rig.vllm_address))
    assert (await gateway.post(CHAT, json=BODY)).headers["x-swarm-trained"] == "true"


async def test_the_outcome_of_a_session_reaches_the_trainers_batch(rig: server.Rig, tmp_path: Path) -> None:
    outcome = "def on_session_end(session, context):\n    return session.feedback.rating\n"
    tasks = server.JOB.batch_size
    async with gateway_before(str(rig.client.base_url), tmp_path, session_end=outcome, session_weight=2.0) as http:
        for number in range(tasks):
            await http.post(CHAT, json=BODY, headers={"x-swarm-session": str(number)})
            said = {"score": 0.5, "task": str(number)}
            assert (await http.post(f"/v1/sessions/{number}/end", json=said)).json()["ended"]
            # a second open group would be more than half of the job's slots, and close this one before its hook is back
            await none_running(rig)
    batch = await rig.controller.next_batch()
    credits = [[one.credit for one in group.trajectories] for group in batch.groups]
    assert sorted(sorted(group) for group in credits) == [[0.0, 1.0]] * tasks


async def test_a_session_says_what_the_swarm_server_counted(rig: server.Rig, gateway: Http) -> None:
    named = {"x-swarm-session": "s"}
    assert (await gateway.post(CHAT, json=BODY, headers=named)).headers["x-swarm-trained"] == "true"
    rig.vllm.script.append(plain([1, 2], token_ids=[1]))
    assert (await gateway.post(CHAT, json=BODY, headers=named)).headers["x-swarm-drop-reason"] == "quarantined"
    [on] = (await gateway.get("/v1/sessions/s")).json()["on"]
    [ledger] = on["agents"].values()
    told, why = ledger["accounted"]["tokens"], ledger["accounted"]["why"]
    assert told["trained"] == ledger["trained"]["sampled"] > 0
    assert told["sampled"] == told["trained"] + told["repeated"] + told["dropped"]
    assert sum(why.values()) == told["dropped"]
    assert (told["timelines"], told["prompts"]) == (server.JOB.num_repeat, ledger["trained"]["masked"])
    assert (await gateway.get("/status")).json()["accounted"]["tokens"]["trained"] == told["trained"]


async def test_a_session_counts_what_is_answered_once_and_untrained(rig: server.Rig, gateway: Http) -> None:
    named = {"x-swarm-session": "s"}
    assert (await gateway.post(CHAT, json=BODY, headers={**named, "x-swarm-train": "false"})).status_code == 200
    rig.controller.trainer_died("killed")
    single = {**named, "x-swarm-when-batch-waits": "single"}
    assert (await gateway.post(CHAT, json=BODY, headers=single)).status_code == 200
    # a name that means nothing is refused also where nothing is trained
    too_long = {"x-swarm-session": "x" * 257, "x-swarm-train": "false"}
    assert (await gateway.post(CHAT, json=BODY, headers=too_long)).status_code == 400
    [on] = (await gateway.get("/v1/sessions/s")).json()["on"]
    [ledger] = on["agents"].values()
    assert (ledger["passed"], ledger["under_way"]) == ({"not_chosen": 1, "trainer_away": 1}, 0)


@pytest.mark.parametrize("prompt", ["Once upon", [5, 6, 7]])
async def test_a_raw_prompt_reaches_vllm_as_it_is_and_is_trained(rig: server.Rig, gateway: Http, prompt: Any) -> None:
    rig.vllm.script.append(told([21], [21, 22, 23]))
    response = await gateway.post("/v1/completions", json={"model": "tiny", "prompt": prompt, "max_tokens": 9})
    assert response.headers["x-swarm-trained"] == "true"
    body = response.json()
    assert (body["object"], body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == (
        "text_completion",
        "t21 t22 t23 ",
        "stop",
    )
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    [(path, sent)] = rig.vllm.requests
    assert (path, sent["prompt"], sent["n"], sent["max_tokens"]) == ("/v1/completions", prompt, 2, 9)
    assert "messages" not in sent
    information = rig.controller.pool.information()
    assert (information.completed_tasks, information.completed_episodes, information.running_episodes) == (1, 2, 0)


async def test_a_raw_prompt_streams_and_each_of_a_list_is_a_task(rig: server.Rig, gateway: Http) -> None:
    rig.vllm.default = told([21], [21, 22, 23])
    body = {"model": "tiny", "prompt": ["a", "b"], "stream": True}
    response = await gateway.post("/v1/completions", json=body)
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    texts = {0: "", 1: ""}
    for choice in (choice for event in events for choice in json.loads(event)["choices"]):
        texts[choice["index"]] += choice["text"]
    assert texts == {0: "t21 t22 t23 ", 1: "t21 t22 t23 "}
    assert sorted(sent["prompt"] for _, sent in rig.vllm.requests) == ["a", "b"]
    await none_running(rig)
    assert sorted(rig.controller.pool.information().tasks.values()) == [2, 2]


async def test_raw_prompts_first_stream_live_and_train(rig: server.Rig, gateway: Http) -> None:
    def answer(sent: dict[str, Any]) -> Any:
        if not sent.get("stream"):
            return told([21])(sent)
        return streamed(completion_chunk([21], prompt=PROMPT), completion_chunk([22], "stop"), usage_chunk(2))(sent)

    rig.vllm.default = answer
    response = await gateway.post(
        "/v1/completions",
        json={"model": "tiny", "prompt": "Once", "stream": True},
        headers={"x-swarm-policy": "first"},
    )
    assert '"text":"t21 "' in response.text and response.text.endswith("data: [DONE]\n\n")
    assert {path for path, _ in rig.vllm.requests} == {"/v1/completions"}
    await none_running(rig)
    assert rig.controller.pool.information().completed_episodes == 2


@pytest.mark.parametrize(
    ("path", "asked", "param", "headers"),
    [
        (CHAT, {"messages": BODY["messages"]}, "messages", {"x-swarm-policy": "best"}),
        (CHAT, {"messages": BODY["messages"], "stream": True}, "messages", {"x-swarm-policy": "first"}),
        (CHAT, {"messages": BODY["messages"]}, "messages", {"x-swarm-train": "false"}),
        ("/v1/completions", {"prompt": [5, 6, 7]}, "prompt", {"x-swarm-policy": "first"}),
        ("/v1/responses", {"input": "hi"}, "input", {"x-swarm-train": "false"}),
        ("/v1/messages", {"messages": BODY["messages"], "max_tokens": 9}, None, {"x-swarm-policy": "best"}),
        ("/v1/messages", {"messages": BODY["messages"], "max_tokens": 9}, None, {"x-swarm-policy": "first"}),
    ],
)
async def test_too_long_a_prompt_is_told_to_the_caller_and_in_the_log(
    rig: server.Rig,
    gateway: Http,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    asked: dict[str, Any],
    param: str | None,
    headers: dict[str, str],
) -> None:
    said = (
        "This model's maximum context length is 2048 tokens. However, you requested 0 output tokens and your prompt "
        "contains at least 2049 input tokens, for a total of at least 2049 tokens. Please reduce the length of the "
        "input prompt or the number of requested output tokens."
    )
    rig.vllm.default = status(400, {"error": {"message": said, "type": "BadRequestError", "param": None, "code": 400}})
    # the handler is that of all tests
    monkeypatch.setattr(caplog.handler, "formatter", TextFormatter())
    response = await gateway.post(path, json={"model": "tiny", **asked}, headers=headers)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "job.max_prompt_length" in error["message"]
    if param is None:
        assert error["message"].startswith("prompt is too long: 2049 tokens > 2048 maximum")
    else:
        assert error["param"] == param
        assert error["message"].startswith("This model's maximum context length is 2048 tokens. However, your ")
    assert "maximum context length is 2048 tokens" in caplog.text and "job.max_prompt_length" in caplog.text
    assert (await gateway.get("/status")).json()["errors"] == {"context_length_exceeded": 1}
    await none_running(rig)


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SET}}}),
        ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "x", "schema": SET}}}),
        ("/v1/messages", {"max_tokens": 9, "output_config": {"format": {"type": "json_schema", "schema": SET}}}),
    ],
)
async def test_a_schema_without_a_grammar_is_said_in_every_dialect(
    rig: server.Rig, gateway: Http, path: str, asked: dict[str, Any]
) -> None:
    turns = {"input" if path == "/v1/responses" else "messages": BODY["messages"]}
    response = await gateway.post(path, json={"model": "tiny", **turns, **asked})
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["code"]) == (
        400,
        "invalid_request_error",
        "schema_not_supported",
    )
    assert 'Unimplemented keys: ["uniqueItems"]' in error["message"]
    await none_running(rig)


async def test_a_request_whose_engine_dies_waits_for_the_next_one(rig: server.Rig, gateway: Http) -> None:
    rig.vllm.default = rig.vllm.hang()
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(gateway.post(CHAT, json=BODY))
        async with asyncio.timeout(30):
            while not rig.vllm.requests:
                await rig.client.get("/health")
        rig.vllm.default = plain([1, 2])
        rig.controller.offline("killed by a test")
        rig.controller.boot()
        rig.controller.rollout_ready(server.ready(rig.vllm_address, 5))
    response = asking.result()
    assert response.status_code == 200
    assert (response.headers["x-swarm-policy-version"], response.headers["x-swarm-trained"]) == ("5", "true")


async def test_an_answer_in_any_order_is_taken_back(rig: server.Rig, gateway: Http) -> None:
    """Of a live stream the blocks come in the order in which vLLM wrote them: text behind a call, too."""
    function = {"name": "look", "arguments": "{}"}
    call = {"id": "c", "type": "function", "index": 0, "function": function}
    deltas: list[dict[str, Any]] = [{"content": "a"}, {"tool_calls": [call]}, {"content": "b"}, {"reasoning": "hm"}]
    tokens = [token_chunk([5 + k], delta=delta) for k, delta in enumerate(deltas)]
    live = streamed(role_chunk(), *tokens, token_chunk([99], "tool_calls", {}), usage_chunk(5))
    rig.vllm.default = lambda sent: live(sent) if sent.get("stream") else plain([1])(sent)
    hi = {"role": "user", "content": "hi"}
    tool = {"name": "look", "input_schema": {"type": "object"}}
    ask: dict[str, Any] = {"model": "tiny", "max_tokens": 9, "messages": [hi], "tools": [tool]}
    response = await gateway.post("/v1/messages", json=ask | {"stream": True}, headers={"x-swarm-policy": "first"})
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]
    blocks = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [block["type"] for block in blocks] == ["text", "tool_use", "text", "thinking"]
    for event in events:
        match event:
            case {"type": "content_block_delta", "index": index, "delta": {"text": text}}:
                blocks[index]["text"] += text
            case {"type": "content_block_delta", "index": index, "delta": {"thinking": text}}:
                blocks[index]["thinking"] += text
            case _:
                pass
    result = {"type": "tool_result", "tool_use_id": "c", "content": "sunny"}
    turns = [hi, {"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
    assert (await gateway.post("/v1/messages", json=ask | {"messages": turns})).status_code == 200
    said = {"role": "assistant", "content": "ab", "reasoning": "hm"}
    del call["index"]
    sent = next(sent["messages"] for _, sent in rig.vllm.requests if len(sent["messages"]) == 3)
    assert sent[1] == {**said, "tool_calls": [call]}
    await none_running(rig)


async def test_tokens_are_counted_of_what_is_carried(rig: server.Rig, gateway: Http) -> None:
    rig.vllm.default = status(200, {"count": 7})
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBE"}}
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    turns = [{"role": "user", "content": [pdf]}, {"role": "assistant", "content": [use]}]
    search = {"type": "web_search_20250305", "name": "web_search"}
    ask = {"model": "tiny", "messages": turns, "tools": [search], "context_management": {"edits": []}}
    counted = await gateway.post("/v1/messages/count_tokens", json=ask)
    assert (counted.status_code, counted.json()) == (200, {"input_tokens": 7})
    [(path, sent)] = rig.vllm.requests
    assert path.endswith("/tokenize") and sent["messages"][0]["content"].startswith("[A PDF document")


async def test_a_challenger_in_the_shadow_is_compared_on_both_statuses(
    rig: server.Rig, upstream: Upstream, tmp_path: Path
) -> None:
    rig.vllm.script.append(several(plain_choice([1]), plain_choice([1, 2, 3], index=1)))
    serve = {"incumbent": {"upstream": {"base_url": upstream.url, "model": "gpt"}}}
    async with gateway_before(str(rig.client.base_url), tmp_path, serve=serve) as http:
        response = await http.post(CHAT, json=BODY)
        assert response.json()["choices"][0]["message"]["content"] == "from the upstream"
        async with asyncio.timeout(30):
            said: list[Any] = []
            while not said:
                said = (await rig.client.get("/status")).json()["comparisons"]
            route: dict[str, Any] = {}
            while not route.get("verdicts"):
                route = (await http.get("/status")).json()["routes"]["default"]
    assert (route["stage"], route["upstream"], route["shadows"]) == ("shadow", upstream.url, {"trained": 1})
    assert route["verdicts"] == said
    [comparison] = said
    assert comparison["incumbent"].startswith("gpt at 127.0.0.1:")
    # two and three words of ten beside three
    assert comparison["verdict"]["sentence"].startswith("not decided: -0.10 [-")
    information = rig.controller.pool.information()
    assert (information.completed_tasks, information.completed_episodes, information.running_episodes) == (1, 2, 0)


async def test_a_challenger_is_promoted_by_the_verdict_answers_and_is_taken_back(
    rig: server.Rig, upstream: Upstream, tmp_path: Path
) -> None:
    # the judge changes its mind once the file is there
    judge = f"""
from pathlib import Path

def on_compute_relative_reward(task, candidates, context):
    turned = Path({str(tmp_path / "turned")!r}).exists()
    return [float((one.source == "incumbent") == turned) for one in candidates]
"""
    # a step was done: its weights are on trial
    rig.controller.rollout_ready(server.ready(rig.vllm_address, 3))
    rig.vllm.default = lambda sent: several(plain_choice([1]), plain_choice([1, 2, 3], index=1))(sent)
    # so many pairs that chance does not draw all conversations of the canary to one side
    gate = {"mode": "auto", "trial_every": 3, "max_length": None, "alpha": 1e-7}
    serve = {
        "incumbent": {"upstream": {"base_url": upstream.url, "model": "gpt"}},
        "canary": {"shares": [0.5]},
        "gate": gate,
        "watch_share": 1,
        "max_shadows": 100,
    }
    stages, sources = rig.controller.pool.stages, list[str]()
    trainer = asyncio.create_task(rig.controller.next_batch())
    url = str(rig.client.base_url)
    async with gateway_before(url, tmp_path, reward=judge, serve=serve) as http, asyncio.timeout(60):

        async def until(*labels: str) -> None:
            while (label := stages.find("default", "").label) != labels[-1]:
                assert label in labels, label
                response = await http.post(CHAT, json=BODY, headers={"x-swarm-session": f"s{len(sources)}"})
                assert response.status_code == 200, response.text
                sources.append(response.headers["x-swarm-source"])

        while not stages.pointers:
            await http.get("/status")
        assert stages.holds
        await until("shadow", "canary 0.5")
        assert set(sources) == {"incumbent"}
        await until("canary 0.5", "live")
        assert set(sources) == {"incumbent", "challenger"}
        assert stages.holds and not trainer.done()
        (tmp_path / "turned").touch()
        await until("live", "shadow")
    stage = stages.find("default", "")
    assert (stage.rolled_back, stage.trial, stage.by) == (True, False, "the verdict")
    assert stage.why.startswith("worse by ")
    # what waited is trained now
    assert len((await asyncio.wait_for(trainer, 30)).groups) == server.JOB.batch_size


async def test_a_suite_is_asked_while_training_waits_and_its_proof_is_part_of_the_promotion(
    rig: server.Rig, upstream: Upstream, tmp_path: Path
) -> None:
    judge = """
def on_compute_relative_reward(task, candidates, context):
    return [float(one.source != "incumbent") for one in candidates]
"""
    rig.controller.rollout_ready(server.ready(rig.vllm_address, 3))
    rig.vllm.default = lambda sent: several(plain_choice([1]), plain_choice([1, 2, 3], index=1))(sent)
    (tmp_path / "sums.jsonl").write_text('{"prompt": "1 + 1"}\n{"prompt": "2 + 2"}\n')
    suites = {"sums": str(tmp_path / "sums.jsonl")}
    gate = {"mode": "auto", "trial_every": 3, "max_length": None, "suites": suites}
    serve = {"incumbent": {"upstream": {"base_url": upstream.url, "model": "gpt"}}, "gate": gate}
    pool, url = rig.controller.pool, str(rig.client.base_url)
    trainer = asyncio.create_task(rig.controller.next_batch())
    async with gateway_before(url, tmp_path, reward=judge, serve=serve) as http, asyncio.timeout(60):
        while not pool.stages.pointers or pool.stages.find("default", "").share == 0:
            assert (await http.post(CHAT, json=BODY)).status_code == 200
        assert pool.stages.holds and not trainer.done()
    assert pool.stages.find("default", "").why.endswith("; 1 of 1 suites not worse")
    prompts = [got.body["messages"][-1]["content"] for got in upstream.got]
    # drawn with replacement: a proof may come before each of them was
    drawn = {*prompts} & {"1 + 1", "2 + 2"}
    assert drawn and {*prompts} == drawn | {"hello"}
    # groups of the users alone were claimed, and none is an evaluation
    users = sum(prompt == BODY["messages"][-1]["content"] for prompt in prompts)
    assert pool.information().completed_tasks <= users < len(prompts) and not pool.evaluations.results()
    trainer.cancel()


@pytest.mark.parametrize(
    ("path", "body"),
    [(CHAT, BODY), ("/v1/messages", {"model": "m", "max_tokens": 9, "messages": BODY["messages"]})],
)
async def test_one_engine_answers_as_the_incumbent_and_as_the_challenger(
    rig: server.Rig, tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    rig.controller.offline("stopped")
    rig.controller.sync_job(server.JOB.model_copy(update={"lora": LoraSettings(rank=4)}))
    rig.controller.boot()
    rig.controller.rollout_ready(server.ready(rig.vllm_address, 7))
    settings = {"serve": {"incumbent": {"policy": "promoted"}}}
    async with gateway_before(str(rig.client.base_url), tmp_path, **settings) as http:
        answer = await http.post(path, json=body)
        assert (answer.status_code, answer.headers["x-swarm-source"]) == (200, "incumbent"), answer.text
        async with asyncio.timeout(30):
            while (await http.get("/status")).json()["shadows"] != {"trained": 1}:
                pass
        [comparison] = (await rig.client.get("/status")).json()["comparisons"]
        rig.controller.offline("stopped")
        away = await http.post(path, json=body)
    assert comparison["incumbent"] == "the job's model", comparison
    first, *group = [sent["model"] for _, sent in rig.vllm.requests]
    assert first == kept_model(ENGINE_MODEL, BASE) and set(group) == {ENGINE_MODEL}
    assert away.status_code == 503 and away.headers["retry-after"]


async def test_a_rollback_reaches_users_while_the_disk_of_the_swarm_server_is_full(
    rig: server.Rig, upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.server.journal.journal.SYNC_SECONDS", 0.3)
    incumbent = {"upstream": {"base_url": upstream.url, "model": "gpt"}}
    # nobody claims for what is not trained, so a full disk keeps no challenger from answering it
    settings = {"serve": {"incumbent": incumbent, "stage": "live"}, "data": {"consent": "opt_in"}}

    async def answers(http: Http, side: str) -> None:
        async with asyncio.timeout(30):
            while (await http.post(CHAT, json=BODY)).headers["x-swarm-source"] != side:
                pass

    async with gateway_before(str(rig.client.base_url), tmp_path, **settings) as http:
        await answers(http, "challenger")
        with full_disk(tmp_path / "journal.db"):
            refused = await rig.client.post("/policies/rollback", json={"reason": "users complain"})
            assert refused.json()["error"]["code"] == "journal_unavailable"
            await answers(http, "incumbent")
