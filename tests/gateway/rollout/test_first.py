"""Policy ``first`` on the real swarm server: answer 0 live, the others beside it, all judged behind."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from gateway.rollout.first import first
from gateway.rollout.group import GroupRun
from gateway.rollout.sampling import Sample, Sampler
from gateway.rollout.server import Training
from gateway.types import Decided, Live
from swarm.errors import RelayedError, SwarmGatewayError, UpstreamError
from tests.gateway.rollout.conftest import Judge, OpenRoute, asking, at_rest, chunks_of, text_of
from tests.gateway.rollout.test_best import Gate, reach
from tests.standins.vllm import Step, plain, role_chunk, status, streamed, token_chunk, usage, usage_chunk
from tests.swarm.server import conftest as server

pytestmark = pytest.mark.anyio

CALL = [{"index": 0, "id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}]


def by_form(stream: Step, whole: Step) -> Step:
    """``stream`` for streamed calls, ``whole`` for plain ones: which of them comes first is a matter of chance."""
    return lambda body: (stream if body.get("stream") else whole)(body)


SAID = streamed(role_chunk(), token_chunk([1]), token_chunk([2]), token_chunk([3], "stop"), usage_chunk(3))


async def live(route: Training, **body: Any) -> Live:
    outcome = await first(route, asking(stream=True, **body), None)
    assert isinstance(outcome, Live)
    return outcome


async def test_the_first_answer_is_out_before_the_others_are_there(
    rig: server.Rig, open_route: OpenRoute, judge: Judge
) -> None:
    gate = Gate(rig)
    rig.vllm.default = by_form(SAID, gate(plain([1, 2])))
    async with open_route() as route:
        outcome = await live(route, stream_options={"include_usage": True})
        assert outcome.headers == {"x-swarm-policy-version": "0", "x-swarm-trained": "pending"}
        chunks = await chunks_of(outcome)
        assert text_of(chunks) == "t1 t2 t3 " and not judge.asked
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 3
        assert chunks[-2]["choices"][0]["finish_reason"] == "stop" and chunks[-2]["swarm"]["trained"] is None
        assert len({chunk["id"] for chunk in chunks}) == 1
        gate.open()
        await at_rest(rig, route)
        [judged] = judge.asked
        assert [candidate.text for candidate in judged] == ["t1 t2 t3 ", "t1 t2", "t1 t2", "t1 t2"]
        assert judged[0].completion_tokens == 3
        assert (route.stats.groups.trained, rig.controller.pool.information().completed_episodes) == (1, 4)


@pytest.mark.parametrize("with_usage", [False, True])
async def test_the_last_chunk_has_the_engines_fingerprint(
    rig: server.Rig, open_route: OpenRoute, with_usage: bool
) -> None:
    last = usage_chunk(1) | {"system_fingerprint": "vllm-1"}
    rig.vllm.default = by_form(streamed(role_chunk(), token_chunk([1], "stop"), last), plain([1, 2]))
    async with open_route() as route:
        chunks = await chunks_of(await live(route, stream_options={"include_usage": with_usage}))
        assert chunks[-1]["system_fingerprint"] == "vllm-1" and bool(chunks[-1].get("usage")) == with_usage
        await at_rest(rig, route)


@pytest.mark.parametrize("with_usage", [False, True])
async def test_usage_comes_with_each_chunk_where_that_is_asked_for(
    rig: server.Rig, open_route: OpenRoute, with_usage: bool
) -> None:
    # as vLLM does, which heeds it only where usage is asked for at all
    options = {"include_usage": with_usage, "continuous_usage_stats": True}
    said = [role_chunk(), token_chunk([1], "stop")]
    if with_usage:
        said = [chunk | {"usage": usage(3, count)} for count, chunk in enumerate(said)]
    rig.vllm.default = by_form(streamed(*said, usage_chunk(1)), plain([1, 2]))
    async with open_route() as route:
        chunks = await chunks_of(await live(route, stream_options=options))
        told = [chunk.get("usage") for chunk in chunks]
        assert told == ([usage(3, 0), usage(3, 1), usage(3, 1)] if with_usage else [None, None])
        await at_rest(rig, route)
    asked = {"include_usage": True, **({"continuous_usage_stats": True} if with_usage else {})}
    assert rig.vllm.requests[0][1]["stream_options"] == asked


async def test_each_chunk_goes_out_as_it_comes(rig: server.Rig, open_route: OpenRoute) -> None:
    more = asyncio.Event()
    rig.vllm.default = by_form(
        streamed(role_chunk(), token_chunk([1]), more.wait, token_chunk([2], "stop"), usage_chunk(2)), plain([1])
    )
    async with open_route() as route:
        outcome = await live(route)
        seen = [await anext(outcome.chunks), await anext(outcome.chunks)]
        assert text_of(seen) == "t1 "
        more.set()
        assert text_of(await chunks_of(outcome)) == "t2 "
        await at_rest(rig, route)


async def test_log_probabilities_and_tool_calls_are_streamed(
    rig: server.Rig, open_route: OpenRoute, judge: Judge
) -> None:
    called = streamed(
        role_chunk(), token_chunk([1]), token_chunk([2], "tool_calls", {"tool_calls": CALL}), usage_chunk(2)
    )
    rig.vllm.default = by_form(called, plain([1]))
    async with open_route() as route:
        chunks = await chunks_of(await live(route, logprobs=True))
        spoken = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["logprobs"]]
        assert [choice["logprobs"]["content"][0]["token"] for choice in spoken] == ["t1", "t2"]
        assert spoken[-1]["delta"]["tool_calls"] == CALL and spoken[-1]["finish_reason"] == "tool_calls"
        await at_rest(rig, route)
        assert judge.asked[0][0].tool_calls == [{key: value for key, value in CALL[0].items() if key != "index"}]


async def test_several_choices_stream_at_once(rig: server.Rig, open_route: OpenRoute, judge: Judge) -> None:
    rig.vllm.default = by_form(SAID, plain([1, 2]))
    async with open_route() as route:
        chunks = await chunks_of(await live(route, n=2, stream_options={"include_usage": True}))
        assert [text_of(chunks, index) for index in (0, 1)] == ["t1 t2 t3 "] * 2
        assert chunks[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}
        assert sum("swarm" in chunk for chunk in chunks) == 1
        await at_rest(rig, route)
        assert (route.stats.groups.trained, len(judge.asked[0])) == (1, 4)


async def test_a_plain_answer_does_not_wait_for_the_others(rig: server.Rig, open_route: OpenRoute) -> None:
    gate = Gate(rig)
    held, at_once = gate(plain([1, 2, 3])), plain([1, 2])
    # the others share a call; which of the two reaches the engine first is a matter of chance
    rig.vllm.default = lambda body: (held if body.get("n", 1) > 1 else at_once)(body)
    async with open_route() as route:
        answering = asyncio.create_task(first(route, asking(), None))
        await reach(rig, lambda: gate.waiting == 1)
        async with asyncio.timeout(60):
            outcome = await answering
        assert isinstance(outcome, Decided) and outcome.headers["x-swarm-trained"] == "pending"
        assert route.stats.groups.trained == 0
        gate.open()
        await at_rest(rig, route)
        assert route.stats.groups.trained == 1


async def test_who_leaves_the_stream_cancels_every_sample(rig: server.Rig, open_route: OpenRoute) -> None:
    rig.vllm.default = by_form(rig.vllm.hang(role_chunk(), token_chunk([1])), rig.vllm.hang())
    async with open_route() as route:
        outcome = await live(route)
        await anext(outcome.chunks)
        # the others share a call
        await reach(rig, lambda: rig.vllm.streaming == 2)
        assert outcome.close is not None
        await outcome.close()
        await reach(rig, lambda: len(rig.vllm.cancellations) == 2)
        await at_rest(rig, route)
        assert dict(route.stats.groups.dropped) == {"request_cancelled": 1}


async def test_a_stream_that_breaks_off_is_an_error_and_not_trained(rig: server.Rig, open_route: OpenRoute) -> None:
    # a tool call cannot be continued by the data plane
    broken = streamed(role_chunk(), token_chunk([1], delta={"tool_calls": CALL}), done=False)
    rig.vllm.default = by_form(broken, plain([1]))
    async with open_route() as route:
        outcome = await live(route)
        with pytest.raises(UpstreamError):
            await chunks_of(outcome)
        await at_rest(rig, route)
        assert dict(route.stats.groups.dropped) == {"sample_failed": 1}
        assert rig.controller.pool.information().completed_episodes == 0


async def test_a_refusal_of_the_engine_comes_before_the_stream(
    rig: server.Rig, open_route: OpenRoute, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = {"message": "too long", "type": "BadRequestError", "param": None, "code": 400}
    rig.vllm.default = status(400, {"error": refusal})
    async with open_route() as route:
        with pytest.raises(RelayedError, match="too long"):
            await live(route)
        await at_rest(rig, route)
        assert len(rig.vllm.requests) == 1, "nothing is sampled for a group that nobody can use"
        assert dict(route.stats.groups.dropped) == {"sample_failed": 1}


@pytest.mark.parametrize("stream", [True, False])
async def test_the_others_begin_after_the_first_token_or_a_plain_answer(
    rig: server.Rig, open_route: OpenRoute, judge: Judge, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(rig)
    rig.vllm.default = by_form(gate(SAID), plain([1, 2])) if stream else gate(plain([1, 2, 3]))
    async with open_route() as route:
        answering = asyncio.create_task(first(route, asking(stream=stream), None))
        await reach(rig, lambda: gate.waiting == 1)
        for _ in range(20):
            await rig.client.get("/health")
        assert len(rig.vllm.requests) == 1, "they would keep the user waiting"
        gate.open()
        await chunks_of(await answering)
        await at_rest(rig, route)
        assert [body.get("n", 1) for _, body in rig.vllm.requests] == [1, 3]
        assert (route.stats.groups.trained, len(judge.asked[0])) == (1, 4)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_error_that_nobody_expects_is_an_error(
    rig: server.Rig, open_route: OpenRoute, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    async def broken(*_: object, **__: object) -> Sample:
        raise ZeroDivisionError

    for name in ("sample", "sample_group"):
        monkeypatch.setattr(Sampler, name, broken)
    monkeypatch.setattr(Sampler, "stream", lambda *_: 1 / 0)
    async with open_route() as route, asyncio.timeout(30):
        with pytest.raises(SwarmGatewayError):
            await first(route, asking(stream=stream), None)


async def test_whoever_leaves_before_the_others_begin_leaves_no_error_behind(
    rig: server.Rig, open_route: OpenRoute, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = GroupRun.start
    going: list[asyncio.Task[Any]] = []

    def leave(self: GroupRun, *arguments: Any) -> None:
        started(self, *arguments)
        going[0].cancel()

    unseen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
    monkeypatch.setattr(GroupRun, "start", leave)
    rig.vllm.default = rig.vllm.hang()
    async with open_route() as route:
        going.append(asyncio.create_task(first(route, asking(stream=True), None)))
        await asyncio.wait(going)
        assert going.pop().cancelled()
        await at_rest(rig, route)
    gc.collect()
    assert unseen == []


async def test_an_engine_that_dies_before_the_first_word_is_not_noticed(rig: server.Rig, open_route: OpenRoute) -> None:
    gate = Gate(rig)
    rig.vllm.default = gate(SAID)
    async with open_route() as route:
        answering = asyncio.create_task(live(route))
        await reach(rig, lambda: gate.waiting == 1)
        rig.vllm.default = by_form(SAID, plain([1]))
        rig.controller.offline("killed by a test")
        rig.controller.boot()
        rig.controller.rollout_ready(server.ready(rig.vllm_address, 5))
        outcome = await answering
        gate.open()
        assert outcome.headers["x-swarm-policy-version"] == "5"
        assert text_of(await chunks_of(outcome)) == "t1 t2 t3 "
        await at_rest(rig, route)
        assert route.stats.groups.trained == 1
