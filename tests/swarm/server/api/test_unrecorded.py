"""The engine's own addresses on the swarm server: served without an episode, recorded and trained never."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from msgspec import structs

from swarm.states import EngineState
from tests.standins.vllm import (
    ENGINE_MODEL,
    completion_chunk,
    plain_choice,
    role_chunk,
    several,
    status,
    streamed,
    token_chunk,
    usage_chunk,
)
from tests.swarm.server.conftest import JOB, Rig, ready

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "whatever", "messages": [{"role": "user", "content": "hi"}]}


def events(response: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def test_a_chat_samples_as_the_caller_asks_and_leaves_no_trace(rig: Rig) -> None:
    response = await rig.client.post(CHAT, json=BODY | {"temperature": 0.1, "seed": 3, "n": 2})
    assert response.status_code == 200 and response.headers["x-swarm-policy-version"] == "0"
    answer = response.json()
    assert answer["model"] == "tiny" and "prompt_token_ids" not in answer
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["t1 t2"] * 2
    [(path, sent)] = rig.vllm.requests
    assert path == CHAT and (sent["temperature"], sent["seed"], sent["n"]) == (0.1, 3, 2)
    assert sent["model"] == ENGINE_MODEL and sent["logprobs"] is False
    information = rig.controller.pool.information()
    assert (information.running_episodes, information.completed_episodes) == (0, 0)


async def test_logprobs_are_there_for_who_asks(rig: Rig) -> None:
    answer = (await rig.client.post(CHAT, json=BODY | {"logprobs": True})).json()
    assert len(answer["choices"][0]["logprobs"]["content"]) == 2


async def test_a_chat_streams_and_goes_on_after_an_abort(rig: Rig) -> None:
    rig.vllm.script += [
        streamed(role_chunk(), token_chunk([1]), token_chunk([], finish="abort"), usage_chunk(1)),
        streamed(completion_chunk([2], finish="stop", prompt=[11, 12, 13, 1])),
    ]
    response = await rig.client.post(CHAT, json=BODY | {"stream": True})
    chunks = events(response)
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == "t1 t2 "
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "stop"
    assert {chunk["model"] for chunk in chunks} == {"tiny"}


async def test_it_serves_on_while_a_batch_is_finished_and_trained(rig: Rig) -> None:
    for task in range(JOB.batch_size):
        for _ in range(JOB.num_repeat):
            episode = await rig.claim()
            await episode.chat()
            await episode.end(f"task-{task}")
    late = asyncio.create_task(rig.controller.next_batch())
    await rig.eventually(lambda: rig.controller.engine.state is not EngineState.ROLLING)
    assert (await rig.client.post(CHAT, json=BODY)).status_code == 200
    await late
    assert rig.controller.engine.state is EngineState.WEIGHT_SYNCING
    assert (await rig.client.post(CHAT, json=BODY)).status_code == 200


async def test_an_engine_that_sleeps_while_it_trains_is_not_waited_for(rig: Rig) -> None:
    rig.controller.rollout_ready(structs.replace(ready(rig.vllm_address), stays_awake=False))
    assert (await rig.client.post(CHAT, json=BODY)).status_code == 200
    await _trained(rig)
    for path in (CHAT, "/v1/completions"):
        response = await rig.client.post(path, json=BODY)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_syncing")
        assert response.headers["retry-after"] and response.headers["x-should-retry"] == "true"


async def _trained(rig: Rig) -> str:
    """The engine takes a batch; its id."""
    for task in range(JOB.batch_size):
        for _ in range(JOB.num_repeat):
            episode = await rig.claim()
            await episode.chat()
            await episode.end(f"task-{task}")
    return (await rig.controller.next_batch()).batch_id


async def test_without_an_engine_it_says_when_to_come_back(rig: Rig) -> None:
    rig.controller.offline("stopped")
    for path in (CHAT, "/v1/completions", "/tokenize"):
        response = await rig.client.post(path, json=BODY)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_offline")
        assert response.headers["retry-after"]
    assert (await rig.client.get("/v1/models")).json()["data"][0]["id"] == "tiny"


async def test_the_model_tells_its_context_and_what_sdks_ask_of_it(rig: Rig) -> None:
    listed = (await rig.client.get("/v1/models")).json()
    (card,) = listed["data"]
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "tiny", "tiny")
    job = rig.controller.job
    assert card["max_model_len"] == job.max_prompt_length + job.max_response_length
    assert (card["type"], card["display_name"], card["created_at"]) == ("model", "tiny", "1970-01-01T00:00:00Z")
    assert (await rig.client.get("/v1/models/tiny")).json() == card
    other = await rig.client.get("/v1/models/org/other")
    assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings", "/tokenize", "/detokenize"])
async def test_the_engines_other_addresses_are_passed_on(rig: Rig, path: str) -> None:
    rig.vllm.script.append(status(200, {"model": ENGINE_MODEL, "odd": [1, 2], "choices": []}))
    response = await rig.client.post(path, json={"model": "tiny", "prompt": "hi", "input": ["a"], "strange": 1})
    assert response.json() == {"model": "tiny", "odd": [1, 2], "choices": []}
    assert rig.vllm.requests == [(path, {"model": ENGINE_MODEL, "prompt": "hi", "input": ["a"], "strange": 1})]


async def test_a_refusal_of_the_engine_is_passed_on(rig: Rig) -> None:
    refusal = {"error": {"message": "no embeddings here", "type": "NotFoundError", "param": None, "code": 404}}
    rig.vllm.script.append(status(404, refusal))
    response = await rig.client.post("/v1/embeddings", json={"input": "a"})
    assert (response.status_code, response.json()) == (404, refusal)


async def test_a_completion_that_was_aborted_is_asked_for_again(rig: Rig) -> None:
    whole = {"choices": [{"text": "whole", "finish_reason": "stop"}]}
    rig.vllm.script += [status(200, {"choices": [{"text": "", "finish_reason": "abort"}]}), status(200, whole)]
    assert (await rig.client.post("/v1/completions", json={"prompt": "a"})).json() == whole
    rig.vllm.script += [streamed(completion_chunk([], "abort")), streamed(completion_chunk([7], "stop"))]
    response = await rig.client.post("/v1/completions", json={"prompt": "a", "stream": True})
    assert [event["choices"][0]["text"] for event in events(response)] == ["t7 "]
    assert events(response)[0]["model"] == "tiny"


async def test_a_completion_cut_after_its_first_words_says_so(rig: Rig) -> None:
    rig.vllm.script.append(streamed(completion_chunk([7]), completion_chunk([], "abort")))
    response = await rig.client.post("/v1/completions", json={"prompt": "a", "stream": True})
    assert response.status_code == 200
    last = json.loads(response.text.strip().splitlines()[-1].removeprefix("data: "))
    assert last["error"]["type"] == "upstream_error"


@pytest.mark.parametrize(("path", "body"), [(CHAT, BODY), ("/v1/completions", {"prompt": "a"})])
async def test_who_leaves_is_cancelled_in_the_engine(rig: Rig, path: str, body: dict[str, Any]) -> None:
    rig.vllm.default = rig.vllm.hang()
    loop = asyncio.get_running_loop()
    asking = asyncio.create_task(rig.client.post(path, json=body | {"stream": True}))
    await rig.eventually(lambda: rig.vllm.streaming == 1)
    left = loop.time()
    asking.cancel()
    async with asyncio.timeout(10):
        await rig.vllm.cancelled.wait()
    assert rig.vllm.cancellations[0] - left < 10


async def test_it_samples_as_a_group_would_and_leaves_no_trace(rig: Rig) -> None:
    rig.vllm.script.append(several(plain_choice([1]), plain_choice([1, 2, 3], index=1)))
    asked = BODY | {"temperature": 0.1, "seed": 3}
    response = await rig.client.post(CHAT, json=asked, headers={"x-swarm-samples": "2"})
    assert response.status_code == 200 and response.headers["x-swarm-completion-tokens"] == "1,3"
    choices = response.json()["choices"]
    assert [choice["message"]["content"] for choice in choices] == ["t1", "t1 t2 t3"]
    [(_, sent)] = rig.vllm.requests
    assert (sent["n"], sent["temperature"], sent["top_p"]) == (2, JOB.temperature, 1.0) and "seed" not in sent
    information = rig.controller.pool.information()
    assert (information.running_episodes, information.completed_episodes) == (0, 0)
    # what nobody looks at is not asked for
    await rig.client.post(CHAT, json=BODY, headers={"x-swarm-samples": "1"})
    assert rig.vllm.requests[-1][1]["logprobs"] is False


@pytest.mark.parametrize("samples", ["0", "x", "-1", "", "1025", "²"])
async def test_a_number_of_samples_without_meaning_is_refused_by_name(rig: Rig, samples: str) -> None:
    response = await rig.client.post(CHAT, json=BODY, headers={"x-swarm-samples": samples.encode()})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "x-swarm-samples")
    assert not rig.vllm.requests
