"""Canary, live and rollback through whole gateways, before a swarm server whose stage machine is the real one."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio.lowlevel
import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from gateway.app import create_app
from gateway.config.gateway import GatewayConfig
from swarm.evidence.pairs import Pair
from swarm.states import EngineState
from tests.gateway.conftest import BODY, Http, OpenGateway, ask, gateway_before, serving, write_hooks
from tests.gateway.takeover.test_shadow import became, known, needs_no_groups, pairs_of, serve
from tests.standins.swarm import Swarm, by_number, error, hanging, said, streamed
from tests.standins.upstream import CHAT, Upstream
from tests.standins.vllm import chat_chunk

pytestmark = pytest.mark.anyio

REWARD = """
def on_compute_relative_reward(task, candidates, context):
    return [len(one.text.split()) / 10 for one in candidates]
"""


def move(swarm: Swarm, share: float) -> None:
    [stage] = swarm.stages.pointers.values()
    if share:
        swarm.stages.promote(stage, stage.version, "ann", "because", share=share)
    else:
        swarm.stages.roll_back(stage, stage.version, "ann", "worse")


async def test_live_the_challenger_answers_and_the_incumbent_is_asked_behind(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway
) -> None:
    async with open_gateway(**serve(upstream, stage="live", watch_share=1), reward=REWARD) as http:
        await known(http, "live")
        response = await ask(http)
        # the best of four has four words
        assert response.json()["choices"][0]["message"]["content"] == "word word word word"
        assert (response.headers["x-swarm-source"], response.headers["x-swarm-policy-version"]) == ("challenger", "7")
        assert response.headers["x-swarm-trained"] == "true" and 0 <= float(response.headers["x-swarm-position"]) < 1
        await became(http, compared=1)
    [end] = swarm.ends
    assert end["pair"] is None
    [pair] = pairs_of(swarm)
    assert (pair.side, pair.terms.stage, pair.terms.share, pair.begun) == ("challenger", "live", 1, (1, 0))
    assert (pair.challenger.reward, pair.incumbent.reward) == (pytest.approx(0.25), pytest.approx(0.3))
    assert pair.position == pytest.approx(float(response.headers["x-swarm-position"]), abs=1e-6)
    assert len(upstream.got) == 1


@pytest.mark.parametrize("stage", ["shadow", "live"])
async def test_each_prompt_of_a_list_is_answered(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway, stage: str
) -> None:
    """By the side that each is drawn for: a group is of one prompt, whoever answers."""
    upstream.answers["/v1/completions"] = lambda body: JSONResponse(
        {"choices": [{"index": 0, "text": body["prompt"], "finish_reason": "stop"}]}
    )
    async with open_gateway(**serve(upstream, stage=stage), reward=REWARD) as http:
        await known(http, stage)
        answer = await http.post("/v1/completions", json={"model": "tiny", "prompt": ["a", "b"], "echo": True})
        assert answer.status_code == 200, answer.text
        choices = answer.json()["choices"]
        assert [(choice["index"], choice["text"][0]) for choice in choices] == [(0, "a"), (1, "b")]
        rating = {"request_id": answer.headers["x-request-id"], "choice": 1, "label": "good"}
        assert (await http.post("/v1/feedback", json=rating)).status_code == (200 if stage == "live" else 404)


async def test_a_hook_gets_the_turns_before_both_answers(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway
) -> None:
    judge = f"{REWARD.splitlines()[1]}\n    return [float(one.session is not None) for one in candidates]\n"
    async with open_gateway(**serve(upstream, stage="live", watch_share=1), reward=judge) as http:
        await known(http, "live")
        for number in range(2):
            assert (await ask(http, headers={"x-swarm-session": "s"})).headers["x-swarm-source"] == "challenger"
            await became(http, compared=number + 1)
    assert [(pair.challenger.reward, pair.incumbent.reward) for pair in pairs_of(swarm)] == [(0, 0), (1, 1)]


async def test_what_the_challenger_cannot_the_incumbent_answers(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway
) -> None:
    async with open_gateway(**serve(upstream, stage="live", watch_share=1), reward=REWARD) as http:
        await known(http, "live")
        swarm.answer = lambda *_: error(400, "too long for a small model")
        for headers in ({}, {"x-swarm-policy": "odd"}):
            response = await ask(http, headers=headers)
            assert response.status_code == 200, response.text
            assert response.json()["choices"][0]["message"]["content"] == "from the upstream"
            assert response.headers["x-swarm-source"] == "incumbent"
        swarm.answer = lambda *_: error(500, "boom")
        assert (await ask(http)).headers["x-swarm-source"] == "incumbent"
        await swarm.until(lambda: len(pairs_of(swarm)) == 2)
    assert {(pair.challenger.failed, pair.side) for pair in pairs_of(swarm)} == {(1, "challenger")}
    assert not swarm.open_episodes


@pytest.mark.parametrize("trouble", ["hangs", "judge hangs", "lost", "left"])
async def test_who_waits_in_vain_is_the_challengers_failure(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway, trouble: str
) -> None:
    asked, forever = asyncio.Event(), asyncio.Event()

    async def hang(*_: Any) -> Any:
        asked.set()
        await forever.wait()

    seconds = 60 if trouble in ("left", "lost") else 0.5
    settings = serve(upstream, stage="live", watch_share=1, challenger_seconds=seconds)
    reward = "import time\n" + REWARD.replace("return", "time.sleep(2)\n    return")
    async with open_gateway(**settings, reward=reward if trouble == "judge hangs" else REWARD) as http:
        await known(http, "live")
        if trouble == "lost":
            swarm.answer = lambda *_: error(404, "no such episode", code="episode_lost")
        elif trouble != "judge hangs":
            swarm.answer = hang
        if trouble == "left":
            asking = asyncio.create_task(ask(http))
            await asyncio.wait_for(asked.wait(), 10)
            asking.cancel()
        else:
            async with asyncio.timeout(30):
                response = await ask(http)
            assert (response.status_code, response.headers["x-swarm-source"]) == (200, "incumbent")
        await swarm.until(lambda: len(pairs_of(swarm)) == 1)
    [pair] = pairs_of(swarm)
    assert (pair.challenger.failed, pair.side, bool(pair.unjudged)) == (1, "challenger", True)
    forever.set()
    assert not swarm.open_episodes


def slowly(wait: Callable[[], Awaitable[object]], *, first: bool) -> Callable[..., StreamingResponse]:
    """A stream of three words, which will ``wait`` before the last, or before the ``first``."""

    async def parts() -> AsyncIterator[str]:
        for number, word in enumerate(("one", " two", " three")):
            if number == (0 if first else 2):
                await wait()
            yield f"data: {json.dumps(chat_chunk({'delta': {'content': word}}))}\n\n"
        yield f"data: {json.dumps(chat_chunk({'delta': {}, 'finish_reason': 'stop'}))}\n\ndata: [DONE]\n\n"

    return lambda *_: StreamingResponse(parts(), media_type="text/event-stream")


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_that_go_out_before_they_are_judged_are_compared_too(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway, stream: bool
) -> None:
    settings = serve(upstream, stage="live", watch_share=1)
    upstream.answers[CHAT] = lambda _: streamed("well", " said") if stream else said("well said")
    async with open_gateway(**settings, policy="first", reward=REWARD) as http:
        await known(http, "live")
        response = await ask(http, stream=stream)
        assert response.headers["x-swarm-source"] == "challenger"
        await became(http, compared=1)
    [pair] = pairs_of(swarm)
    assert (pair.side, pair.terms.stage, pair.challenger.failed, pair.unjudged) == ("challenger", "live", 0, "")
    assert pair.challenger.reward == pytest.approx(0.275 if stream else 0.25)
    assert len(swarm.ends) == 1


async def test_while_a_batch_waits_they_are_compared_all_the_same(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway
) -> None:
    needs_no_groups(swarm)
    async with open_gateway(**serve(upstream, stage="live", watch_share=1), policy="first", reward=REWARD) as http:
        await known(http, "live")
        response = await ask(http)
        assert (response.headers["x-swarm-source"], response.headers["x-swarm-trained"]) == ("challenger", "false")
        assert response.headers["x-swarm-drop-reason"] == "batch_waits"
        await became(http, compared=1)
    [pair] = pairs_of(swarm)
    assert (pair.challenger.answers, pair.challenger.reward) == (4, pytest.approx(0.2))


@pytest.mark.parametrize("trouble", ["hangs", "left"])
async def test_an_answer_that_never_begins_is_the_challengers_failure_and_one_that_its_user_leaves_is_not(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway, trouble: str
) -> None:
    settings = serve(upstream, stage="live", watch_share=1, challenger_seconds=0.4)
    upstream.answers[CHAT] = lambda _: streamed("well", " said")
    async with open_gateway(**settings, policy="first", reward=REWARD) as http:
        await known(http, "live")
        begun = slowly(asyncio.Event().wait, first=trouble == "hangs")
        swarm.answer = lambda body, number: begun() if body.get("stream") else hanging(body, number)
        if trouble == "hangs":
            assert (await ask(http, stream=True)).headers["x-swarm-source"] == "incumbent"
            await swarm.until(lambda: len(pairs_of(swarm)) == 1)
            assert pairs_of(swarm)[0].challenger.failed == 1
            return
        async with http.stream("POST", CHAT, json=BODY | {"stream": True}) as response:
            await anext(response.aiter_bytes())
        await became(http, not_whole=1)
    assert not pairs_of(swarm) and not swarm.open_episodes


@pytest.mark.parametrize("headers", [{"x-swarm-policy": "first"}, {"x-swarm-train": "false"}], ids=["first", "single"])
async def test_a_stream_of_the_challengers_that_has_begun_is_cut_off_by_nobody(
    swarm: Swarm,
    upstream: Upstream,
    open_gateway: OpenGateway,
    headers: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go, loop = asyncio.Event(), asyncio.get_running_loop()

    async def unrecorded(request: Request) -> StreamingResponse:
        return slowly(go.wait, first=False)()

    swarm.app.router.routes.append(Route(CHAT, unrecorded, methods=["POST"]))
    async with open_gateway(**serve(upstream, stage="live", challenger_seconds=10), reward=REWARD) as http:
        await known(http, "live")
        swarm.answer = lambda body, number: (
            slowly(go.wait, first=False)() if body.get("stream") else by_number(body, number)
        )
        async with http.stream("POST", CHAT, json=BODY | {"stream": True}, headers=headers) as response:
            assert response.headers["x-swarm-source"] == "challenger"
            parts = response.aiter_text()
            text = await anext(parts)
            # the challenger's time is over
            began = loop.time
            monkeypatch.setattr(loop, "time", lambda: began() + 15)
            for _ in range(20):
                await anyio.lowlevel.checkpoint()
            go.set()
            text += "".join([part async for part in parts])
        assert '" three"' in text and "error" not in text


async def test_who_waits_for_the_beginning_of_a_stream_gets_the_incumbents(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway
) -> None:
    async with open_gateway(**serve(upstream, stage="live", challenger_seconds=0.4), reward=REWARD) as http:
        await known(http, "live")
        swarm.answer = slowly(asyncio.Event().wait, first=True)
        async with asyncio.timeout(20):
            response = await ask(http, headers={"x-swarm-policy": "first"}, stream=True)
        assert (response.status_code, response.headers["x-swarm-source"]) == (200, "incumbent")
        assert response.headers["x-swarm-drop-reason"] == "challenger_slow"
        await swarm.until(lambda: not swarm.open_episodes)


async def test_nobody_waits_for_a_training_step(swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway) -> None:
    async with open_gateway(**serve(upstream, stage="live", watch_share=0), reward=REWARD) as http:
        await known(http, "live")
        await swarm.set_state(EngineState.WEIGHT_SYNCING)
        async with asyncio.timeout(10):
            response = await ask(http)
        assert (response.status_code, response.headers["x-swarm-source"]) == (200, "incumbent")


async def test_a_user_rates_the_answer_of_either_side_by_its_request_id(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway
) -> None:
    canary = {"canary": {"shares": [0.5]}, "stage": "canary", "watch_share": 0, "max_shadows": 100}
    async with open_gateway(**serve(upstream, **canary), reward=REWARD) as http:
        await known(http, "canary 0.5")
        sides: dict[str, str] = {}
        of: dict[str, str] = {}
        while set(sides.values()) != {"challenger", "incumbent"}:
            response = await ask(http, headers={"x-swarm-session": f"s{len(sides)}"})
            of[f"s{len(sides)}"] = response.headers["x-swarm-source"]
            request_id = response.headers["x-request-id"]
            sides[request_id] = response.headers["x-swarm-source"]
            feedback = {"request_id": request_id, "score": 1.0 if sides[request_id] == "incumbent" else -0.5}
            told = (await http.post("/v1/feedback", json=feedback)).json()
            assert (told["compares"], told["trains"]) == (True, False), told
        await swarm.until(lambda: len(swarm.ratings) == len(sides))
        assert sorted(rating.side for rating in swarm.ratings) == sorted(sides.values())
        assert {rating.rating for rating in swarm.ratings if rating.side == "challenger"} == {-0.5}
        await swarm.until(lambda: "incumbent" in [pair.side for pair in pairs_of(swarm)])
        assert {rating.terms for rating in swarm.ratings} == {pair.terms for pair in pairs_of(swarm)}

        # by both names it trains and compares; a comment alone compares nothing
        answer = await until_side(http, "challenger")
        names = {"request_id": answer.headers["x-request-id"], "completion_id": answer.json()["id"]}
        told = (await http.post("/v1/feedback", json={**names, "label": "bad", "better": "say less"})).json()
        assert told["compares"]
        told = (await http.post("/v1/feedback", json={"request_id": names["request_id"], "comment": "hm"})).json()
        assert not told["compares"]
        # an error of the challenger's reaches no user, so one of the incumbent's is no evidence either
        answers = upstream.answers.copy()
        upstream.answers[CHAT] = lambda _: error(429, "slower")
        refused = await ask(http, headers={"x-swarm-session": next(s for s, side in of.items() if side == "incumbent")})
        assert refused.status_code == 429
        told = await http.post("/v1/feedback", json={"request_id": refused.headers["x-request-id"], "label": "bad"})
        assert told.status_code == 404, told.text
        upstream.answers.update(answers)
        # who chose a side does not compare it, and of what nobody asked there is nothing to say
        chosen = await ask(http, headers={"x-swarm-session": "mine", "x-swarm-side": "incumbent"})
        for unknown in (chosen.headers["x-request-id"], "nobody's"):
            refused = await http.post("/v1/feedback", json={"request_id": unknown, "label": "good"})
            assert (refused.status_code, refused.json()["error"]["param"]) == (404, "request_id"), refused.text
        assert (await http.post("/v1/feedback", json={"label": "good"})).status_code == 400


async def test_an_answer_that_a_retry_shares_is_rated_by_either_request_id(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway
) -> None:
    async with open_gateway(**serve(upstream, stage="live", watch_share=0), reward=REWARD) as http:
        await known(http, "live")
        asked = [await ask(http, headers={"idempotency-key": "k"}) for _ in range(2)]
        assert asked[0].json()["id"] == asked[1].json()["id"]
        for response in reversed(asked):
            rating = {"request_id": response.headers["x-request-id"], "label": "good"}
            assert (await http.post("/v1/feedback", json=rating)).status_code == 200
        await swarm.until(lambda: len(swarm.ratings) == 2)
    # they are one rating of one answer
    assert len({rating.answer for rating in swarm.ratings}) == 1


async def test_what_a_user_says_of_weights_that_are_lost_is_no_evidence_of_those_that_come_again(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway
) -> None:
    async with open_gateway(**serve(upstream, stage="live", watch_share=0), reward=REWARD) as http:
        await known(http, "live")
        asked = [(await ask(http)).headers["x-request-id"]]
        # the engine dies, and does the steps after its checkpoint again
        for version in (5, 7):
            swarm.step = version
            async with asyncio.timeout(30):
                while (await http.get("/status")).json()["swarms"][0]["policy_version"] != version:
                    pass
        asked.append((await ask(http)).headers["x-request-id"])
        feedback = [{"request_id": request_id, "label": "bad"} for request_id in asked]
        assert [(await http.post("/v1/feedback", json=each)).status_code for each in feedback] == [404, 200]


async def test_an_engine_that_comes_back_with_the_same_weights_has_lost_none(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway
) -> None:
    async with open_gateway(**serve(upstream, stage="live", watch_share=0), reward=REWARD) as http:
        await known(http, "live")
        request_id = (await ask(http)).headers["x-request-id"]
        # a run that goes on from another's checkpoint has no step of its own while its engine is away
        for swarm.state, swarm.step in ((EngineState.OFFLINE, 0), (EngineState.ROLLING, 7)):
            async with asyncio.timeout(30):
                while (await http.get("/status")).json()["swarms"][0]["policy_version"] != swarm.step:
                    pass
        rated = await http.post("/v1/feedback", json={"request_id": request_id, "label": "bad"})
        assert rated.status_code == 200


async def until_side(http: Http, side: str) -> httpx.Response:
    for number in range(100):
        response = await ask(http, headers={"x-swarm-session": f"another {number}"})
        if response.headers["x-swarm-source"] == side:
            return response
    raise AssertionError(f"100 conversations, none of the {side}'s")


async def test_a_canary_has_both_sides_and_a_conversation_keeps_its_own(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway
) -> None:
    canary = {"canary": {"shares": [0.5]}, "stage": "canary", "watch_share": 0, "max_shadows": 100}
    async with open_gateway(**serve(upstream, **canary), reward=REWARD) as http:
        await known(http, "canary 0.5")
        sides: dict[int, str] = {}
        for share in (0.5, 1.0):
            if share == 1:
                move(swarm, share)
                await known(http, "live")
            for session in range(12):
                response = await ask(http, headers={"x-swarm-session": f"s{session}"})
                side = sides.setdefault(session, response.headers["x-swarm-source"])
                assert response.headers["x-swarm-source"] == side
        assert set(sides.values()) == {"challenger", "incumbent"}
        pinned = await ask(http, headers={"x-swarm-session": "new", "x-swarm-side": "incumbent"})
        assert pinned.headers["x-swarm-source"] == "incumbent"
        assert (await ask(http, headers={"x-swarm-session": "newer"})).headers["x-swarm-source"] == "challenger"
        behind = sum(side == "incumbent" for side in sides.values())
        await swarm.until(lambda: len(pairs_of(swarm)) == 2 * behind + 1)
    found: list[Pair] = pairs_of(swarm)
    assert {pair.side for pair in found} == {"incumbent"}
    assert {pair.terms.stage for pair in found} == {"canary 0.5", "live"}


async def test_a_conversation_keeps_its_side_when_the_gateway_reads_its_settings_anew(
    swarm: Swarm, upstream: Upstream, tmp_path: Path
) -> None:
    canary = {"canary": {"shares": [0.1]}, "stage": "canary", "watch_share": 0, "shadow_fraction": 0}
    settings = {"swarm_url": swarm.url, "hooks": str(write_hooks(tmp_path / "hooks", REWARD))}
    settings |= serve(upstream, **canary)
    app = create_app(
        GatewayConfig.model_validate(settings),
        lambda: GatewayConfig.model_validate(settings | {"model_aliases": ["another"]}),
    )
    async with serving(app) as http:
        await known(http, "canary 0.1")
        for number in range(12):
            await ask(http, headers={"x-swarm-session": f"s{number}", "x-swarm-side": "challenger"})
        assert (await http.post("/admin/reload")).json()["changed"] == ["model_aliases"]
        sides = [
            (await ask(http, headers={"x-swarm-session": f"s{number}"})).headers["x-swarm-source"]
            for number in range(12)
        ]
        assert sides == ["challenger"] * 12
        # whoever was taken back is not known any more
        move(swarm, 0)
        await known(http, "shadow")
        assert (await ask(http, headers={"x-swarm-session": "s0"})).headers["x-swarm-source"] == "incumbent"


async def test_a_rollback_reaches_every_new_answer_of_three_gateways_within_a_second(
    swarm: Swarm, upstream: Upstream, tmp_path: Path
) -> None:
    settings = serve(upstream, stage="live", watch_share=0, shadow_fraction=0)
    write_hooks(tmp_path / "hooks", REWARD)
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        gateways = [
            await stack.enter_async_context(gateway_before(swarm.url, tmp_path, REWARD, **settings)) for _ in range(3)
        ]
        for http in gateways:
            await known(http, "live")
        answers: list[tuple[float, str, int]] = []
        warm, enough, alarm = asyncio.Event(), asyncio.Event(), math.inf

        async def user(number: int) -> None:
            while not enough.is_set():
                began = loop.time()
                response = await ask(gateways[number % 3], headers={"x-swarm-session": f"u{number}"})
                answers.append((began, response.headers.get("x-swarm-source", ""), response.status_code))
                if len(answers) >= 32:
                    warm.set()
                if sum(began > alarm + 0.2 for began, _, _ in answers) >= 32:
                    enough.set()

        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            for number in range(16):
                group.create_task(user(number))
            await warm.wait()
            alarm = loop.time()
            move(swarm, 0)
    assert {status for _, _, status in answers} == {200}
    assert {source for began, source, _ in answers if began <= alarm - 0.5} <= {"challenger"}
    late = [began - alarm for began, source, _ in answers if source != "incumbent" and began > alarm]
    assert max(late, default=0.0) <= 1.0


async def test_what_was_never_told_is_the_incumbents(
    nobody: str, upstream: Upstream, open_gateway: OpenGateway
) -> None:
    async with open_gateway(**serve(upstream, stage="live"), swarm_url=nobody) as http:
        response = await ask(http)
        assert (response.status_code, response.headers["x-swarm-source"]) == (200, "incumbent")
        assert (await http.get("/status")).json()["routes"]["default"]["stage"] is None
    assert len(upstream.got) == 1 and CHAT in upstream.answers
