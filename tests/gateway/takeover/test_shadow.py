"""The stage ``shadow``: the incumbent answers as if the gateway were not there; the challenger learns behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from swarm.evidence.pairs import Pair
from swarm.protocol import BATCH_WAITS
from swarm.states import EngineState
from tests.gateway.conftest import BODY, CHAT, OpenGateway, ask, write_hooks
from tests.standins.swarm import Swarm, as_one, completion, error, once, said, streamed
from tests.standins.upstream import Upstream

pytestmark = pytest.mark.anyio

#: The reward of k words is k / 10, the incumbent's too.
JUDGE = """
def on_compute_relative_reward(task, candidates, context):
    assert sorted(one.source for one in candidates) == ["incumbent"] + ["policy"] * (len(candidates) - 1)
    assert [one.index for one in candidates] == list(range(len(candidates)))
    return [len(one.text.split()) / 10 for one in candidates]
"""
APART = """
def on_compute_relative_reward(task, candidates, context):
    sources = {one.source for one in candidates}
    assert sources == {"policy"} or (sources == {"incumbent"} and len(candidates) == 1), sources
    return [len(one.text.split()) / 10 for one in candidates]
"""
HOOK = "def on_compute_relative_reward(task, candidates, context):\n"


def serve(upstream: Upstream, **more: Any) -> dict[str, Any]:
    return {"serve": {"incumbent": {"upstream": {"base_url": upstream.url, "model": "gpt"}}, **more}}


def pairs_of(swarm: Swarm) -> list[Pair]:
    found = [*(end["pair"] for end in swarm.ends), *(one["pair"] for one in swarm.pairs)]
    return [Pair.model_validate(one) for one in found if one is not None]


async def known(http: httpx.AsyncClient, stage: str) -> None:
    """Wait until the gateway knows that this is its stage."""
    async with asyncio.timeout(30):
        while (await http.get("/status")).json()["routes"]["default"]["stage"] != stage:
            pass


async def became(http: httpx.AsyncClient, **counts: int) -> None:
    """Wait until the groups in the shadow have become that."""
    async with asyncio.timeout(30):
        while (now := (await http.get("/status")).json()["shadows"]) != counts:
            assert sum(now.values()) <= sum(counts.values()), now


async def test_the_incumbent_answers_and_the_challenger_learns(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway
) -> None:
    async with open_gateway(**serve(upstream), reward=JUDGE) as http:
        response = await ask(http, odd=[1.5, None])
        assert response.json() == completion("from the upstream")
        assert response.headers["x-swarm-source"] == "incumbent"
        assert response.headers["x-swarm-trained"] == "false"
        assert "x-swarm-drop-reason" not in response.headers
        await became(http, trained=1)
        counted = 'gateway_shadows_total{outcome="trained",route="default"} 1.0'
        assert counted in (await http.get("/metrics")).text
    [got] = upstream.got
    assert got.body == BODY | {"odd": [1.5, None], "model": "gpt"}
    # the group has its own four answers and their rewards only
    [end] = swarm.ends
    assert [one["workflow_output"]["reward"] for one in end["ends"]] == [0.1, 0.2, 0.3, 0.4]
    assert not any(one["workflow_output"]["notes"]["delivered"] for one in end["ends"])
    [pair] = pairs_of(swarm)
    assert (pair.challenger.reward, pair.incumbent.reward) == (pytest.approx(0.25), pytest.approx(0.3))
    assert (pair.terms.route, pair.terms.model, pair.terms.challenger) == ("default", "tiny", 7)
    assert pair.terms.incumbent.startswith("gpt at 127.0.0.1:")
    assert (pair.terms.num_repeat, pair.challenger.answers, pair.challenger.failed) == (4, 4, 0)
    assert (pair.challenger.finish, pair.incumbent.finish, pair.incumbent.tokens) == ("stop", "stop", 3)
    assert (pair.challenger.characters, pair.incumbent.characters) == (pytest.approx(11.5), len("from the upstream"))
    assert pair.terms.code and pair.terms.hook.endswith("hooks") and not pair.unjudged


async def test_an_incumbent_that_is_a_version_of_the_job_says_which(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway
) -> None:
    settings = serve(upstream)
    settings["serve"]["incumbent"]["policy"] = 5
    async with open_gateway(**settings, reward=JUDGE) as http:
        response = await ask(http)
        assert (response.headers["x-swarm-source"], response.headers["x-swarm-policy-version"]) == ("incumbent", "5")
        await became(http, trained=1)
    [pair] = pairs_of(swarm)
    assert (pair.terms.incumbent, pair.terms.challenger) == ("gpt, version 5", 7)
    [stage] = swarm.stages.pointers.values()
    assert stage.tried == 5


async def test_a_group_that_a_weight_sync_parts_is_no_evidence_of_the_later_version(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway
) -> None:
    versions = iter("7787")

    class Step(int):
        def __str__(self) -> str:
            return next(versions)

    swarm.grouped, swarm.step = False, Step(7)
    async with open_gateway(**serve(upstream), reward=JUDGE) as http:
        await ask(http)
        await became(http, trained=1)
    [pair] = pairs_of(swarm)
    # of version 8 a trial may begin, all of whose answers are its own
    assert pair.terms.challenger == 7


async def test_a_judge_that_prefers_a_place_prefers_no_side(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway
) -> None:
    judge = f"{HOOK}    return [one.index / 4 for one in candidates]\n"
    async with open_gateway(**serve(upstream), reward=judge) as http:
        for number in range(16):
            await ask(http)
            await became(http, trained=number + 1)
    found = [(pair.incumbent.reward, pair.challenger.reward) for pair in pairs_of(swarm)]
    assert len({theirs for theirs, _ in found}) > 1, "it was always the last"
    assert all(ours == pytest.approx((2.5 - theirs) / 4) for theirs, ours in found if theirs is not None)


async def test_the_incumbent_may_be_judged_apart(swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway) -> None:
    async with open_gateway(**serve(upstream, gate={"reference": False, "bounds": [0, 2]}), reward=APART) as http:
        await ask(http)
        await became(http, trained=1)
    [pair] = pairs_of(swarm)
    assert (pair.challenger.reward, pair.incumbent.reward) == (pytest.approx(0.125), pytest.approx(0.15))
    assert pair.terms.rules.bounds == (0, 2) and not pair.terms.rules.reference


@pytest.mark.parametrize("stage", ["shadow", "live"])
async def test_another_hook_may_judge_for_the_verdict(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway, tmp_path: Path, stage: str
) -> None:
    training = f"{HOOK}    assert {{one.source for one in candidates}} == {{'policy'}}\n    return [1.0, 2, 3, 4]"
    gate = {"hook": str(write_hooks(tmp_path / "gate", reward=JUDGE).resolve())}
    settings = serve(upstream, stage=stage, watch_share=1, gate=gate)
    async with open_gateway(**settings, reward=training) as http:
        await known(http, stage)
        await ask(http)
        await became(http, **({"trained": 1} if stage == "shadow" else {"compared": 1}))
    [end] = swarm.ends
    assert [one["workflow_output"]["reward"] for one in end["ends"]] == [1, 2, 3, 4]
    [pair] = pairs_of(swarm)
    assert (pair.challenger.reward, pair.incumbent.reward) == (pytest.approx(0.25), pytest.approx(0.3))
    assert pair.terms.hook == gate["hook"]
    # the stage is moved by pairs of that hook, and its rules know it
    [stage_] = swarm.stages.pointers.values()
    assert (stage_.rules.hook, stage_.rules.code) == (pair.terms.hook, pair.terms.code)


async def test_a_gate_that_does_not_judge_trains_and_proves_nothing(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway, tmp_path: Path
) -> None:
    gate = {"hook": str(write_hooks(tmp_path / "gate", reward=f"{HOOK}    raise ValueError('away')"))}
    async with open_gateway(**serve(upstream, gate=gate), reward=f"{HOOK}    return [1.0, 2, 3, 4]") as http:
        await ask(http)
        await became(http, trained=1)
    [pair] = pairs_of(swarm)
    assert pair.unjudged == "the hook failed" and pair.challenger.reward is None


async def test_a_stream_passes_as_it_came(swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway) -> None:
    parts = [b'data: {"choices": [{"index": 0, "delta": {"content": "a b"}}]}\n', b'\n: odd\n\ndata: {"id": 1, "cho']
    parts += [b'ices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\n', b"data: [DONE]\n\n"]

    async def body() -> Any:
        for part in parts:
            yield part

    upstream.answers[CHAT] = lambda _: StreamingResponse(body(), media_type="text/event-stream")
    async with open_gateway(**serve(upstream), reward=JUDGE) as http:
        response = await ask(http, stream=True)
        assert response.content == b"".join(parts)
        assert response.headers["x-swarm-source"] == "incumbent"
        await became(http, trained=1)
    [pair] = pairs_of(swarm)
    assert pair.incumbent.reward == pytest.approx(0.2)


async def test_the_first_token_waits_for_nobody_and_who_hangs_up_is_not_shadowed(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway
) -> None:
    upstream.answers[CHAT] = lambda _: upstream.hanging()
    async with open_gateway(**serve(upstream), reward=JUDGE) as http:
        async with http.stream("POST", CHAT, json=BODY | {"stream": True}) as response:
            assert await anext(response.aiter_bytes()) == b"data: {}\n\n"
            assert not swarm.claims
        await upstream.left.wait()
        await became(http, not_whole=1)
    assert not swarm.claims


async def test_who_hangs_up_at_the_finish_reason_has_the_whole_answer(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway
) -> None:
    """As AnythingLLM does."""
    chunk = b'data: {"choices": [{"index": 0, "delta": {"content": "a b"}, "finish_reason": "stop"}]}\n\n'
    upstream.answers[CHAT] = lambda _: upstream.hanging(chunk)
    async with open_gateway(**serve(upstream), reward=JUDGE) as http:
        async with http.stream("POST", CHAT, json=BODY | {"stream": True}) as response:
            assert await anext(response.aiter_bytes()) == chunk
        await became(http, trained=1)
    [pair] = pairs_of(swarm)
    assert pair.incumbent.reward == pytest.approx(0.2)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_errors_of_the_incumbent_come_as_they_are(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway, stream: bool
) -> None:
    upstream.answers[CHAT] = lambda _: error(429, "slower", retry_after="7")
    async with open_gateway(**serve(upstream)) as http:
        response = await ask(http, stream=stream)
        assert (response.status_code, response.json()["error"]["message"]) == (429, "slower")
        assert response.headers["retry-after"] == "7"
        await became(http, not_whole=1)
    assert not swarm.claims


@pytest.mark.parametrize("stage", ["shadow", "live"])
async def test_the_tools_that_an_incumbent_may_call_are_those_that_it_was_asked_with(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway, stage: str
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    upstream.answers[CHAT] = lambda _: said(None, tool_calls=[call])
    judge = "from reward_hooks.builtin.rules.tools import ToolCalls\non_compute_relative_reward = ToolCalls()\n"
    async with open_gateway(**serve(upstream, stage=stage, watch_share=1.0), reward=judge) as http:
        await known(http, stage)
        tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
        assert (await ask(http, tools=tools)).status_code == 200
        await became(http, **({"trained": 1} if stage == "shadow" else {"compared": 1}))
    [pair] = pairs_of(swarm)
    assert (pair.incumbent.reward, pair.unjudged) == (1.0, "")


@pytest.mark.parametrize("sdk", [{}, {"x-stainless-retry-count": "0"}])
async def test_who_hangs_up_at_the_end_of_the_answer_has_it_whole(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway, sdk: Mapping[str, str]
) -> None:
    """As OpenAI's SDK does on ``[DONE]``, which may come before the end of the body."""
    chunk = {"choices": [{"index": 0, "delta": {"content": "one two"}, "finish_reason": "stop"}]}
    whole = b"data: " + json.dumps(chunk).encode() + b"\n\ndata: [DONE]\n\n"
    upstream.answers[CHAT] = lambda _: upstream.hanging(whole)
    async with open_gateway(**serve(upstream), reward=JUDGE) as http:
        async with http.stream("POST", CHAT, json=BODY | {"stream": True}, headers=sdk) as response:
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    break
        await became(http, trained=1)
    [pair] = pairs_of(swarm)
    assert pair.incumbent.reward == pytest.approx(0.2)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_ends_with_an_error_is_not_compared(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway, stream: bool
) -> None:
    """As OpenRouter ends one whose provider broke off: status 200, half a text and the finish reason ``error``."""
    failed = {"error": {"code": 502, "message": "Provider disconnected"}}
    chunk = {"choices": [{"index": 0, "delta": {"content": "half a"}, "finish_reason": None}]}
    last = {**failed, "choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": "error"}]}
    events = b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in (chunk, last))
    plain = completion("half a", finish_reason="error")
    upstream.answers[CHAT] = lambda _: (
        Response(events, media_type="text/event-stream") if stream else JSONResponse(plain)
    )
    async with open_gateway(**serve(upstream), reward=JUDGE) as http:
        response = await ask(http, stream=stream)
        assert response.content == events if stream else response.json() == plain
        await became(http, unread=1)
    assert not swarm.claims and not pairs_of(swarm)


async def test_a_hook_that_counts_tokens_trains_behind_an_incumbent_that_does_not_tell_them(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway
) -> None:
    upstream.answers[CHAT] = lambda _: JSONResponse({**completion("so"), "usage": {}})
    judge = "from reward_hooks.builtin.rules.text import Length\n"
    judge += "on_compute_relative_reward = Length(10, 1, unit='tokens')\n"
    async with open_gateway(**serve(upstream), reward=judge) as http:
        await ask(http)
        await became(http, trained=1)
    [pair] = pairs_of(swarm)
    assert pair.incumbent.reward is None and pair.unjudged.endswith("the incumbent's answer: no_usage")


@pytest.mark.parametrize("odd", [{"tool_calls": "none"}, {"tool_calls": [{"function": "look"}]}, {"usage": "many"}])
async def test_an_answer_that_no_hook_could_be_given_is_the_users_and_leaves_no_episode_open(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway, odd: dict[str, Any]
) -> None:
    answer = completion("as it came")
    (answer if "usage" in odd else answer["choices"][0]["message"]).update(odd)
    upstream.answers[CHAT] = lambda _: JSONResponse(answer)
    async with open_gateway(**serve(upstream), reward=JUDGE) as http:
        assert (await ask(http)).json() == answer
        await became(http, unread=1)
    assert not swarm.claims and not pairs_of(swarm)


async def test_what_the_gateway_cannot_read_is_the_incumbents_to_refuse(
    upstream: Upstream, open_gateway: OpenGateway
) -> None:
    async with open_gateway(**serve(upstream)) as http:
        response = await ask(http, messages="odd", headers={"x-swarm-policy": "odd"})
        assert response.json() == completion("from the upstream")
        # any model name is the incumbent's, and so are other addresses
        assert (await ask(http, model="never-heard-of")).status_code == 200
        upstream.default = JSONResponse({"data": []})
        assert (await http.post("/v1/embeddings", json={"model": "e", "input": "x"})).json() == {"data": []}
        cards = (await http.get("/v1/models")).json()["data"]
    assert [card["id"] for card in cards] == ["default", "big"] or [card["id"] for card in cards] == ["big"]


@pytest.mark.parametrize("trouble", ["offline", "booting", "syncing", "refusing", "hanging", "nobody"])
async def test_trouble_of_the_engine_is_never_felt(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway, trouble: str, nobody: str
) -> None:
    settings: dict[str, Any] = {}
    match trouble:
        case "offline" | "booting" | "syncing":
            swarm.state = EngineState[{"syncing": "WEIGHT_SYNCING"}.get(trouble, trouble.upper())]
        case "refusing":
            swarm.answer = lambda *_: error(500, "boom")
        case "hanging":
            swarm.silent = True
        case _:
            settings["swarm_url"] = nobody
    async with open_gateway(**serve(upstream, max_shadows=2), **settings, reward=JUDGE) as http:
        async with asyncio.timeout(10):
            for _ in range(5):
                assert (await ask(http)).json() == completion("from the upstream")
        assert (await http.get("/status")).json()["errors"] == {}
        swarm.silent = False
        await swarm._notify()  # pyright: ignore[reportPrivateUsage]


async def test_a_group_behind_one_user_never_waits_in_the_way_of_another(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway
) -> None:
    swarm.answer = once(go := asyncio.Event(), lambda *_: said("one"))
    async with open_gateway(**serve(upstream, max_shadows=1), reward=JUDGE) as http:
        await ask(http)
        await swarm.until(lambda: swarm.sampling)
        await ask(http)
        await became(http, busy=1)
        assert [claim["wait_seconds"] for claim in swarm.claims] == [0]
        go.set()
        await became(http, busy=1, trained=1)


async def test_pairs_come_in_the_order_in_which_their_groups_began(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway, tmp_path: Path
) -> None:
    go, judged = asyncio.Event(), tmp_path / "judged"

    async def answer(body: Mapping[str, Any], number: int) -> Response:
        if body["messages"][0]["content"] == "slow":
            await go.wait()
            return said("one two three")
        return said("one")

    swarm.answer = answer
    noted = f"    open({str(judged)!r}, 'a').close()\n"
    async with open_gateway(**serve(upstream), reward=JUDGE.replace("    return", f"{noted}    return")) as http:
        await ask(http, messages=[{"role": "user", "content": "slow"}])
        await swarm.until(lambda: swarm.sampling == 4)
        await ask(http, messages=[{"role": "user", "content": "quick"}])
        async with asyncio.timeout(30):
            while not judged.exists():
                await http.get("/status")
        go.set()
        await became(http, trained=2)
    assert [pair.challenger.reward for pair in swarm.compared] == [pytest.approx(0.3), pytest.approx(0.1)]


@pytest.mark.parametrize(
    ("headers", "settings"),
    [({"x-swarm-train": "false"}, {}), ({"x-swarm-train": "no"}, {}), ({}, {"shadow_fraction": 0})],
)
async def test_who_is_not_to_be_trained_is_answered_alone(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway, headers: Mapping[str, str], settings: dict[str, Any]
) -> None:
    async with open_gateway(**serve(upstream, **settings)) as http:
        assert (await ask(http, headers=headers)).json() == completion("from the upstream")
        await became(http, left_out=1)
    assert not swarm.claims


async def test_what_nobody_may_keep_has_no_shadow(swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway) -> None:
    async with open_gateway(**serve(upstream), data={"consent": "opt_in"}) as http:
        answer = await ask(http)
        assert answer.json() == completion("from the upstream")
        await became(http, left_out=1)
    assert not swarm.claims


@pytest.mark.parametrize(
    ("reward", "said_"),
    [
        (f"{HOOK}    raise ValueError('dead')\n", "the hook failed"),
        (f"{HOOK}    return [float('nan') for _ in candidates]\n", "the hook failed"),
        (f"{HOOK}    return [2.0 for _ in candidates]\n", "a reward is not within the bounds [0.0, 1.0]"),
    ],
)
async def test_what_nobody_judged_is_recorded_as_that(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway, reward: str, said_: str
) -> None:
    async with open_gateway(**serve(upstream), reward=reward) as http:
        await ask(http)
        await swarm.until(lambda: pairs_of(swarm))
    [pair] = pairs_of(swarm)
    assert (pair.difference, pair.unjudged) == (None, said_)


async def test_answers_that_fail_are_the_challengers(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway
) -> None:
    swarm.grouped = False
    swarm.answer = lambda body, number: error(500, "boom") if number % 4 == 0 else said("one")
    async with open_gateway(**serve(upstream), reward=JUDGE) as http:
        await ask(http)
        await swarm.until(lambda: pairs_of(swarm))
        swarm.answer = lambda *_: error(500, "boom")
        await ask(http)
        await swarm.until(lambda: len(pairs_of(swarm)) == 2)
    some, all_ = pairs_of(swarm)
    assert (some.challenger.failed, some.unjudged) == (0.25, "1 of 4 answers failed")
    assert (all_.challenger.failed, all_.unjudged) == (1.0, "4 of 4 answers failed")
    assert not swarm.open_episodes and not swarm.ends


def needs_no_groups(swarm: Swarm) -> None:
    """Its batch waits, so that it grants no group, and answers untrained."""

    async def answer(request: Request) -> Response:
        return as_one([said("one two")] * int(request.headers["x-swarm-samples"]))

    async def none_needed(request: Request) -> Response:
        client = (await request.json())["client_uuid"]
        return JSONResponse({"success": False, "client_uuid": client, "fail_cause": BATCH_WAITS})

    swarm.app.router.routes.insert(0, Route("/claim_group", none_needed, methods=["POST"]))
    swarm.app.router.routes.append(Route(CHAT, answer, methods=["POST"]))


async def test_while_nothing_trains_both_are_compared_all_the_same(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway
) -> None:
    needs_no_groups(swarm)
    async with open_gateway(**serve(upstream), reward=JUDGE) as http:
        await ask(http)
        await swarm.until(lambda: pairs_of(swarm))
        await became(http, compared=1)
    [pair] = pairs_of(swarm)
    assert (pair.challenger.reward, pair.incumbent.reward) == (pytest.approx(0.2), pytest.approx(0.3))


async def test_between_two_trials_only_what_trains_is_sampled(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway
) -> None:
    needs_no_groups(swarm)
    gate = {"mode": "auto", "trial_every": 20}
    async with open_gateway(**serve(upstream, gate=gate), reward=JUDGE) as http:
        await known(http, "shadow")
        await ask(http)
        await became(http, batch_waits=1)
        assert not pairs_of(swarm)
        swarm.step = 20
        swarm.stages.serves(20)
        while not pairs_of(swarm):
            # until the gateway knows of the trial
            assert (await ask(http)).headers["x-swarm-source"] == "incumbent"
    [pair, *_] = pairs_of(swarm)
    assert pair.challenger.answers == 4


async def test_where_the_server_has_no_trials_both_are_compared_while_nothing_trains(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a gateway whose token has the scope `claim` alone, whatever its file says of trials."""
    needs_no_groups(swarm)
    monkeypatch.setattr(swarm.stages, "follow", partial(swarm.stages.follow, sets_rules=False, may_hold=False))
    gate = {"mode": "manual", "trial_every": 20}
    async with open_gateway(**serve(upstream, gate=gate), reward=JUDGE) as http:
        await known(http, "shadow")
        await ask(http)
        await became(http, compared=1)
    assert pairs_of(swarm)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_dialect_that_the_incumbent_lacks_is_translated_and_compared(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway, path: str, stream: bool
) -> None:
    upstream.answers[CHAT] = lambda body: streamed("one", " two") if body.get("stream") else said("one two")
    body: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    if path == "/v1/responses":
        body = {"model": "m", "input": "hi"}
    async with open_gateway(**serve(upstream), reward=JUDGE) as http:
        response = await http.post(path, json=body | {"stream": stream})
        assert response.status_code == 200 and "two" in response.text
        assert response.headers["x-swarm-source"] == "incumbent"
        await became(http, trained=1)
    [pair] = pairs_of(swarm)
    assert pair.incumbent.reward == pytest.approx(0.2)
    assert json.loads(upstream.got[-1].raw)["model"] == "gpt"


async def test_an_odd_answer_costs_no_group(swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway) -> None:
    odd = completion("one two", finish_reason="\\ud800") | {"usage": {"completion_tokens": "many"}, "model": None}
    raw = json.dumps(odd).replace("\\\\ud800", "\\ud800").encode()
    assert b'"\\ud800"' in raw
    upstream.answers[CHAT] = lambda _: Response(raw, media_type="application/json")
    settings = serve(upstream)
    del settings["serve"]["incumbent"]["upstream"]["model"]
    async with open_gateway(**settings, reward=JUDGE) as http:
        response = await ask(http)
        assert response.content == raw
        await became(http, trained=1)
    [pair] = pairs_of(swarm)
    assert (pair.incumbent.finish, pair.incumbent.tokens) == ("\\ud800", None)
    assert pair.terms.incumbent.startswith("the model asked for at ")
