"""Hooks over recorded groups: what is reported, and that nothing is left out in silence."""

from __future__ import annotations

from typing import Any

import pytest

from reward_hooks import Candidate, HookContext, Hooks, Task
from reward_hooks.offline import OfflineConfig, run_offline
from reward_hooks.recorded import RecordedGroup

pytestmark = pytest.mark.anyio


def group(*texts: str, rank: list[float] | None = None) -> RecordedGroup:
    candidates = [Candidate(index=i, message={}, text=text) for i, text in enumerate(texts)]
    return RecordedGroup(task=Task(task_id="t", main_query="q"), candidates=candidates, rank=rank)


def longer(task: Task, candidates: list[Candidate], context: HookContext) -> list[float]:
    if any(candidate.text == "!" for candidate in candidates):
        raise ValueError("exclamation")
    return [float(len(candidate.text)) for candidate in candidates]


def shorter(task: Task, candidates: list[Candidate], context: HookContext) -> list[float]:
    return [-value for value in longer(task, candidates, context)]


def by_place(task: Task, candidates: list[Candidate], context: HookContext) -> list[float]:
    return [float(candidate.index) for candidate in candidates]


GROUPS = [
    group("a", "bbb", "cc", rank=[3, 1, 2]),
    group("a", "b"),
    group("a", "!", rank=[1, 2]),
    group("aa", "b", rank=[2, 1]),
]


async def test_a_report_is_complete() -> None:
    told: list[tuple[object, ...]] = []

    def on_progress(*said: object) -> None:
        told.append(said)

    report = await run_offline(
        Hooks(longer, source="longer"),
        GROUPS,
        Hooks(shorter, source="shorter"),
        on_progress=on_progress,
    )
    assert told == [("scoring", done, 4, "groups") for done in (1, 2, 3, 4)]
    assert (report.scored, report.failed, report.uninformative) == (3, {"hook_raised": 1}, 1)
    # equals keep their order
    assert [one.order for one in report.groups] == [[1, 2, 0], [0, 1], [], [0, 1]]
    assert "exclamation" in report.groups[2].error
    assert (report.ranked, report.tau_rank) == (2, pytest.approx(0.0))  # one right, one wrong
    assert (report.compared, report.tau_against) == (2, pytest.approx(-1.0))
    assert report.flip_rate == 0.0
    assert report.seconds_median is not None
    assert report.spent["calls"] == 0


async def test_a_hook_that_looks_at_places_is_caught() -> None:
    many = [group(*"abcdefgh") for _ in range(20)]
    report = await run_offline(Hooks(by_place), many, config=OfflineConfig(shuffles=2))
    assert report.flip_rate == pytest.approx(0.5, abs=0.1)


async def test_no_shuffles_no_flip_rate() -> None:
    report = await run_offline(Hooks(longer), GROUPS[:1], config=OfflineConfig(shuffles=0))
    assert report.flip_rate is None
    assert report.tau_against is None


async def test_a_hook_that_hangs_fails_its_group() -> None:
    async def hang(task: Task, candidates: list[Candidate], context: HookContext) -> Any:
        import asyncio

        await asyncio.Event().wait()

    report = await run_offline(Hooks(hang), GROUPS[:1], config=OfflineConfig(timeout=0.05))
    assert (report.scored, report.failed) == (0, {"hook_timeout": 1})
