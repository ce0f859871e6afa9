"""What users notice of each trouble, and what is left behind: nothing. In small; ``python -m
tests.gateway.resilience`` for more of it and for figures.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.resilience import leaving, scenarios
from tests.gateway.resilience.rig import Rig, running

pytestmark = [pytest.mark.slow, pytest.mark.anyio]
Scenario = Callable[[Rig, int, int, int], Awaitable[dict[str, Any]]]


async def report_of(folder: Path, scenario: Scenario, wanted: int, users: int) -> dict[str, Any]:
    async with running(folder) as rig:
        report = await scenario(rig, wanted, random.randrange(2**32), users)
    assert report["errors"] == 0, report
    assert not any(report["leaks"].values()), report
    return report


async def test_nobody_notices_that_weights_sync(tmp_path: Path) -> None:
    report = await report_of(tmp_path, scenarios.syncs, wanted=3, users=8)
    assert report["syncs"] >= 3 and report["groups_trained"] > 0


async def test_who_hangs_up_leaves_nothing_behind(tmp_path: Path) -> None:
    report = await report_of(tmp_path, leaving.disconnects, wanted=40, users=16)
    assert report["disconnects"] >= 40 and set(leaving.PHASES) <= set(report["phases"])
    assert report["cancelled_upstream"] > 0, report


async def test_nobody_notices_that_the_swarm_server_is_killed(tmp_path: Path) -> None:
    report = await report_of(tmp_path, scenarios.restarts, wanted=1, users=8)
    assert report["by_upstream"] > 0


async def test_nobody_notices_that_the_trainer_is_killed(tmp_path: Path) -> None:
    report = await report_of(tmp_path, scenarios.crashes, wanted=1, users=8)
    assert report["by_upstream"] >= 8


async def test_a_judge_that_hangs_costs_its_own_group_alone(tmp_path: Path) -> None:
    report = await report_of(tmp_path, scenarios.hanging_judge, wanted=2, users=8)
    assert report["others"]["errors"] == 0, report
    assert report["dropped"]["reward_hook_failed"] >= 2


async def test_who_is_answered_by_an_incumbent_notices_nothing_of_the_challenger_behind_it(tmp_path: Path) -> None:
    report = await report_of(tmp_path, scenarios.shadow, wanted=200, users=8)
    assert report["sources"] == {"incumbent": report["answers"]} and report["behind"]["trained"] > 0, report
