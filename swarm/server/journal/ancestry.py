"""Which policy versions learned from which batches, by the steps of a journal.

Invariant: a version is tainted if its own batch is, or the version that it was trained from. A step that is done again
has the latest version before it as its parent; what it replaced stays in the list, since it was served.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection
from dataclasses import dataclass

from swarm.subjects import LearnedVersion


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
