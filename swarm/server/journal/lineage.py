"""What the weights of a saved step were trained on, which versions learned from which batches, and what `policies eval`
found of them; read beside the server that writes the journal.

Invariant: the journal is only read, and a comparison's line is whole, or not read. A step that was done twice, because
the first one was not saved, counts as it was done last, and has the latest version before it as its parent; what it
replaced is a version still, since it was served. A version is tainted if its own batch is, or the version that it was
trained from.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pydantic import Field, ValidationError

from swarm.credentials import append_private
from swarm.errors import ConfigError
from swarm.evidence.pairs import Pair
from swarm.evidence.stages import ServingStage
from swarm.evidence.verdict import PairedEvidence
from swarm.job import TrainJob, parse_job
from swarm.measures import MetricSums
from swarm.server.journal.schema import reading
from swarm.server.journal.sqlite import notes_of, unpack_step
from swarm.states import EpisodeState
from swarm.status import PolicyRecord
from swarm.subjects import LearnedVersion
from swarm.types import Model

_LISTED = "(SELECT value FROM json_each(?))"
#: beside the journal: a line for each comparison, with nothing of what people wrote
_COMPARISONS = "held_out.jsonl"


def latest_job(journal: Path) -> tuple[TrainJob, int]:
    """The job of the latest run, and the last step of it; 0: it has done none.

    Raises:
        ConfigError: there is no journal, it cannot be read, or no job was ever given.
    """
    with reading(journal) as connection:
        run_id, job_yaml = _latest(connection, journal)
        [(step,)] = connection.execute("SELECT max(step) FROM steps WHERE run_id = ?", (run_id,))
    return parse_job(job_yaml, f"the job in {journal}"), step or 0


def record_of(journal: Path, step: int) -> PolicyRecord:
    """All that is known of the policy version of ``step``: what trained its weights, and what was found of it.

    Raises:
        ConfigError: see :func:`latest_job`.
    """
    with reading(journal) as connection:
        query = connection.execute
        # a run that begins after the step, with another job, goes on with what another one saved
        run = query(
            "SELECT run_id, job_yaml FROM runs WHERE run_id IN (SELECT run_id FROM steps WHERE step <= ?)"
            " ORDER BY rowid DESC LIMIT 1",
            (step,),
        ).fetchone()
        run_id, job_yaml = run or _latest(connection, journal)
        rows = query(
            "SELECT step, batch_id, metrics, seconds FROM steps WHERE run_id = ? AND step <= ? ORDER BY rowid",
            (run_id, step),
        )
        by_number = {row[0]: unpack_step(*row) for row in rows}
        steps = [by_number[number] for number in sorted(by_number)]
        batch = by_number[step].batch_id if step in by_number else ""
        evaluations = query(
            "SELECT step, sums FROM evaluations WHERE run_id = ? AND step <= ? ORDER BY step", (run_id, step)
        ).fetchall()
        trained = query(
            f"SELECT ended, output FROM episodes WHERE state = '{EpisodeState.TRAINED}' AND batch_id IN {_LISTED}"
            " ORDER BY ended",
            (json.dumps([done.batch_id for done in steps]),),
        ).fetchall()
        before = [f"step {number} of run {run}" for run, number, _ in line_to(connection, step) if run != run_id]
        judged = query(
            "SELECT DISTINCT output FROM episodes WHERE batch_id = ?", (steps[-1].batch_id if steps else None,)
        ).fetchall()
        # a run that went back before the step has other weights under its number
        same = query("SELECT run_id FROM steps WHERE step = ? AND batch_id = ?", (step, batch))
        runs = json.dumps([run for (run,) in same] or [run_id])
        pairs = query(
            f"SELECT pair FROM pairs WHERE run_id IN {_LISTED} AND json_extract(pair, '$.terms.challenger') = ?"
            " ORDER BY rowid",
            (runs, step),
        ).fetchall()
        # of one move the first row is the move, and later ones are other versions in its stage
        stages = query(
            f"SELECT stage, min(version) FROM stages WHERE run_id IN {_LISTED}"
            " AND json_extract(stage, '$.challenger') = ?"
            " GROUP BY run_id, route, incumbent, json_extract(stage, '$.at', '$.pinned') ORDER BY min(rowid)",
            (runs, step),
        ).fetchall()
    notes = [notes_of(json.loads(output)) for (output,) in judged if output]
    routes = Counter(notes_of(json.loads(output) if output else {}).route for _, output in trained)
    return PolicyRecord(
        step=step,
        job=parse_job(job_yaml, f"the job in {journal}"),
        steps=steps,
        evaluations=[MetricSums(json.loads(sums)).evaluation(number) for number, sums in evaluations],
        routes={name: count for name, count in sorted(routes.items()) if name},
        others=routes[""],
        run_id=run_id,
        parent=before[-1] if before else "",
        held_out=_held_out(journal.parent, step, batch),
        code=sorted({f"{note.hook} ({note.code[:12]})" for note in notes if note.hook}),
        episodes=(trained[0][0], trained[-1][0]) if trained else None,
        verdicts=_verdicts([Pair.model_validate_json(pair) for (pair,) in pairs]),
        moves=[_move(ServingStage.model_validate_json(stage)) for stage, _ in stages],
    )


def _verdicts(pairs: Iterable[Pair]) -> list[str]:
    comparisons: dict[str, PairedEvidence] = {}
    for pair in pairs:
        digest = pair.terms.digest
        if digest not in comparisons:
            comparisons[digest] = PairedEvidence(pair.terms)
        comparisons[digest].add(pair)
    return [
        f"{each.terms.stage}, against {each.terms.incumbent}: {each.verdict().sentence}"
        for each in comparisons.values()
    ]


def _move(stage: ServingStage) -> str:
    since = datetime.fromtimestamp(stage.at, UTC).isoformat(timespec="seconds")
    pinned = f"; pinned by {stage.pinned_by}: {stage.pinned_why}" if stage.pinned else ""
    return f"{stage.route}: {stage.label} since {since}, by {stage.by}: {stage.why}{pinned}"


def _latest(connection: sqlite3.Connection, journal: Path) -> tuple[str, str]:
    newest = connection.execute("SELECT run_id, job_yaml FROM runs WHERE job_yaml != '' ORDER BY rowid DESC LIMIT 1")
    row: tuple[str, str] | None = newest.fetchone()
    if row is None:
        raise ConfigError(f"{journal} holds no training job: nothing was trained in this run folder")
    return row


@dataclass(eq=False, slots=True)
class _Version:
    run_id: str
    batch_id: str
    step: int
    parent: _Version | None
    tainted: bool
    current: bool = False


def versions_of(connection: sqlite3.Connection, batches: Collection[str]) -> tuple[list[LearnedVersion], int]:
    """The versions that were trained on ``batches``, oldest first, and the newest step in the line of the current one
    that was not; 0: only the first weights."""
    versions = _versions(connection, batches)
    clean, line = 0, versions[-1] if versions else None
    while line is not None:
        line.current = True
        if not line.tainted:
            clean = max(clean, line.step)
        line = line.parent
    learned = [LearnedVersion(run_id=v.run_id, step=v.step, current=v.current) for v in versions if v.tainted]
    return learned, clean


def line_to(connection: sqlite3.Connection, step: int) -> list[tuple[str, int, str]]:
    """Run, step and batch of each version from the first to the newest of ``step``, each trained from the one before
    it."""
    version = next((version for version in reversed(_versions(connection, ())) if version.step == step), None)
    line: list[tuple[str, int, str]] = []
    while version is not None:
        line.append((version.run_id, version.step, version.batch_id))
        version = version.parent
    return line[::-1]


def _versions(connection: sqlite3.Connection, batches: Collection[str]) -> list[_Version]:
    versions: list[_Version] = []
    last: dict[str, _Version] = {}
    for run_id, batch_id, step in connection.execute("SELECT run_id, batch_id, step FROM steps ORDER BY rowid"):
        # a run whose first step is a later one goes on with what another run saved
        parent = last.get(run_id) or (versions[-1] if versions else None)
        while parent is not None and parent.step >= step:
            parent = parent.parent
        tainted = batch_id in batches or (parent is not None and parent.tainted)
        version = last[run_id] = _Version(run_id, batch_id, step, parent, tainted)
        versions.append(version)
    return versions


class HeldOutComparison(Model):
    """One version against another one on held-out prompts."""

    step: int
    batch: str = Field(default="", description="of the step: after a step back another one comes under its number")
    earlier: str = Field(description="what the other one is called")
    data: str = Field(description="the file of the prompts, without its folder")
    hook: str = Field(description="what judged, with the digest of its code")
    verdict: str
    at: float = Field(default_factory=time.time, description="seconds since 1970")

    @property
    def sentence(self) -> str:
        """What people read."""
        day = f"{datetime.fromtimestamp(self.at, UTC):%Y-%m-%d}"
        return f"against {self.earlier} on {self.data}, judged by {self.hook}, {day}: {self.verdict}"


def keep_comparison(run_dir: Path, step: int, **fields: str) -> None:
    """Append a comparison of ``step``; ``fields`` are the others of :class:`HeldOutComparison`.

    Raises:
        ConfigError: the disk refuses it.
    """
    path = run_dir / _COMPARISONS
    try:
        append_private(path, HeldOutComparison.model_validate({"step": step, **fields}).model_dump())
    except OSError as exc:
        raise ConfigError(f"what was found is not kept: cannot write {path}: {exc.strerror or exc}") from exc


def _held_out(run_dir: Path, step: int, batch: str) -> list[str]:
    """What was found of ``step``, which trained on ``batch``, in that order; also where no batch was named."""
    path = run_dir / _COMPARISONS
    comparisons: list[HeldOutComparison] = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        # a full disk may have cut it off
        with contextlib.suppress(ValidationError):
            comparisons.append(HeldOutComparison.model_validate_json(line))
    return [each.sentence for each in comparisons if each.step == step and each.batch in ("", batch)]
