"""What judges spend while a hook runs over recorded groups."""

from __future__ import annotations

import pytest

from reward_hooks import Hooks, Task
from reward_hooks.judges import make_judge
from reward_hooks.offline import OfflineConfig, run_offline
from reward_hooks.recorded import RecordedGroup
from tests.reward_hooks.judges.scripted import answers, judging

pytestmark = pytest.mark.anyio


async def test_the_cost_of_judges_is_the_hooks_own() -> None:
    async with judging() as scripted:
        endpoint = {**scripted.endpoint, "input_price": 1.0, "output_price": 1.0}
        judge = make_judge({"kind": "listwise", "orders": 1, "endpoint": endpoint})
        other = make_judge({"kind": "pointwise", "endpoint": endpoint})
        groups = [
            RecordedGroup(task=Task(task_id="t", main_query=f"q{n}"), candidates=answers(1, 4, 8), rank=[3, 2, 1])
            for n in range(3)
        ]
        report = await run_offline(Hooks(judge), groups, Hooks(other), OfflineConfig(shuffles=0))
        await judge.aclose()
        await other.aclose()
    assert report.spent["calls"] == 3
    assert report.spent["cost"] == pytest.approx(3 * 120e-6)
    assert report.tau_rank == report.tau_against == pytest.approx(1.0)
