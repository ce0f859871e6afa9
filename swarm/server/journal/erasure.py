"""Deletes what a journal holds of a subject, so that its bytes are gone from the file.

Invariant: the tombstone is on disk, in a file of its own, before anything is deleted. The journal notes a tombstone as
done when the bytes are gone; whoever opens a journal does what its folder's tombstones ask and it has not noted. So a
deletion survives a kill at any point, and a journal that is restored from a copy.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from swarm.credentials import append_private
from swarm.errors import ConfigError, RequestError, UnavailableError
from swarm.files import flush, free_bytes
from swarm.server.journal.lineage import versions_of
from swarm.server.journal.schema import reading
from swarm.server.journal.sqlite import notes_of, pack_json, state_name
from swarm.subjects import DataReport, Subject, Tombstone
from swarm.types import Notes

#: beside the journal
TOMBSTONES, EXPORTS = "tombstones.jsonl", "exports.jsonl"
#: rows of one transaction, and ids of requests in a report
_ROWS, _MOST_REQUESTS = 10_000, 10_000
#: seconds that readers may keep the log from being emptied
_SECONDS = 120.0
#: where SQLite makes its temporary files: the first that it can write
_TEMPORARY = (os.environ.get("SQLITE_TMPDIR"), os.environ.get("TMPDIR"), "/var/tmp", "/usr/tmp", "/tmp")


class Match(NamedTuple):
    """One episode of a subject."""

    uuid: str
    state: str
    batch_id: str
    claimed_at: float
    notes: Notes


def find(connection: sqlite3.Connection, subject: Subject, until: float = math.inf) -> Iterator[Match]:
    """The episodes of ``subject`` that are over and were claimed ``until`` then."""
    needles = subject.needles()
    condition = " AND ".join(f"({' OR '.join(['instr(output, ?)'] * len(parts))})" for parts in needles)
    for uuid, state, batch_id, claimed_at, output in connection.execute(
        "SELECT uuid, state, batch_id, claimed_at, output FROM episodes"
        f" WHERE claimed_at <= ? AND ended IS NOT NULL AND {condition}",
        (until, *chain.from_iterable(needles)),
    ):
        notes = notes_of(json.loads(output))
        if subject.fits(notes):
            yield Match(uuid, state_name(state), batch_id, claimed_at, notes)


def report(connection: sqlite3.Connection, folder: Path, subject: Subject) -> DataReport:
    """What the journal in ``folder`` has of ``subject``."""
    matches = list(find(connection, subject))
    earlier = [stone for stone in tombstones(folder) if stone.subject == subject]
    batches = {match.batch_id for match in matches} | {name for stone in earlier for name in stone.batches}
    versions, clean = versions_of(connection, batches - {""})
    files = exports(folder, matches) | {name for stone in earlier for name in stone.exports}
    requests = dict.fromkeys(match.notes.request_id for match in matches if match.notes.request_id)
    return DataReport(
        episodes=dict(Counter(match.state for match in matches)),
        requests=list(requests)[:_MOST_REQUESTS],
        earlier=earlier,
        versions=versions,
        clean_step=clean,
        exports=sorted(files),
    )


# ---------------------------------------------------------------------- exports


def note_export(journal: Path, what: str) -> None:
    """Note that a file of episodes is written, before it is.

    Raises:
        ConfigError: the journal cannot be read.
        UnavailableError: the disk refuses it.
    """
    with reading(journal) as connection:
        newest = connection.execute("SELECT max(claimed_at) FROM episodes").fetchone()[0]
    notes = journal.parent / EXPORTS
    try:
        # a clock that was set back since a claim hides no file that may hold it
        append_private(notes, {"what": what, "when": max(time.time(), newest or 0.0)})
    except OSError as exc:
        raise UnavailableError(f"cannot write {notes}: {exc.strerror or exc}; without it nothing is exported") from exc


def exports(folder: Path, matches: Collection[Match]) -> set[str]:
    """The files that may hold one of ``matches``: they were written since the first of them was claimed."""
    since = min((match.claimed_at for match in matches), default=math.inf)
    try:
        lines = (folder / EXPORTS).read_bytes().splitlines()
    except FileNotFoundError:
        return set()
    except OSError as exc:
        raise ConfigError(f"cannot read {folder / EXPORTS}, which says what was exported: {exc}") from exc
    files: set[str] = set()
    for line in lines:
        # one that a full disk cut off was refused: nothing was exported then
        with suppress(ValueError):
            noted = json.loads(line)
            if noted["when"] >= since:
                files.add(noted["what"])
    return files


# ---------------------------------------------------------------------- tombstones


def tombstones(folder: Path) -> list[Tombstone]:
    """All that were set in ``folder``, oldest first.

    Raises:
        ConfigError: the file cannot be read: what it asks would be undone in silence.
    """
    path = folder / TOMBSTONES
    try:
        # of text, U+0085 and U+2028 would end a line too, and names may have them
        lines = path.read_bytes().splitlines(keepends=True)
        # one that a kill cut off had deleted nothing; a later line of the same one knows more
        stones = [Tombstone.model_validate_json(line) for line in lines if line.endswith(b"\n")]
        return list({stone.id: stone for stone in stones}.values())
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RequestError) as exc:
        raise ConfigError(f"cannot read {path}, which says what was deleted: {exc}; restore it from a copy") from exc


def bury(folder: Path, stone: Tombstone) -> None:
    """Write a tombstone; it is on disk afterwards.

    Raises:
        UnavailableError: the disk refuses it.
    """
    try:
        descriptor = os.open(folder / TOMBSTONES, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            # what a kill cut off
            whole = file.read().rfind(b"\n") + 1
            file.seek(whole)
            file.truncate()
            file.write(stone.model_dump_json().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        flush(folder)
    except OSError as exc:
        why = exc.strerror or exc
        raise UnavailableError(f"cannot write {folder / TOMBSTONES}: {why}; without it nothing is deleted") from exc


def undone(connection: sqlite3.Connection, folder: Path) -> list[Tombstone]:
    """The tombstones that this journal does not note as done."""
    stones = tombstones(folder)
    if not stones:
        return []
    connection.execute("CREATE TABLE IF NOT EXISTS erasures (tombstone TEXT NOT NULL UNIQUE)")
    done = {name for (name,) in connection.execute("SELECT tombstone FROM erasures")}
    return [stone for stone in stones if stone.id not in done]


# ---------------------------------------------------------------------- deletion


def delete(connection: sqlite3.Connection, folder: Path, stones: Collection[Tombstone]) -> None:
    """Delete the rows that ``stones`` ask for, once the batches that had some are in the tombstones' file.

    Raises:
        UnavailableError: that file cannot be written; nothing was deleted for that tombstone.
    """
    for stone in stones:
        matches = list(find(connection, stone.subject, stone.until))
        batches = sorted({*stone.batches, *(match.batch_id for match in matches if match.batch_id)})
        files = sorted({*stone.exports, *exports(folder, matches)})
        facts = {"episodes": max(stone.episodes, len(matches)), "batches": batches, "exports": files}
        whole = stone.model_copy(update=facts)
        if whole != stone:
            bury(folder, whole)
        for first in range(0, len(matches), _ROWS):
            connection.execute("BEGIN IMMEDIATE")
            _delete(connection, [match.uuid for match in matches[first : first + _ROWS]])
            connection.execute("COMMIT")


def clear(connection: sqlite3.Connection, path: Path, stones: Collection[Tombstone], seconds: float = _SECONDS) -> None:
    """Make sure that no byte of any deleted row is left in the file or its log, and note ``stones`` as done.

    Args:
        seconds: how long readers may keep the log from being emptied.

    Raises:
        UnavailableError: they do, or the disk lacks room; whoever opens the journal, or is idle, does the rest.
    """

    def empty_log() -> None:
        if not log_emptied(connection, seconds):
            raise UnavailableError("the journal is being read all the time: its log cannot be emptied")

    empty_log()
    _check_room(connection, path)
    connection.execute("PRAGMA temp_store = FILE")
    try:
        # rows that SQLite moved left copies in the gaps of pages, also with secure_delete
        connection.execute("VACUUM")
    finally:
        connection.execute("PRAGMA temp_store = MEMORY")
    empty_log()
    for stone in stones:
        connection.execute("INSERT OR IGNORE INTO erasures VALUES (?)", (stone.id,))


def log_emptied(connection: sqlite3.Connection, seconds: float = 0.0) -> bool:
    """Copy the log into the file and empty it; False if somebody reads for so many ``seconds``."""
    connection.execute(f"PRAGMA busy_timeout = {math.ceil(seconds * 1000)}")
    try:
        return not connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
    finally:
        connection.execute("PRAGMA busy_timeout = 1000")


def _check_room(connection: sqlite3.Connection, path: Path) -> None:
    """``VACUUM`` writes what is in use to a temporary file, and then to the log."""
    pages, free, size = connection.execute(
        "SELECT page_count, freelist_count, page_size FROM pragma_page_count, pragma_freelist_count, pragma_page_size"
    ).fetchone()
    temporary = next((Path(name) for name in _TEMPORARY if name and os.access(name, os.W_OK)), Path())
    needed = Counter[int]()
    for folder in (temporary, path.parent):
        needed[folder.stat().st_dev] += (pages - free) * size
        lacking = needed[folder.stat().st_dev] - free_bytes(folder)
        if lacking > 0:
            raise UnavailableError(
                f"the rows are deleted, but {folder} lacks {math.ceil(lacking / 1e6)} MB to write the journal anew "
                "without copies of them: make room; an idle server then does it, and one that is started"
            )


def _delete(connection: sqlite3.Connection, names: list[str]) -> None:
    listed = json.dumps(names)
    columns = (("calls", "episode"), ("trajectories", "episode"), ("keys", "episode"), ("episodes", "uuid"))
    for table, column in columns:
        connection.execute(f"DELETE FROM {table} WHERE {column} IN (SELECT value FROM json_each(?))", (listed,))
    gone, batch = set(names), connection.execute("SELECT members FROM batch").fetchone()
    if batch is not None:
        groups = [(task, [uuid for uuid in uuids if uuid not in gone]) for task, uuids in json.loads(batch[0])]
        connection.execute("UPDATE batch SET members = ?", (pack_json([group for group in groups if group[1]]),))
