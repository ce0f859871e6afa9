"""What a conversation is told of a user who hangs up on its answer, and how the group is counted."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.rollout.answering import best
from gateway.rollout.first import first
from gateway.rollout.return_policy import ReturnPolicy
from gateway.sessions.conversation import AgentLedger
from gateway.sessions.sessions import Sessions
from gateway.types import Decided, Live
from swarm.errors import RelayedError, UpstreamError
from tests.gateway.rollout.conftest import OpenRoute, asking, at_rest, chunks_of
from tests.standins.vllm import plain, role_chunk, status, streamed, token_chunk, usage_chunk
from tests.swarm.server import conftest as server

pytestmark = pytest.mark.anyio


class Talk:
    """A conversation that notes what it is told."""

    session = None
    turn = None
    sessions = SimpleNamespace(watcher=None)
    name = ""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.ledger = AgentLedger()

    def delivered(self, completion_id: str, message: dict[str, Any], reward: float | None, **how: Any) -> None:
        self.told.append("delivered")

    def gave_up(self) -> None:
        self.told.append("gave up")

    def abandoned(self) -> None:
        self.told.append("abandoned")


@pytest.mark.parametrize("whole", [True, False])
async def test_an_answer_that_is_not_read_to_its_end_is_abandoned(
    rig: server.Rig, open_route: OpenRoute, whole: bool
) -> None:
    rig.vllm.default = plain([1, 2])
    async with open_route() as route:
        talk: Any = Talk()
        outcome = await best(route, asking(stream=True), talk, ReturnPolicy())
        if whole:
            await chunks_of(outcome)
        else:
            next(iter(outcome.chunks()))
            assert outcome.close is not None
            await outcome.close()
        assert talk.told == (["delivered"] if whole else ["delivered", "abandoned"])
        await at_rest(rig, route)


async def test_a_plain_answer_is_not_known_to_be_abandoned(rig: server.Rig, open_route: OpenRoute) -> None:
    rig.vllm.default = plain([1, 2])
    async with open_route() as route:
        talk: Any = Talk()
        outcome = await best(route, asking(), talk, ReturnPolicy())
        assert isinstance(outcome, Decided) and outcome.close is not None
        await outcome.close()
        assert talk.told == ["delivered"]
        await at_rest(rig, route)


async def test_a_stream_that_outlives_its_user_is_abandoned(rig: server.Rig, open_route: OpenRoute) -> None:
    more = asyncio.Event()
    parts = streamed(role_chunk(), token_chunk([1]), more.wait, token_chunk([2], "stop"), usage_chunk(2))
    rig.vllm.default = lambda body: (parts if body.get("stream") else plain([1]))(body)
    async with open_route(on_disconnect="finish") as route:
        talk: Any = Talk()
        outcome = await first(route, asking(stream=True), talk)
        assert isinstance(outcome, Live) and outcome.close is not None
        await outcome.close()
        assert not talk.told
        more.set()
        await at_rest(rig, route)
        assert talk.told == ["delivered", "abandoned"] and route.stats.groups.trained == 1


async def test_a_stream_whose_user_left_before_its_first_token_is_abandoned(
    rig: server.Rig, open_route: OpenRoute
) -> None:
    begin, end = asyncio.Event(), asyncio.Event()
    parts = streamed(begin.wait, role_chunk(), token_chunk([1]), end.wait, token_chunk([2], "stop"), usage_chunk(2))
    rig.vllm.default = lambda body: (parts if body.get("stream") else plain([1]))(body)

    async def asked(requests: int) -> None:
        async with asyncio.timeout(20):
            while len(rig.vllm.requests) < requests:
                await rig.client.get("/health")

    async with open_route(on_disconnect="finish") as route, Sessions() as sessions:
        link = sessions.link(asking(stream=True), "route", route.settings, route.hooks)
        answering = asyncio.create_task(first(route, asking(stream=True), link))
        await asked(1)
        answering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answering
        begin.set()
        # the others begin after the first token
        await asked(2)
        end.set()
        await at_rest(rig, route)
        assert link.turn is not None and link.turn.observed == {"abandoned": 1.0}


async def test_a_stream_that_ends_with_its_user_is_under_way_no_more(rig: server.Rig, open_route: OpenRoute) -> None:
    rig.vllm.default = rig.vllm.hang(role_chunk(), token_chunk([1]))
    async with open_route() as route:
        talk: Any = Talk()
        outcome = await first(route, asking(stream=True), talk)
        assert isinstance(outcome, Live) and outcome.close is not None
        assert not talk.told
        await outcome.close()
        await at_rest(rig, route)
        assert talk.told == ["gave up"]


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("on_disconnect", ["cancel", "finish"])
async def test_a_stream_that_breaks_off_is_under_way_no_more(
    rig: server.Rig, open_route: OpenRoute, on_disconnect: str, leaves: bool
) -> None:
    cut = asyncio.Event()
    # a tool call cannot be continued by the data plane
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    broken = streamed(role_chunk(), token_chunk([1], delta={"tool_calls": [call]}), cut.wait, done=False)
    rig.vllm.default = lambda body: (broken if body.get("stream") else plain([1]))(body)
    async with open_route(on_disconnect=on_disconnect) as route:
        talk: Any = Talk()
        outcome = await first(route, asking(stream=True), talk)
        assert isinstance(outcome, Live) and outcome.close is not None
        if leaves:
            await outcome.close()
        cut.set()
        if not leaves:
            with pytest.raises(UpstreamError):
                await chunks_of(outcome)
        await at_rest(rig, route)
        assert talk.told == ["gave up"] and route.stats.groups.trained == 0


@pytest.mark.parametrize("on_disconnect", ["cancel", "finish"])
async def test_an_error_of_which_its_user_hears_is_none_of_ours_in_the_log(
    rig: server.Rig, open_route: OpenRoute, caplog: pytest.LogCaptureFixture, on_disconnect: str
) -> None:
    rig.vllm.default = status(400, {"error": {"message": "no", "type": "BadRequestError", "param": None, "code": 400}})
    async with open_route(on_disconnect=on_disconnect) as route:
        with pytest.raises(RelayedError):
            await best(route, asking(), None, ReturnPolicy())
        await at_rest(rig, route)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_group_of_policy_first_whose_user_left_before_the_answer_is_counted(
    rig: server.Rig, open_route: OpenRoute, stream: bool
) -> None:
    rig.vllm.default = rig.vllm.hang()
    async with open_route() as route:
        answering = asyncio.create_task(first(route, asking(stream=stream), None))
        async with asyncio.timeout(60):
            while not rig.vllm.streaming:
                await rig.client.get("/health")
        answering.cancel()
        await at_rest(rig, route)
        assert len(rig.vllm.requests) == len(rig.vllm.cancellations) == 1
        assert dict(route.stats.groups.dropped) == {"request_cancelled": 1}
