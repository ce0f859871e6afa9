"""Deletes what a journal holds of a subject, so that its bytes are gone from the file.

Invariant: the tombstone is on disk, in a file of its own, before anything is deleted. The journal notes a tombstone as
done when the bytes are gone; whoever opens a journal does what its folder's tombstones ask and it has not noted. So a
deletion survives a kill at any point, and a journal that is restored from a copy.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from swarm.errors import ConfigError, UnavailableError
from swarm.server.journal.ancestry import versions_of
from swarm.server.journal.codec import STATE_NAMES, notes_of, pack_json
from swarm.subjects import DataReport, Subject, Tombstone
from swarm.types import Notes

#: beside the journal
TOMBSTONES = "tombstones.jsonl"
#: rows of one transaction, and ids of requests in a report
_ROWS, _MOST_REQUESTS = 10_000, 10_000
#: seconds that readers may keep the log from being emptied, and the file from being cleared
_SECONDS = 120.0


class Match(NamedTuple):
    """One episode of a subject."""

    uuid: str
    state: str
    batch_id: str
    notes: Notes


def find(connection: sqlite3.Connection, subject: Subject, until: float) -> Iterator[Match]:
    """The episodes of ``subject`` that are over and were claimed ``until`` then."""
    needles = subject.needles()
    condition = " AND ".join(["instr(output, ?)"] * len(needles))
    for uuid, state, batch_id, output in connection.execute(
        "SELECT uuid, state, batch_id, output FROM episodes"
        f" WHERE claimed_at <= ? AND ended IS NOT NULL AND {condition}",
        (until, *needles),
    ):
        notes = notes_of(json.loads(output))
        if subject.fits(notes):
            yield Match(uuid, str(STATE_NAMES.get(state, state)), batch_id, notes)


def report(connection: sqlite3.Connection, folder: Path, subject: Subject) -> DataReport:
    """What the journal in ``folder`` has of ``subject``."""
    matches = list(find(connection, subject, time.time()))
    earlier = [stone for stone in tombstones(folder) if stone.subject == subject]
    batches = {match.batch_id for match in matches} | {name for stone in earlier for name in stone.batches}
    versions, clean = versions_of(connection, batches - {""})
    requests = dict.fromkeys(match.notes.request_id for match in matches if match.notes.request_id)
    return DataReport(
        episodes=dict(Counter(match.state for match in matches)),
        requests=list(requests)[:_MOST_REQUESTS],
        earlier=earlier,
        versions=versions,
        clean_step=clean,
    )


# ---------------------------------------------------------------------- tombstones


def tombstones(folder: Path) -> list[Tombstone]:
    """All that were set in ``folder``, oldest first.

    Raises:
        ConfigError: the file cannot be read: what it asks would be undone in silence.
    """
    path = folder / TOMBSTONES
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        # one that a kill cut off had deleted nothing
        return [Tombstone.model_validate_json(line) for line in lines if line.endswith("\n")]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as exc:
        raise ConfigError(f"cannot read {path}, which says what was deleted: {exc}; restore it from a copy") from exc


def bury(folder: Path, stone: Tombstone) -> None:
    """Write a tombstone; it is on disk afterwards."""
    descriptor = os.open(folder / TOMBSTONES, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "r+b") as file:
        # what a kill cut off
        whole = file.read().rfind(b"\n") + 1
        file.seek(whole)
        file.truncate()
        file.write(stone.model_dump_json().encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    above = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(above)
    finally:
        os.close(above)


def undone(connection: sqlite3.Connection, folder: Path) -> list[Tombstone]:
    """The tombstones that this journal does not note as done."""
    stones = tombstones(folder)
    if not stones:
        return []
    connection.execute("CREATE TABLE IF NOT EXISTS erasures (tombstone TEXT NOT NULL UNIQUE)")
    done = {name for (name,) in connection.execute("SELECT tombstone FROM erasures")}
    return [stone for stone in stones if stone.id not in done]


# ---------------------------------------------------------------------- deletion


def erase(connection: sqlite3.Connection, path: Path, stones: Collection[Tombstone]) -> None:
    """Do what ``stones`` ask of the journal at ``path``; nobody else writes it.

    Raises:
        UnavailableError: readers keep the log from being emptied; the next one to open the journal does the rest.
    """
    for stone in stones:
        names = [match.uuid for match in find(connection, stone.subject, stone.until)]
        for first in range(0, len(names), _ROWS):
            connection.execute("BEGIN IMMEDIATE")
            _delete(connection, names[first : first + _ROWS])
            connection.execute("COMMIT")
    if stones:
        clear(connection, path)
        connection.executemany("INSERT OR IGNORE INTO erasures VALUES (?)", [(stone.id,) for stone in stones])


def clear(connection: sqlite3.Connection, path: Path) -> None:
    """Make sure that no byte of a deleted row is left in the file or its log; raises as :func:`erase`."""
    deadline = time.monotonic() + _SECONDS
    # waits for its readers for the connection's timeout
    while connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
        if time.monotonic() > deadline:
            raise UnavailableError("the journal is being read all the time: its log cannot be emptied")
    subprocess.run(
        [sys.executable, "-m", "swarm.server.journal.scrub", str(path)],
        check=True,
        timeout=_SECONDS,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
        capture_output=True,
    )
    # pages in memory still have their gaps
    connection.execute("PRAGMA shrink_memory")


def _delete(connection: sqlite3.Connection, names: list[str]) -> None:
    listed = json.dumps(names)
    columns = (("calls", "episode"), ("trajectories", "episode"), ("keys", "episode"), ("episodes", "uuid"))
    for table, column in columns:
        connection.execute(f"DELETE FROM {table} WHERE {column} IN (SELECT value FROM json_each(?))", (listed,))
    gone, batch = set(names), connection.execute("SELECT members FROM batch").fetchone()
    if batch is not None:
        groups = [(task, [uuid for uuid in uuids if uuid not in gone]) for task, uuids in json.loads(batch[0])]
        connection.execute("UPDATE batch SET members = ?", (pack_json([group for group in groups if group[1]]),))
