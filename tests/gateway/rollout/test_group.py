"""A group on the real swarm server comes to its end whatever its hook says, and is counted; its user has the answer."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.rollout import group
from gateway.rollout.return_policy import ReturnPolicy
from gateway.rollout.server import Swarm
from gateway.rollout.submission import submit
from gateway.stats import Accounted, DropReason, Stats
from reward_hooks import Candidate, HookContext, Reward
from swarm.types import Task, WorkflowOutput
from tests.gateway.rollout.conftest import JOB, Judge, OpenRoute, at_rest
from tests.gateway.rollout.test_best import answer
from tests.swarm.server import conftest as server

pytestmark = pytest.mark.anyio


async def test_a_reason_that_no_json_can_say_is_trained(rig: server.Rig, open_route: OpenRoute, judge: Judge) -> None:
    async def odd(task: Task, candidates: list[Candidate], context: HookContext) -> list[Reward]:
        return [Reward(value=float(one.index), reason="\ud800") for one in candidates]

    judge.reward = odd  # pyright: ignore[reportAttributeAccessIssue]
    async with open_route(acknowledge_seconds=10.0) as route:
        await answer(route, ReturnPolicy())
        await at_rest(rig, route)
        assert (route.stats.groups.trained, rig.controller.pool.information().completed_episodes) == (1, 4)


async def test_a_failure_that_no_json_can_say_leaves_no_episode(
    rig: server.Rig, open_route: OpenRoute, judge: Judge
) -> None:
    async def odd(task: Task, candidates: list[Candidate], context: HookContext) -> list[float]:
        raise ValueError("half: \ud800")

    judge.reward = odd
    async with open_route(acknowledge_seconds=10.0) as route:
        await answer(route, ReturnPolicy())
        await at_rest(rig, route)
        assert dict(route.stats.groups.dropped) == {"reward_hook_failed": 1}


async def test_an_end_that_fails_is_not_the_users(
    rig: server.Rig, open_route: OpenRoute, monkeypatch: pytest.MonkeyPatch
) -> None:
    def outputs(*_: Any, **__: Any) -> None:
        raise LookupError("a bug")

    monkeypatch.setattr(group, "workflow_outputs", outputs)
    async with open_route(acknowledge_seconds=10.0) as route:
        assert (await answer(route, ReturnPolicy())).headers["x-swarm-drop-reason"] == "sample_failed"
        await at_rest(rig, route)
        assert dict(route.stats.groups.dropped) == {"sample_failed": 1}


async def test_what_cannot_be_sent_is_given_back_and_counted(rig: server.Rig, caplog: pytest.LogCaptureFixture) -> None:
    stats = Stats()
    async with Swarm(str(rig.client.base_url), "") as swarm:
        group = await swarm.client.claim_group(JOB.num_repeat, 5.0)
        outputs = {one: WorkflowOutput(reward=1.0, metadata={"odd": "\ud800"}) for one in group.episode_uuids}
        assert await submit(swarm.client, "t", outputs, 30.0, stats, Accounted()) is DropReason.REFUSED
        assert (stats.groups.trained, dict(stats.groups.dropped)) == (0, {"submission_refused": 1})
        assert rig.controller.pool.information().running_episodes == 0
    assert "metadata of the workflow output cannot be JSON" in caplog.text
