"""Straight to the engine: served without an episode, trained never."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from gateway.rollout.first import engine_answer, single
from gateway.rollout.server import Waiting
from gateway.types import Decided, Live
from swarm.errors import RelayedError, UnavailableError, UpstreamError
from tests.gateway.rollout.conftest import OpenRoute, asking, at_rest, chunks_of, text_of
from tests.gateway.rollout.test_best import reach
from tests.gateway.rollout.test_first import SAID
from tests.standins.vllm import plain, role_chunk, status, token_chunk
from tests.swarm.server import conftest as server

pytestmark = pytest.mark.anyio


async def test_a_plain_answer_comes_as_the_engine_gave_it(rig: server.Rig, open_route: OpenRoute) -> None:
    async with open_route() as route:
        outcome = await single(route, asking(n=2, temperature=0.2, seed=1))
        assert isinstance(outcome, Decided)
        assert outcome.headers == {"x-swarm-trained": "false", "x-swarm-policy-version": "0"}
        assert [one["message"]["content"] for one in outcome.completion["choices"]] == ["t1 t2"] * 2
        [(_, sent)] = rig.vllm.requests
        assert (sent["n"], sent["temperature"], sent["seed"]) == (2, 0.2, 1)
        await at_rest(rig, route)
        assert rig.controller.pool.information().completed_episodes == 0


async def test_a_stream_is_live(rig: server.Rig, open_route: OpenRoute) -> None:
    rig.vllm.default = SAID
    async with open_route() as route:
        outcome = await single(route, asking(stream=True, stream_options={"include_usage": True}))
        assert isinstance(outcome, Live) and outcome.headers["x-swarm-trained"] == "false"
        chunks = await chunks_of(outcome)
        assert text_of(chunks) == "t1 t2 t3 " and chunks[-1]["usage"]["completion_tokens"] == 3


async def test_a_stream_says_at_its_end_what_its_headers_say(rig: server.Rig, open_route: OpenRoute) -> None:
    """A keep-alive sends the headers before anything is known."""
    rig.vllm.default = SAID
    async with open_route() as route:
        outcome = await single(
            route, asking(stream=True, stream_options={"include_usage": True}), "pass_through:health"
        )
        assert outcome.headers["x-swarm-drop-reason"] == "pass_through:health"
        *_, last, usage = await chunks_of(outcome)
    report = {"policy_version": 0, "trained": False, "drop_reason": "pass_through:health"}
    assert last["choices"][0]["finish_reason"] == "stop" and "swarm" not in usage
    assert {name: value for name, value in last["swarm"].items() if value is not None} == report


@pytest.mark.parametrize("begun", [True, False])
async def test_who_leaves_cancels_the_sample(rig: server.Rig, open_route: OpenRoute, *, begun: bool) -> None:
    rig.vllm.default = rig.vllm.hang(role_chunk(), token_chunk([1])) if begun else rig.vllm.hang()
    async with open_route() as route:
        asked = asyncio.create_task(single(route, asking(stream=begun)))
        await reach(rig, lambda: rig.vllm.streaming == 1)
        if begun:
            outcome = await asked
            assert isinstance(outcome, Live) and outcome.close is not None
            await anext(outcome.chunks)
            await outcome.close()
        else:
            asked.cancel()
        await reach(rig, lambda: bool(rig.vllm.cancellations))


async def test_errors_say_whether_to_come_back(rig: server.Rig, open_route: OpenRoute) -> None:
    async with open_route(offline_wait_seconds=0.1) as route:
        rig.vllm.default = status(400, {"error": {"message": "too long", "code": 400}})
        for stream in (False, True):
            with pytest.raises(RelayedError, match="too long"):
                await single(route, asking(stream=stream))
        rig.controller.offline("stopped")
        for stream in (False, True):
            with pytest.raises(UnavailableError) as away:
                await single(route, asking(stream=stream))
            assert away.value.should_retry


async def test_an_answer_that_does_not_come_is_a_timeout(rig: server.Rig, open_route: OpenRoute) -> None:
    rig.vllm.default = rig.vllm.hang()
    async with open_route(sample_timeout_seconds=0.3) as route:
        with pytest.raises(UpstreamError) as late:
            await single(route, asking())
    assert late.value.status == 504


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_is_away_is_waited_for(rig: server.Rig, open_route: OpenRoute, *, stream: bool) -> None:
    rig.vllm.default = SAID if stream else plain([1, 2])
    rig.controller.offline("stopped")
    refused = asyncio.Event()
    async with open_route(offline_wait_seconds=60) as route:

        async def bring_up() -> None:
            await refused.wait()
            rig.controller.boot()
            rig.controller.rollout_ready(server.ready(rig.vllm_address))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Waiting, "after", told_of(refused, Waiting.after))
            asked = asyncio.create_task(single(route, asking(stream=stream)))
            await bring_up()
            outcome = await asked
        if isinstance(outcome, Decided):
            assert outcome.completion["choices"][0]["message"]["content"].startswith("t1 t2")
        else:
            assert text_of(await chunks_of(outcome)).startswith("t1 t2")


def told_of(event: asyncio.Event, after: Any) -> Any:
    async def wrapped(waited: Waiting, error: UnavailableError) -> None:
        event.set()
        await after(waited, error)

    return wrapped


async def test_the_engines_other_addresses_are_passed_on(rig: server.Rig, open_route: OpenRoute) -> None:
    told: dict[str, Any] = {"model": "tiny", "choices": []}
    refusal = {"error": {"message": "no"}}
    rig.vllm.script += [status(200, told), status(404, refusal)]
    async with open_route() as route:
        for code, body in ((200, told), (404, refusal)):
            answer = await engine_answer(route, "/tokenize", b'{"prompt": "a"}')
            assert (answer.status, json.loads(answer.content)) == (code, body)


async def test_a_job_too_short_for_an_agents_first_prompt_is_told_once(
    rig: server.Rig, open_route: OpenRoute, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_route() as route:
        # the status is read when the gateway starts
        assert (await route.swarm.fresh_report()).max_model_len == 3100
        await asyncio.gather(*(single(route, asking()) for _ in range(2)))
    [told] = [record.getMessage() for record in caplog.records if "first prompt" in record.getMessage()]
    assert "3100 tokens" in told and "Claude Code (27,000), opencode (9,000), Codex (7,600)" in told
