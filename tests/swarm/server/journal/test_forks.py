"""The journal of a fork: who its ancestors are, and that a server goes on with it as with any other."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from adapters.models.card import model_card
from swarm.errors import ConfigError
from swarm.evidence.alarms import WatchRules
from swarm.job import dump_job
from swarm.server.engine.runs import TrainingRun
from swarm.server.journal.forks import fork_journal
from swarm.server.journal.journal import Journal
from swarm.server.journal.lineage import record_of, versions_of
from swarm.server.journal.rows import EvaluationRow, JournalRow, RunRow
from swarm.server.journal.schema import reading
from tests.swarm.server.journal.test_lineage import JOB, journal, step

pytestmark = pytest.mark.anyio


def parents(folder: Path) -> Path:
    """A run that another one with another job went on with; its second step was done again."""
    folder.mkdir()
    other = JOB.model_copy(update={"lr": 0.5, "checkpoint_dir": str(folder / "elsewhere")})
    rows: list[JournalRow] = [RunRow("first", dump_job(JOB)), step("first", 1, "a"), step("first", 2, "lost")]
    rows += [step("first", 2, "b"), EvaluationRow("first", 2, {"reward_mean": (4, 3.0)})]
    rows += [RunRow("second", dump_job(other)), step("second", 3, "c"), step("second", 4, "d")]
    return journal(folder, *rows)


async def test_what_a_fork_learns_has_the_steps_before_it_as_its_ancestors(tmp_path: Path) -> None:
    job = fork_journal(path := await asyncio.to_thread(parents, tmp_path / "run"), 3, tmp_path / "journal.db")
    assert (job.lr, job.checkpoint_dir) == (0.5, None), "of the run that did the step"
    opened = Journal.open(tmp_path / "journal.db")
    run = TrainingRun(60.0, WatchRules())
    run.open(opened)
    # the same job goes on, as `up` gives it
    assert not run.sync(job.model_copy(update={"resume": True})) and run.start().resume
    forked = run.run_id
    opened.append(step(forked, 4, "e"))
    await opened.close()
    with reading(tmp_path / "journal.db") as connection:
        learned, clean = versions_of(connection, {"c"})
        assert ([(one.run_id, one.step) for one in learned], clean) == ([("second", 3), (forked, 4)], 2)
        assert versions_of(connection, {"d"}) == ([], 4) == versions_of(connection, {"lost"})
    found = record_of(tmp_path / "journal.db", 4)
    assert (found.run_id, found.parent, [one.batch_id for one in found.steps]) == (
        forked,
        "step 3 of run second",
        ["e"],
    )
    nested = found.job.model_copy(update={"overrides": {"+algorithm": {"gamma": 0.9}, "trainer.nnodes": 1}})
    card = model_card(found.model_copy(update={"job": nested}), "float32", {}, adapter=False, lora=False)
    assert "| `algorithm.gamma` | 0.9 |" in card and "nnodes" not in card
    assert record_of(path, 4).parent == "step 2 of run first" and record_of(path, 2).parent == ""
    card = model_card(found, "float32", {}, adapter=False, lora=False)
    assert "| goes on from | step 3 of run second |" in card
    assert "Not proven: reward over 1 step tells nothing yet." in card
    with reading(tmp_path / "journal.db") as connection:
        assert connection.execute("SELECT run_id, step FROM evaluations").fetchall() == [("first", 2)]


async def test_a_step_that_no_journal_knows_is_refused(tmp_path: Path) -> None:
    path = await asyncio.to_thread(parents, tmp_path / "run")
    with pytest.raises(ConfigError, match="does not know step 5"):
        fork_journal(path, 5, tmp_path / "journal.db")
    assert not (tmp_path / "journal.db").exists()
