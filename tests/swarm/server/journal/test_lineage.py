"""What trained the weights of a step, read from journals of runs that crashed, went back, or changed their job."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from swarm.errors import ConfigError
from swarm.job import TrainJob, dump_job
from swarm.server.journal.journal import Journal
from swarm.server.journal.lineage import latest_job, record_of
from swarm.server.journal.rows import EvaluationRow, JournalRow, RunRow, StateRow, StepRow
from swarm.states import EpisodeState
from swarm.types import Notes, StepResult, WorkflowOutput
from tests.swarm.server.journal.build import claimed, ended

JOB = TrainJob(model="tiny")


def step(run_id: str, number: int, batch_id: str, reward: float = 0.5) -> StepRow:
    metrics = {"swarm/reward_mean": reward}
    return StepRow(run_id, StepResult(step=number, batch_id=batch_id, metrics=metrics, seconds=1.0))


def trained(uuid: str, batch_id: str, **notes: Any) -> tuple[JournalRow, ...]:
    output = WorkflowOutput(reward=1.0, notes=Notes(**notes) if notes else None)
    return claimed(uuid), ended(uuid, output=output), StateRow([uuid], EpisodeState.TRAINED, batch_id, 1)


def journal(folder: Path, *rows: JournalRow) -> Path:
    async def fill() -> None:
        opened = Journal.open(folder / "journal.db")
        opened.append(*rows)
        await opened.close()

    asyncio.run(fill())
    return folder / "journal.db"


def test_a_step_that_was_done_again_counts_as_it_was_done_last(tmp_path: Path) -> None:
    path = journal(
        tmp_path,
        RunRow("r", dump_job(JOB)),
        step("r", 1, "a"),
        step("r", 2, "lost", 0.1),
        # the trainer died before step 2 was saved
        step("r", 2, "b", 0.9),
        step("r", 3, "c"),
        *trained("e1", "a", route="support"),
        *trained("e2", "lost", route="support"),
        *trained("e3", "b", route="sales"),
        *trained("e4", "b"),
        *trained("e5", "c"),
        EvaluationRow("r", 2, {"reward_mean": (4, 3.0)}),
        EvaluationRow("r", 3, {"reward_mean": (4, 1.0)}),
    )
    assert latest_job(path) == (JOB, 3)
    found = record_of(path, 2)
    assert [(one.step, one.batch_id) for one in found.steps] == [(1, "a"), (2, "b")]
    assert (found.routes, found.others) == ({"sales": 1, "support": 1}, 1)
    assert [(one.step, one.episodes, one.metrics) for one in found.evaluations] == [(2, 4, {"eval/reward_mean": 0.75})]


def test_a_run_that_went_back_has_the_episodes_of_the_steps_that_it_goes_on_with(tmp_path: Path) -> None:
    path = journal(
        tmp_path,
        RunRow("first", dump_job(JOB)),
        *(step("first", number, f"a{number}") for number in (1, 2, 3)),
        step("second", 1, "a1"),
        RunRow("second", dump_job(JOB)),
        step("second", 2, "b2"),
        *(one for number in (1, 2, 3) for one in trained(f"a{number}", f"a{number}", route="x")),
        *trained("b2", "b2", route="x"),
    )
    assert latest_job(path)[1] == 2
    found = record_of(path, 2)
    assert [one.batch_id for one in found.steps] == ["a1", "b2"] and found.routes == {"x": 2}


def test_a_step_before_the_job_changed_is_of_the_job_that_did_it(tmp_path: Path) -> None:
    other = JOB.model_copy(update={"lr": 0.5})
    rows = [RunRow("first", dump_job(JOB)), step("first", 1, "a"), RunRow("second", dump_job(other))]
    path = journal(tmp_path, *rows, step("second", 2, "b"))
    assert record_of(path, 1).job == JOB
    assert record_of(path, 2).job == other and [one.step for one in record_of(path, 2).steps] == [2]
    assert record_of(path, 0).steps == []


def test_a_journal_without_a_job_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no training job"):
        latest_job(journal(tmp_path))
