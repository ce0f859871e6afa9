"""Prepared group ends on disk: who promised what, and how it was decided.

Invariant: a method that changes something returns after the change is on disk. All methods block, may be called from
any thread, and raise UnavailableError (``journal_unavailable``) where the disk fails.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from swarm.errors import ConfigError, UnavailableError
from swarm.protocol import PrepareGroupEndRequest

#: ``applied``: committed, and the episodes have ended.
State = Literal["prepared", "committed", "applied", "cancelled"]

#: Seconds that a decision is kept, for participants that ask late.
KEEP = 30 * 86400.0

_SCHEMA = """
CREATE TABLE IF NOT EXISTS group_ends (
    name TEXT PRIMARY KEY, client_uuid TEXT NOT NULL, state TEXT NOT NULL, body TEXT NOT NULL, changed_at REAL NOT NULL
) WITHOUT ROWID
"""


@dataclass(frozen=True)
class StoredEnd:
    """One transaction; ``wanted`` is ``None`` where it was cancelled before it was prepared here. ``changed_at`` is in
    Unix seconds."""

    client_uuid: str
    state: State
    wanted: PrepareGroupEndRequest | None
    changed_at: float


class PreparedStore:
    """A small SQLite file that only its owner may read, like the journal: it names episodes and what people said.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.fchmod(descriptor, 0o600)
            finally:
                os.close(descriptor)
            # what SQLite puts beside it gets the same mode
            self._connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=FULL")
            self._connection.execute(_SCHEMA)
            self._connection.execute(
                "DELETE FROM group_ends WHERE state IN ('applied', 'cancelled') AND changed_at < ?",
                (time.time() - KEEP,),
            )
        except (OSError, sqlite3.Error) as exc:
            raise ConfigError(f"the prepared group ends in {path} cannot be read: {exc}") from exc

    def get(self, name: str) -> StoredEnd | None:
        """The transaction of that name."""
        with self._using() as connection:
            row = connection.execute(
                "SELECT client_uuid, state, body, changed_at FROM group_ends WHERE name = ?", (name,)
            ).fetchone()
        return None if row is None else _stored(*row)

    def unfinished(self) -> dict[str, StoredEnd]:
        """By name, oldest first: what is prepared, or committed and not applied."""
        with self._using() as connection:
            rows = connection.execute(
                "SELECT name, client_uuid, state, body, changed_at FROM group_ends "
                "WHERE state IN ('prepared', 'committed') ORDER BY changed_at"
            ).fetchall()
        return {name: _stored(*row) for name, *row in rows}

    def put(self, name: str, client_uuid: str, state: State, wanted: PrepareGroupEndRequest | None) -> StoredEnd:
        """Write the transaction as it is now."""
        now = time.time()
        body = "" if wanted is None else wanted.model_dump_json()
        with self._using() as connection:
            connection.execute(
                "INSERT INTO group_ends VALUES (?, ?, ?, ?, ?) ON CONFLICT (name) DO UPDATE "
                "SET state = excluded.state, changed_at = excluded.changed_at",
                (name, client_uuid, state, body, now),
            )
        return StoredEnd(client_uuid, state, wanted, now)

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    @contextlib.contextmanager
    def _using(self) -> Generator[sqlite3.Connection]:
        with self._lock:
            try:
                yield self._connection
            except sqlite3.Error as exc:
                raise UnavailableError(f"the prepared group ends: {exc}", code="journal_unavailable") from exc


def _stored(client_uuid: str, state: State, body: str, changed_at: float) -> StoredEnd:
    wanted = PrepareGroupEndRequest.model_validate_json(body) if body else None
    return StoredEnd(client_uuid, state, wanted, changed_at)
