"""Who comes while no group can be trained gets the best of N all the same, and nothing of it is recorded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import structs

from gateway.rollout.answering import best
from gateway.rollout.return_policy import ReturnPolicy
from tests.gateway.conftest import ask, gateway_before
from tests.gateway.rollout.conftest import JOB, Judge, OpenRoute, asking, at_rest
from tests.gateway.rollout.test_best import reach, said
from tests.standins.vllm import plain, plain_choice, role_chunk, several, status, streamed, token_chunk, usage_chunk
from tests.swarm.server import conftest as server
from tests.swarm.server.dataplane.test_raw import told

pytestmark = pytest.mark.anyio

Bring = Callable[[server.Rig], Awaitable[None]]
#: Of four answers the third is the longest, which the hooks of these tests like best.
FOUR = several(*(plain_choice(list(range(1, words + 1)), index=k) for k, words in enumerate([1, 2, 4, 3])))
BEST = "t1 t2 t3 t4"


async def batch_waits(rig: server.Rig) -> None:
    """The trainer computes a step, and a whole batch for the next one waits."""
    rig.controller.rollout_ready(structs.replace(server.ready(rig.vllm_address), serving="always"))
    trainer = asyncio.create_task(rig.controller.next_batch())
    for task in range(2 * JOB.batch_size):
        for _ in range(JOB.num_repeat):
            episode = await rig.claim("other")
            await episode.chat()
            await episode.end(f"task-{task}")
    await trainer


async def all_steps_are_done(rig: server.Rig) -> None:
    rig.controller.rollout_ready(
        structs.replace(server.ready(rig.vllm_address), next_step=JOB.total_training_steps + 1)
    )


async def trainer_away(rig: server.Rig) -> None:
    rig.controller.trainer_died("killed")


async def another_app_trains(rig: server.Rig) -> None:
    """So that a share holds; the first group of the route fills it."""
    await rig.claim("other")


async def every_slot_is_taken(rig: server.Rig) -> None:
    for _ in range(JOB.slots):
        await rig.claim("other")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("bring", "settings", "reason"),
    [
        (batch_waits, {}, "batch_waits"),
        (all_steps_are_done, {}, "batch_waits"),
        (trainer_away, {}, "trainer_away"),
        (another_app_trains, {"share": 0.5}, "throttled"),
        (every_slot_is_taken, {"claim_wait_seconds": 0.05}, "no_episodes"),
    ],
)
async def test_the_best_of_n_is_answered_and_nothing_is_recorded(
    rig: server.Rig, tmp_path: Path, bring: Bring, settings: dict[str, Any], reason: str, stream: bool
) -> None:
    await bring(rig)
    async with gateway_before(str(rig.client.base_url), tmp_path, **settings) as http:
        if reason == "throttled":
            assert (await ask(http)).headers["x-swarm-trained"] == "true"
        rig.vllm.requests.clear()
        before, records = rig.controller.pool.information(), await journal_at_rest(rig)
        rig.vllm.script.append(FOUR)
        answer = await ask(http, stream=stream, temperature=0.0, seed=3)
        assert answer.status_code == 200 and content(answer, stream) == BEST
        headers = {name: answer.headers[f"x-swarm-{name}"] for name in ("trained", "drop-reason", "reward")}
        assert headers == {"trained": "false", "drop-reason": reason, "reward": "0.4"}
        # as the answers of a group that trains are sampled
        [(_, sent)] = rig.vllm.requests
        assert (sent["n"], sent["temperature"]) == (JOB.num_repeat, JOB.temperature) and "seed" not in sent
        assert rig.controller.pool.information() == before and await journal_at_rest(rig) == records
        counts = (await http.get("/status")).json()
        assert counts["answers"]["judged_untrained"] == 1 and sum(counts["answers"].values()) == counts["requests"]
        assert counts["groups"]["dropped"] == counts["errors"] == {}
        metrics = (await http.get("/metrics")).text
        assert 'gateway_answers_total{chosen="judged_untrained",route="default"} 1.0' in metrics


async def journal_at_rest(rig: server.Rig) -> int:
    """The records of the journal, once none waits for the disk."""
    while True:
        journal = (await rig.client.get("/status")).json()["journal"]
        if not journal["pending"]:
            return journal["records"]


def content(answer: httpx.Response, stream: bool) -> str:
    if not stream:
        return answer.json()["choices"][0]["message"]["content"]
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return "".join(one["delta"].get("content") or "" for event in events for one in event["choices"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": "hi", "max_tokens": 9}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}),
        ("/v1/responses", {"input": "hi"}),
    ],
)
async def test_in_every_dialect(
    rig: server.Rig, tmp_path: Path, path: str, asked: dict[str, Any], stream: bool
) -> None:
    await trainer_away(rig)
    rig.vllm.default = told([21], [21, 22], [21, 22, 23, 24], [21, 22, 23]) if "prompt" in asked else FOUR
    best_text = "t21 t22 t23 t24" if "prompt" in asked else BEST
    async with gateway_before(str(rig.client.base_url), tmp_path) as http:
        answer = await http.post(path, json={"model": "tiny", "stream": stream, **asked})
        assert answer.status_code == 200, answer.text
        assert joined(answer, stream) == best_text
        assert [sent["n"] for _, sent in rig.vllm.requests] == [JOB.num_repeat]
        assert (await http.get("/status")).json()["answers"] == {"judged_untrained": 1}


def joined(answer: httpx.Response, stream: bool) -> str:
    """The text of an answer in any dialect but chat."""
    if stream:
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    else:
        events = [answer.json()]
    texts: list[str] = []
    for event in events:
        match event:
            case {"type": "content_block_delta", "delta": {"text": text}}:
                texts.append(text)
            case {"type": "response.output_text.delta", "delta": text}:
                texts.append(text)
            case {"choices": [{"text": text}]}:
                texts.append(text)
            case {"content": [{"text": text}]} | {"output": [{"content": [{"text": text}]}]} if not stream:
                texts.append(text)
            case _:
                pass
    return "".join(texts).strip()


@pytest.mark.parametrize(
    ("route", "header", "answers"),
    [({}, "single", 1), ({"when_batch_waits": "single"}, None, 1), ({"when_batch_waits": "single"}, "best", 4)],
)
async def test_a_route_or_a_header_says_that_one_will_do(
    rig: server.Rig, tmp_path: Path, route: dict[str, Any], header: str | None, answers: int
) -> None:
    await trainer_away(rig)
    rig.vllm.default = plain([1, 2])
    headers = {} if header is None else {"x-swarm-when-batch-waits": header}
    async with gateway_before(str(rig.client.base_url), tmp_path, **route) as http:
        answer = await ask(http, headers)
        assert (answer.status_code, answer.headers["x-swarm-drop-reason"]) == (200, "trainer_away")
        assert ("x-swarm-reward" in answer.headers) is (answers > 1)
        assert [sent.get("n", 1) for _, sent in rig.vllm.requests] == [answers]
        chosen = "judged_untrained" if answers > 1 else "single"
        assert (await http.get("/status")).json()["answers"] == {chosen: 1}
        refused = await ask(http, {"x-swarm-when-batch-waits": "worst"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "x-swarm-when-batch-waits")


@pytest.mark.parametrize(("repeat", "asked", "answers"), [(2, 1, 2), (2, 3, 3), (9, 1, 4)])
async def test_such_groups_may_be_smaller(
    rig: server.Rig, open_route: OpenRoute, judge: Judge, repeat: int, asked: int, answers: int
) -> None:
    await trainer_away(rig)
    async with open_route(untrained_repeat=repeat) as route:
        decided = await best(route, asking(n=asked), None, ReturnPolicy())
        assert len(decided.completion["choices"]) == asked
        assert [len(candidates) for candidates in judge.asked] == [answers]
        assert [sent["n"] for _, sent in rig.vllm.requests] == [answers]


@pytest.mark.parametrize("on_disconnect", ["cancel", "finish"])
@pytest.mark.parametrize("policy", [ReturnPolicy(), ReturnPolicy(quorum=3)])
async def test_who_leaves_cancels_every_sample(
    rig: server.Rig, open_route: OpenRoute, policy: ReturnPolicy, on_disconnect: str
) -> None:
    await trainer_away(rig)
    rig.vllm.default = rig.vllm.hang()
    calls = 1 if policy.quorum is None else 4
    async with open_route(on_disconnect=on_disconnect) as route:
        waiting = asyncio.create_task(best(route, asking(), None, policy))
        await reach(rig, lambda: rig.vllm.streaming == calls)
        waiting.cancel()
        await reach(rig, lambda: len(rig.vllm.cancellations) == calls)
        await at_rest(rig, route)
        assert not route.stats.groups.dropped and not route.stats.answers


async def test_who_left_before_it_was_known_that_nothing_trains_is_not_sampled_for(
    rig: server.Rig, open_route: OpenRoute
) -> None:
    await every_slot_is_taken(rig)
    rig.vllm.requests.clear()
    async with open_route(on_disconnect="finish") as route:
        waiting = asyncio.create_task(best(route, asking(), None, ReturnPolicy()))
        await reach(rig, lambda: len(rig.controller.episodes.claims) == 1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await trainer_away(rig)
        await route.swarm.background.settle(20)
        assert not rig.vllm.requests


async def test_stragglers_are_cancelled_because_nobody_trains_on_them(
    rig: server.Rig, open_route: OpenRoute, judge: Judge
) -> None:
    await trainer_away(rig)
    rig.vllm.script += [plain([1]), plain([1, 2]), rig.vllm.hang(), rig.vllm.hang()]
    async with open_route(stragglers="finish") as route:
        decided = await best(route, asking(), None, ReturnPolicy(quorum=2))
        assert said(decided) == "t1 t2" and decided.headers["x-swarm-drop-reason"] == "trainer_away"
        await reach(rig, lambda: len(rig.vllm.cancellations) == 2)
        await at_rest(rig, route)
        assert [len(asked) for asked in judge.asked] == [2]


async def test_a_hook_that_fails_leaves_an_answer_that_says_so(rig: server.Rig, tmp_path: Path) -> None:
    await trainer_away(rig)
    broken = "def on_compute_relative_reward(task, candidates, context):\n    raise ValueError\n"
    async with gateway_before(str(rig.client.base_url), tmp_path, reward=broken) as http:
        answer = await ask(http)
        assert (answer.status_code, content(answer, False)) == (200, "t1 t2")
        assert answer.headers["x-swarm-drop-reason"] == "reward_hook_failed" and "x-swarm-reward" not in answer.headers
        counts = (await http.get("/status")).json()
        assert counts["answers"] == {"unjudged": 1} and sum(counts["hook_failures"].values()) == 1


async def test_a_submit_hook_that_fails_leaves_one_answer_that_says_so(rig: server.Rig, tmp_path: Path) -> None:
    await trainer_away(rig)
    broken = "def on_user_submit_new_requests(request, context):\n    raise ValueError\n"
    async with gateway_before(str(rig.client.base_url), tmp_path, submit=broken) as http:
        answer = await ask(http)
        assert (answer.status_code, answer.headers["x-swarm-drop-reason"]) == (200, "submit_hook_failed")
        assert (await http.get("/status")).json()["answers"] == {"single": 1}


async def test_the_submit_hook_shapes_such_a_group_too_and_is_asked_once(rig: server.Rig, tmp_path: Path) -> None:
    await trainer_away(rig)
    shaping = """
from reward_hooks import Submission
from swarm.types import Task
asked = 0

def on_user_submit_new_requests(request, context):
    global asked
    asked += 1
    bodies = [request.body | {"messages": [{"role": "user", "content": f"{asked}.{k}"}]} for k in range(4)]
    return Submission(task=Task(task_id=request.request_id), requests=bodies)
"""
    async with gateway_before(str(rig.client.base_url), tmp_path, submit=shaping, untrained_repeat=3) as http:
        assert (await ask(http)).headers["x-swarm-reward"] == "0.2"
    prompts = [sent["messages"][0]["content"] for _, sent in rig.vllm.requests]
    assert sorted(prompts) == ["1.0", "1.1", "1.2"]
    assert {sent["temperature"] for _, sent in rig.vllm.requests} == {JOB.temperature}


async def test_tool_calls_are_judged_and_delivered(rig: server.Rig, tmp_path: Path) -> None:
    await trainer_away(rig)
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    calls = {"message": {"role": "assistant", "content": "a b c d e", "tool_calls": [call]}}
    rig.vllm.default = several(*(plain_choice([1], index=k, **(calls if k == 2 else {})) for k in range(4)))
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    async with gateway_before(str(rig.client.base_url), tmp_path) as http:
        answer = await ask(http, tools=[tool])
        assert answer.json()["choices"][0]["message"]["tool_calls"] == [call]
        assert [sent["tools"] for _, sent in rig.vllm.requests] == [[tool]]


@pytest.mark.parametrize("stream", [False, True])
async def test_with_first_one_answer_goes_out_live_and_no_other_is_sampled(
    rig: server.Rig, tmp_path: Path, stream: bool
) -> None:
    await trainer_away(rig)
    live = streamed(role_chunk(), token_chunk([1], "stop"), usage_chunk(1))
    rig.vllm.default = lambda body: (live if body.get("stream") else plain([1]))(body)
    async with gateway_before(str(rig.client.base_url), tmp_path, policy="first") as http:
        answer = await ask(http, stream=stream)
        assert (answer.status_code, answer.headers["x-swarm-drop-reason"]) == (200, "trainer_away")
        assert [sent.get("n", 1) for _, sent in rig.vllm.requests] == [1]
        assert (await http.get("/status")).json()["answers"] == {"single": 1}


async def test_a_session_goes_on_and_waits_for_nothing(rig: server.Rig, tmp_path: Path) -> None:
    outcome = "def on_session_end(session, context):\n    return float(len(session.turns))\n"
    named = {"x-swarm-session": "s"}
    await trainer_away(rig)
    async with gateway_before(
        str(rig.client.base_url), tmp_path, session_end=outcome, feedback_window_seconds=600
    ) as http:
        messages = [{"role": "user", "content": "hi"}]
        for _ in range(2):
            answer = await ask(http, named, messages=messages)
            assert answer.headers["x-swarm-trained"] == "false"
            messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "and then?"}]
        rated = await http.post("/v1/feedback", json={"completion_id": answer.json()["id"], "score": 1})
        assert (rated.status_code, rated.json()["trains"]) == (200, False)
        counts = (await http.get("/status")).json()
        assert (counts["background"], counts["swarms"][0]["open_groups"]) == (0, 0)
        [on] = (await http.get("/v1/sessions/s")).json()["on"]
        [ledger] = on["agents"].values()
        assert (ledger["requests"], ledger["under_way"], ledger["passed"]) == (2, 0, {})
        assert {why: fate["answers"] for why, fate in ledger["dropped"].items()} == {"trainer_away": 8}
        assert (await http.post("/v1/sessions/s/end", json={})).json()["ended"]
        # nothing is credited to what is not trained
        async with asyncio.timeout(20):
            while (ended := (await http.get("/status")).json()["sessions"])["credit_dropped"] < 2:
                pass
        assert ended["credited"] == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_who_is_not_to_train_but_asks_for_the_best_gets_it(rig: server.Rig, tmp_path: Path, stream: bool) -> None:
    rig.vllm.default = FOUR
    async with gateway_before(str(rig.client.base_url), tmp_path) as http:
        answer = await ask(http, {"x-swarm-train": "false", "x-swarm-policy": "best"}, stream=stream)
        assert content(answer, stream) == BEST and answer.headers["x-swarm-drop-reason"] == "not_chosen"
        # who asks for no policy gets what the model itself says, sampled as the request says
        rig.vllm.default = plain([1])
        answer = await ask(http, {"x-swarm-train": "false"}, temperature=0.25)
        assert rig.vllm.requests[-1][1]["temperature"] == 0.25
        assert (await http.get("/status")).json()["answers"] == {"judged_untrained": 1, "single": 1}
        assert rig.controller.pool.information().completed_episodes == 0


async def test_an_engine_that_restarts_meanwhile_is_asked_again(rig: server.Rig, open_route: OpenRoute) -> None:
    await trainer_away(rig)
    rig.vllm.default = rig.vllm.hang()
    async with open_route() as route:
        waiting = asyncio.create_task(best(route, asking(), None, ReturnPolicy()))
        await reach(rig, lambda: rig.vllm.streaming == 1)
        rig.vllm.default = FOUR
        rig.controller.offline("killed by a test")
        rig.controller.boot()
        rig.controller.rollout_ready(server.ready(rig.vllm_address, 5))
        decided = await waiting
        assert (said(decided), decided.headers["x-swarm-policy-version"]) == (BEST, "5")
        await at_rest(rig, route)


async def test_without_an_engine_it_says_when_to_come_back(rig: server.Rig, tmp_path: Path) -> None:
    await every_slot_is_taken(rig)
    rig.vllm.default = status(503, {"error": {"message": "no"}})
    async with gateway_before(str(rig.client.base_url), tmp_path, claim_wait_seconds=0.05) as http:
        answer = await ask(http)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_episodes")
        assert answer.headers["retry-after"] and answer.headers["x-should-retry"] == "true"


async def test_who_is_not_to_train_waits_for_an_engine_within_the_bounds(rig: server.Rig, tmp_path: Path) -> None:
    rig.controller.offline("stopped")
    headers = {"x-swarm-train": "false", "x-swarm-policy": "best"}
    async with gateway_before(str(rig.client.base_url), tmp_path, offline_wait_seconds=0.05) as http:
        answer = await ask(http, headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_offline")
