"""What the weights of a saved step were trained on, read beside the server that writes the journal.

Invariant: the journal is only read. A step that was done twice, because the first one was not saved, counts as it was
done last.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from pathlib import Path

from swarm.errors import ConfigError
from swarm.job import TrainJob, parse_job
from swarm.measures import EVAL, MetricSums
from swarm.server.journal.codec import notes_of
from swarm.server.journal.schema import reading
from swarm.states import EpisodeState
from swarm.status import Lineage
from swarm.types import EvalResult, StepResult


def latest_job(journal: Path) -> tuple[TrainJob, int]:
    """The job of the latest run, and the last step of it; 0: it has done none.

    Raises:
        ConfigError: there is no journal, it cannot be read, or no job was ever given.
    """
    with reading(journal) as connection:
        run_id, job_yaml = _latest(connection, journal)
        [(step,)] = connection.execute("SELECT max(step) FROM steps WHERE run_id = ?", (run_id,))
    return parse_job(job_yaml, f"the job in {journal}"), step or 0


def lineage_of(journal: Path, step: int) -> Lineage:
    """What trained the weights of ``step``, which a run of this journal saved.

    Raises:
        ConfigError: see :func:`latest_job`.
    """
    with reading(journal) as connection:
        # a run that begins after the step, with another job, goes on with what another one saved
        run = connection.execute(
            "SELECT run_id, job_yaml FROM runs WHERE run_id IN (SELECT run_id FROM steps WHERE step <= ?)"
            " ORDER BY rowid DESC LIMIT 1",
            (step,),
        ).fetchone()
        run_id, job_yaml = run or _latest(connection, journal)
        rows = connection.execute(
            "SELECT step, batch_id, metrics, seconds FROM steps WHERE run_id = ? AND step <= ? ORDER BY rowid",
            (run_id, step),
        ).fetchall()
        steps = {
            number: StepResult(step=number, batch_id=batch_id, metrics=json.loads(metrics), seconds=seconds)
            for number, batch_id, metrics, seconds in rows
        }
        evaluations = connection.execute(
            "SELECT step, sums FROM evaluations WHERE run_id = ? AND step <= ? ORDER BY step", (run_id, step)
        ).fetchall()
        outputs = connection.execute(
            f"SELECT output FROM episodes WHERE state = '{EpisodeState.TRAINED}'"
            " AND batch_id IN (SELECT value FROM json_each(?))",
            (json.dumps([step.batch_id for step in steps.values()]),),
        ).fetchall()
    routes = Counter(notes_of(json.loads(output) if output else {}).route for (output,) in outputs)
    return Lineage(
        step=step,
        job=parse_job(job_yaml, f"the job in {journal}"),
        steps=[steps[number] for number in sorted(steps)],
        evaluations=[_evaluation(number, sums) for number, sums in evaluations],
        routes={name: count for name, count in sorted(routes.items()) if name},
        others=routes[""],
    )


def _latest(connection: sqlite3.Connection, journal: Path) -> tuple[str, str]:
    newest = connection.execute("SELECT run_id, job_yaml FROM runs WHERE job_yaml != '' ORDER BY rowid DESC LIMIT 1")
    row: tuple[str, str] | None = newest.fetchone()
    if row is None:
        raise ConfigError(f"{journal} holds no training job: nothing was trained in this run folder")
    return row


def _evaluation(step: int, sums: str) -> EvalResult:
    measured = MetricSums({name: (count, total) for name, (count, total) in json.loads(sums).items()})
    return EvalResult(step=step, episodes=measured.episodes, metrics=measured.means(EVAL))
