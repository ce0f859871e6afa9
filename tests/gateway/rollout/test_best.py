"""Policy ``best`` on the real swarm server: what it waits for, what it delivers, and what becomes of the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.responses import Response

from gateway.rollout.answering import best, run_with_group
from gateway.rollout.group import GroupRun
from gateway.rollout.return_policy import ReturnPolicy
from gateway.rollout.sampling import EpisodeLostError
from gateway.rollout.server import Training
from gateway.stats import DropReason
from gateway.types import Decided
from tests.gateway.rollout.conftest import JOB, Judge, OpenRoute, asking, at_rest, chunks_of, text_of
from tests.standins.vllm import plain, status
from tests.swarm.server import conftest as server

pytestmark = pytest.mark.anyio

Step = Callable[[dict[str, Any]], Response | Awaitable[Response]]


class Gate:
    """Answers of the engine that wait for a sign."""

    def __init__(self, rig: server.Rig) -> None:
        self._rig = rig
        self._open = asyncio.Event()
        self.waiting = 0

    def __call__(self, then: Step) -> Step:
        async def step(body: dict[str, Any]) -> Response:
            self.waiting += 1
            await self._open.wait()
            reply = then(body)
            return reply if isinstance(reply, Response) else await reply

        return step

    def open(self) -> None:
        self._open.set()


async def reach(rig: server.Rig, condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await rig.client.get("/health")


def partial_job(rig: server.Rig) -> None:
    """A job that trains groups which lack answers."""
    rig.controller.offline("another job")
    rig.controller.sync_job(JOB.model_copy(update={"collection": "finish_enough_episodes"}))
    rig.controller.boot()
    rig.controller.rollout_ready(server.ready(rig.vllm_address))


async def answer(route: Training, policy: ReturnPolicy, **body: Any) -> Decided:
    return await best(route, asking(**body), None, policy)


def said(decided: Decided) -> str:
    return decided.completion["choices"][0]["message"]["content"]


async def test_all_are_judged_in_one_call_and_trained(rig: server.Rig, open_route: OpenRoute, judge: Judge) -> None:
    async with open_route(acknowledge_seconds=5.0) as route:
        decided = await answer(route, ReturnPolicy())
        assert decided.headers["x-swarm-trained"] == "true"
        assert len(judge.asked) == 1 and len(judge.asked[0]) == 4
        # one call of the engine sampled them all
        assert [body.get("n") for _, body in rig.vllm.requests] == [4]
        assert rig.controller.pool.information().completed_episodes == 4


async def test_a_lost_group_is_replaced_although_sampling_took_longer_than_a_claim_may(
    rig: server.Rig, open_route: OpenRoute
) -> None:
    loop, runs = asyncio.get_running_loop(), list[GroupRun]()
    async with open_route(claim_wait_seconds=0.5) as route:

        async def use(run: GroupRun) -> str:
            runs.append(run)
            if len(runs) == 1:
                late = loop.time() + 0.5
                await reach(rig, lambda: loop.time() > late)
                raise EpisodeLostError("a weight sync took the group")
            run.cancel(DropReason.CANCELLED)
            return "answered"

        assert await run_with_group(route, asking(), None, use) == "answered"
    assert len(runs) == 2 and route.stats.groups.dropped == {DropReason.SAMPLE: 1, DropReason.CANCELLED: 1}


async def test_nobody_waits_for_the_acknowledgement_unless_told_to(rig: server.Rig, open_route: OpenRoute) -> None:
    async with open_route() as route:
        assert (await answer(route, ReturnPolicy())).headers["x-swarm-trained"] == "pending"
        await at_rest(rig, route)
        assert (route.stats.groups.trained, rig.controller.pool.information().completed_episodes) == (1, 4)


async def test_a_quorum_is_judged_and_all_are_trained(rig: server.Rig, open_route: OpenRoute, judge: Judge) -> None:
    gate = Gate(rig)
    rig.vllm.script += [plain([1]), plain([1, 2]), gate(plain([1, 2, 3])), gate(plain([4]))]
    async with open_route() as route:
        decided = await answer(route, ReturnPolicy(quorum=2))
        assert said(decided) == "t1 t2" and decided.headers["x-swarm-trained"] == "pending"
        assert [len(asked) for asked in judge.asked] == [2]
        gate.open()
        await at_rest(rig, route)
        # the rewards that train are of one call about all of them
        assert [len(asked) for asked in judge.asked] == [2, 4]
        [group] = rig.controller.pool.collection.groups.waiting()
        assert sorted(member.trajectory.reward for member in group.members) == [2.0, 2.0, 5.0, 8.0]
        assert route.stats.groups.trained == 1


@pytest.mark.parametrize("partial", [False, True])
async def test_stragglers_are_cancelled(rig: server.Rig, open_route: OpenRoute, judge: Judge, *, partial: bool) -> None:
    if partial:
        partial_job(rig)
    rig.vllm.script += [plain([1]), plain([1, 2]), rig.vllm.hang(), rig.vllm.hang()]
    async with open_route(stragglers="cancel", acknowledge_seconds=5.0) as route:
        decided = await answer(route, ReturnPolicy(quorum=2))
        assert said(decided) == "t1 t2" and [len(asked) for asked in judge.asked] == [2]
        await reach(rig, lambda: len(rig.vllm.cancellations) == 2)
        await at_rest(rig, route)
        information = rig.controller.pool.information()
        if partial:
            assert (route.stats.groups.trained, information.completed_episodes) == (1, 2)
        else:
            assert decided.headers["x-swarm-drop-reason"] == "stragglers_cancelled"
            assert (route.stats.groups.trained, information.completed_episodes) == (0, 0)


async def test_a_deadline_judges_what_is_there(rig: server.Rig, open_route: OpenRoute, judge: Judge) -> None:
    gate = Gate(rig)
    rig.vllm.script += [plain([1]), gate(plain([1, 2])), gate(plain([1, 2, 3])), gate(plain([4]))]
    async with open_route() as route:
        decided = await answer(route, ReturnPolicy(deadline=0.05))
        assert said(decided) == "t1"
        await reach(rig, lambda: gate.waiting == 3)
        gate.open()
        await at_rest(rig, route)
        assert [len(asked) for asked in judge.asked] == [1, 4]


async def test_a_deadline_with_nothing_there_waits_for_the_first(
    rig: server.Rig, open_route: OpenRoute, judge: Judge
) -> None:
    first, others = Gate(rig), Gate(rig)
    rig.vllm.script += [first(plain([1])), *[others(plain([1, 2])) for _ in range(3)]]
    async with open_route() as route:
        asking = asyncio.create_task(answer(route, ReturnPolicy(deadline=0.001)))
        await reach(rig, lambda: first.waiting + others.waiting == 4)
        assert not asking.done()
        first.open()
        assert said(await asking) == "t1"
        others.open()
        await at_rest(rig, route)
        assert route.stats.groups.trained == 1


async def test_a_straggler_that_fails_leaves_a_group_that_is_not_whole(
    rig: server.Rig, open_route: OpenRoute, judge: Judge
) -> None:
    gate = Gate(rig)
    refused = status(400, {"error": {"message": "no", "type": "BadRequestError", "param": None, "code": 400}})
    rig.vllm.script += [plain([1]), plain([1, 2]), plain([3]), gate(refused)]
    async with open_route() as route:
        await answer(route, ReturnPolicy(quorum=3))
        gate.open()
        await at_rest(rig, route)
        assert dict(route.stats.groups.dropped) == {"sample_failed": 1}
        assert rig.controller.pool.information().completed_episodes == 0


@pytest.mark.parametrize("policy", [ReturnPolicy(), ReturnPolicy(quorum=3)])
async def test_who_leaves_cancels_every_sample(rig: server.Rig, open_route: OpenRoute, policy: ReturnPolicy) -> None:
    rig.vllm.default = rig.vllm.hang()
    calls = 1 if policy.quorum is None else 4
    async with open_route() as route:
        asking = asyncio.create_task(answer(route, policy))
        await reach(rig, lambda: rig.vllm.streaming == calls)
        asking.cancel()
        await reach(rig, lambda: len(rig.vllm.cancellations) == calls)
        await at_rest(rig, route)
        assert dict(route.stats.groups.dropped) == {"request_cancelled": 1}


async def test_where_the_route_says_so_a_group_outlives_its_user(
    rig: server.Rig, open_route: OpenRoute, judge: Judge
) -> None:
    gate = Gate(rig)
    rig.vllm.default = gate(plain([1, 2]))
    async with open_route(on_disconnect="finish") as route:
        asking = asyncio.create_task(answer(route, ReturnPolicy()))
        await reach(rig, lambda: gate.waiting == 1)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        gate.open()
        await at_rest(rig, route)
        assert (route.stats.groups.trained, len(judge.asked)) == (1, 1)


async def test_a_winner_is_streamed_in_words(rig: server.Rig, open_route: OpenRoute) -> None:
    message = {"role": "assistant", "content": "word and another", "tool_calls": []}
    rig.vllm.default = plain([1, 2, 3, 4, 5], message=message)
    async with open_route() as route:
        decided = await answer(route, ReturnPolicy(), stream=True, stream_options={"include_usage": True})
        chunks = await chunks_of(decided)
        deltas = [chunk["choices"][0]["delta"].get("content") for chunk in chunks if chunk["choices"]]
        assert [delta for delta in deltas if delta] == ["word", " and", " another"]
        assert text_of(chunks) == said(decided)
        assert chunks[-1]["usage"]["completion_tokens"] == 5
        assert chunks[-2]["swarm"]["reward"] == 16.0


@pytest.mark.parametrize("with_usage", [False, True])
async def test_usage_comes_with_each_chunk_where_that_is_asked_for(
    rig: server.Rig, open_route: OpenRoute, with_usage: bool
) -> None:
    rig.vllm.default = plain([1, 2])
    options = {"include_usage": with_usage, "continuous_usage_stats": True}
    async with open_route() as route:
        chunks = await chunks_of(await answer(route, ReturnPolicy(), stream=True, stream_options=options))
        # all of it was sampled before the first of them
        counts = {(chunk.get("usage") or {}).get("completion_tokens") for chunk in chunks}
        assert len(chunks) > 2 and counts == {2 if with_usage else None}
