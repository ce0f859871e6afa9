"""Requests on groups that were claimed ahead, on the real swarm server."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.rollout.best import best
from gateway.rollout.first import first
from gateway.rollout.policy import Policy
from gateway.routing.route import Route
from gateway.stats import DropReason
from gateway.types import Decided, Live
from tests.gateway.rollout.conftest import JOB, OpenRoute, asking, chunks_of, text_of
from tests.gateway.rollout.test_best import reach
from tests.gateway.rollout.test_first import SAID, by_form
from tests.swarm.server import conftest as server
from tests.swarm.server.vllm import plain

pytestmark = pytest.mark.anyio


async def warm(rig: server.Rig, route: Route, groups: int = 1) -> None:
    """Return once a request has been trained and so many groups wait for the next."""
    await best(route, asking(), None, Policy())
    assert route.swarm is not None
    standby = route.swarm.episodes.standby
    await reach(rig, lambda: len(standby) == groups and route.stats.trained == 1)


async def never(*_: Any) -> Any:
    raise AssertionError("a request claimed for itself")


async def test_a_request_takes_what_was_claimed_ahead_and_trains_it(
    rig: server.Rig, open_route: OpenRoute, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_route(warm_groups=1) as route:
        await warm(rig, route)
        assert route.swarm is not None
        [*ahead] = [episode.episode_uuid for episode in rig.controller.pool.episodes]
        assert len(ahead) == JOB.num_repeat
        monkeypatch.setattr(route.swarm.episodes, "claim", never)
        await best(route, asking(), None, Policy())
        await reach(rig, lambda: route.stats.trained == 2)
        members = [one.trajectory.episode_uuid for g in rig.controller.pool.collection.waiting() for one in g.members]
        assert set(ahead) <= set(members) and not route.stats.dropped
    await reach(rig, lambda: rig.controller.pool.running == 0)


@pytest.mark.parametrize("policy", ["best", "first"])
async def test_a_group_that_gave_way_is_replaced_unseen(rig: server.Rig, open_route: OpenRoute, policy: str) -> None:
    rig.vllm.default = by_form(SAID, plain([1, 2]))
    async with open_route(warm_groups=1) as route:
        await warm(rig, route)
        everything = await rig.post("/claim_group", client_uuid="you", count=JOB.slots)
        assert everything["success"]
        for episode in everything["episodes"]:
            await rig.post("/abort_episode", client_uuid="you", episode_uuid=episode["episode_uuid"])
        outcome: Live | Decided
        if policy == "first":
            outcome = await first(route, asking(stream=True), None)
        else:
            outcome = await best(route, asking(stream=True), None, Policy())
        assert text_of(await chunks_of(outcome)).startswith("t1 t2")
        await reach(rig, lambda: route.stats.trained == 2)
        assert route.stats.dropped == {DropReason.GAVE_WAY: 1}


async def test_another_size_is_not_served_from_them(rig: server.Rig, open_route: OpenRoute) -> None:
    async with open_route(warm_groups=1) as route:
        await warm(rig, route)
        assert route.swarm is not None
        other = route.settings.model_copy(update={"num_repeat": 2, "warm_groups": 0})
        smaller = Route(
            "two", other, (), False, route.swarm, None, route.hooks, route.stats, route.background
        )  # fmt: skip
        decided = await best(smaller, asking(), None, Policy())
        assert decided.completion["choices"]
        assert rig.vllm.requests[-1][1]["n"] == 2
        await reach(rig, lambda: route.stats.dropped[DropReason.SIZE] == 1)
        assert len(route.swarm.episodes.standby) == 1
