"""A request that waits for episodes: its place in the queue of the swarm server, and how long it keeps waiting."""

from __future__ import annotations

import asyncio
import time

import pytest

from gateway.rollout.answering import best
from gateway.rollout.return_policy import ReturnPolicy
from gateway.sessions.open_groups import Hold
from swarm.client.calls import Calls
from swarm.concurrency import end_tasks
from swarm.errors import UnavailableError
from tests.gateway.rollout.conftest import JOB, OpenRoute, asking
from tests.gateway.rollout.test_best import reach
from tests.swarm.server import conftest as server

pytestmark = pytest.mark.anyio


class Polls:
    """How often the gateway's clients have polled in vain; to them, each poll takes seven seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        polls = self

        async def pause(calls: Calls, early: int, remaining: float) -> None:
            polls.count += 1

        monkeypatch.setattr(Calls, "pause_between_polls", pause)
        monkeypatch.setattr("swarm.client.calls.monotonic", lambda: time.monotonic() + 7.0 * polls.count)
        monkeypatch.setattr("swarm.client.calls.LONG_POLL", 0.2)
        monkeypatch.setattr("swarm.server.episodes.claims.LONG_POLL", 0.2)


async def test_a_request_keeps_its_place_for_as_long_as_it_waits(
    rig: server.Rig, open_route: OpenRoute, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = [await rig.claim("other") for _ in range(JOB.slots)]
    polls, claims = Polls(monkeypatch), rig.controller.episodes.claims
    async with open_route() as route:
        old = asyncio.create_task(best(route, asking(), None, ReturnPolicy()))
        await reach(rig, lambda: len(claims) == 1)
        group = {"client_uuid": "new", "count": JOB.num_repeat, "wait_seconds": 60}
        new = asyncio.create_task(rig.post("/claim_group", **group))
        await reach(rig, lambda: len(claims) == 2)
        await reach(rig, lambda: polls.count >= 4)
        for episode in taken[: JOB.num_repeat]:
            await rig.post("/abort_episode", client_uuid="other", episode_uuid=episode.uuid)
        try:
            first, _ = await asyncio.wait({old, new}, return_when=asyncio.FIRST_COMPLETED)
            assert first == {old}
        finally:
            await end_tasks(old, new)


async def test_a_request_with_a_fallback_waits_no_longer_for_an_engine_that_restarts_meanwhile(
    rig: server.Rig, open_route: OpenRoute, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(JOB.slots):
        await rig.claim("other")
    monkeypatch.setattr("swarm.client.calls.LONG_POLL", 0.1)
    async with open_route(offline_wait_seconds=0.1, upstream={"base_url": "http://127.0.0.1:9"}) as route:
        waiting = asyncio.create_task(best(route, asking(), None, ReturnPolicy()))
        await reach(rig, lambda: len(rig.controller.episodes.claims) == 1)
        rig.controller.offline("killed")
        rig.controller.boot()
        async with asyncio.timeout(20):
            with pytest.raises(UnavailableError) as refused:
                await waiting
    assert refused.value.code == "engine_booting" and "gave up after" in refused.value.message


async def test_a_group_that_opens_while_a_request_waits_makes_room_for_it(
    rig: server.Rig, open_route: OpenRoute, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = [await rig.claim("other") for _ in range(JOB.slots)]
    monkeypatch.setattr("swarm.client.calls.LONG_POLL", 0.1)
    async with open_route() as route:
        waiting = asyncio.create_task(best(route, asking(), None, ReturnPolicy()))
        await reach(rig, lambda: len(rig.controller.episodes.claims) == 1)
        groups = route.swarm.open_groups
        async with asyncio.timeout(20):
            await groups.keep(Hold(asyncio.get_running_loop().time() + 1000))
        assert groups.closed == {"room": 1}
        for episode in taken:
            await rig.post("/abort_episode", client_uuid="other", episode_uuid=episode.uuid)
        await waiting
