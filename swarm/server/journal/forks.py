"""The journal of a run that goes on from a step of another run, in a folder of its own.

Invariant: it holds the steps that led to that one under the runs that did them, so that what the new run learns has
them as its ancestors; and nothing of what people wrote.
"""

from __future__ import annotations

import json
import sqlite3
import uuid
from contextlib import closing
from pathlib import Path

from swarm.errors import ConfigError
from swarm.job import TrainJob, dump_job, parse_job
from swarm.server.journal.lineage import line_to
from swarm.server.journal.rows import EvaluationRow, JournalRow, RunRow, StepRow
from swarm.server.journal.schema import open_to_write, reading
from swarm.server.journal.sqlite import unpack_step, write


def fork_journal(journal: Path, step: int, into: Path) -> TrainJob:
    """Write the journal ``into`` of a run that goes on from ``step`` of ``journal``; its job, which keeps its
    checkpoints in its run folder.

    Raises:
        ConfigError: ``journal`` does not know the step, or one of the two cannot be read or written.
    """
    with reading(journal) as connection:
        line = line_to(connection, step)
        if not line:
            raise ConfigError(f"{journal} does not know step {step}: nothing says which job trained it", param="step")
        rows: list[JournalRow] = []
        job_yaml = ""
        for run_id in dict.fromkeys(run_id for run_id, _, _ in line):
            [(job_yaml,)] = connection.execute("SELECT job_yaml FROM runs WHERE run_id = ?", (run_id,))
            rows.append(RunRow(run_id, job_yaml, stopped=True))
            rows += [
                EvaluationRow(run_id, number, json.loads(sums))
                for number, sums in connection.execute(
                    "SELECT step, sums FROM evaluations WHERE run_id = ? AND step <= ?", (run_id, step)
                )
            ]
        for run_id, _, batch_id in line:
            [row] = connection.execute(
                "SELECT step, batch_id, metrics, seconds FROM steps WHERE run_id = ? AND batch_id = ?",
                (run_id, batch_id),
            )
            rows.append(StepRow(run_id, unpack_step(*row)))
    job = parse_job(job_yaml, f"the job in {journal}").model_copy(update={"checkpoint_dir": None})
    rows.append(RunRow(uuid.uuid4().hex, dump_job(job)))
    with closing(open_to_write(into)) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
            write(connection, rows)
            connection.execute("COMMIT")
        except sqlite3.Error as exc:
            raise ConfigError(f"cannot write {into}: {exc}") from exc
    return job
