"""The journal's file: its tables, how connections to it are opened, and the lock that makes it one server's own.

Invariant: a file is opened for writing by one process only, and never by one that does not know its schema.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Generator
from contextlib import closing, contextmanager
from enum import IntEnum
from pathlib import Path
from typing import IO

from swarm.errors import ConfigError
from swarm.server.journal.incoming import attach

#: in ``user_version``; raised with every change of the tables
SCHEMA_VERSION = 2
#: in ``application_id``, so that another program's database is not taken for a journal ("SwGw")
APPLICATION_ID = 0x53774777


class State(IntEnum):
    """Of a stored episode. Those below ``TRAINED`` are live: they are in memory and never removed from disk."""

    CLAIMED = 0
    WAITING = 1
    OUT = 2
    TRAINED = 3
    DROPPED = 4
    OVER = 5  # eval, aborted, timed out or deleted: nothing of it was ever to be trained


# ``ended`` numbers the endings in their order. ``drop_reason`` is what its client was told at the end, ``lost_reason``
# why it was dropped later. Token data lies apart, in the order of the calls or of the endings, so that a change of
# state rewrites a short row and appending touches few pages. Calls of claimed episodes are here; of an ended one the
# only call, if its trajectory holds the very tokens of it and has none itself.
_TABLES = """
CREATE TABLE runs (
    id INTEGER PRIMARY KEY,
    run_id TEXT NOT NULL,
    job_yaml TEXT NOT NULL,
    trained INTEGER NOT NULL DEFAULT 0,
    dropped INTEGER NOT NULL DEFAULT 0,
    quarantined INTEGER NOT NULL DEFAULT 0,
    stopped INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE episodes (
    id INTEGER PRIMARY KEY,
    uuid TEXT NOT NULL UNIQUE,
    run INTEGER NOT NULL,
    state INTEGER NOT NULL DEFAULT 0,
    type TEXT NOT NULL,
    client_uuid TEXT NOT NULL,
    claim_key TEXT NOT NULL,
    task_hint TEXT NOT NULL,
    group_uuid TEXT NOT NULL,
    group_size INTEGER NOT NULL,
    key_digest BLOB NOT NULL,
    idle_timeout REAL NOT NULL,
    max_seconds REAL NOT NULL,
    claimed_at REAL NOT NULL,
    quarantine_reason TEXT NOT NULL DEFAULT '',
    ended INTEGER,
    how TEXT,
    ended_at REAL,
    task_id TEXT,
    reward REAL,
    output TEXT,
    drop_reason TEXT,
    end_key TEXT,
    lost_reason TEXT NOT NULL DEFAULT '',
    batch_id TEXT NOT NULL DEFAULT '',
    step INTEGER
);
CREATE INDEX episodes_live ON episodes (state, ended) WHERE state < 3;
CREATE INDEX episodes_over ON episodes (ended) WHERE state >= 3;
CREATE INDEX episodes_claim ON episodes (claim_key) WHERE claim_key != '';
CREATE TABLE trajectories (ended INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE calls (id INTEGER PRIMARY KEY, episode INTEGER NOT NULL, call_id TEXT NOT NULL, data BLOB NOT NULL);
CREATE INDEX calls_episode ON calls (episode);
CREATE TABLE keys (episode INTEGER, number INTEGER, digest BLOB NOT NULL, PRIMARY KEY (episode, number)) WITHOUT ROWID;
CREATE TABLE batches (batch_id TEXT PRIMARY KEY, members TEXT NOT NULL, attempts INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE steps (
    id INTEGER PRIMARY KEY,
    run INTEGER NOT NULL,
    batch_id TEXT NOT NULL,
    step INTEGER NOT NULL,
    seconds REAL NOT NULL,
    metrics TEXT NOT NULL
);
CREATE UNIQUE INDEX steps_batch ON steps (run, batch_id);
"""
# of the batch that is being collected: groups that lack members which can never come, and clients that have no more
_COLLECTING = """
CREATE TABLE losses (task_id TEXT PRIMARY KEY, lost INTEGER NOT NULL, version INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE agreements (client_uuid TEXT PRIMARY KEY) WITHOUT ROWID;
"""
#: schema version -> what the next one adds to it
_STEPS = {0: _TABLES, 1: _COLLECTING}


class FolderLock:
    """The right to write the journal at ``path``, held until :meth:`release` or the end of the process.

    On a file of its own: SQLite's own locks are lost when any descriptor of the database is closed in this process.

    Raises:
        ConfigError: another process holds it, or the file cannot be made.
    """

    def __init__(self, path: Path) -> None:
        beside = path.with_name(path.name + ".lock")
        try:
            self._file: IO[str] = open(beside, "a+", encoding="utf-8")  # noqa: SIM115 - held for the life of the lock
        except OSError as exc:
            raise ConfigError(f"cannot write in the run folder {path.parent}: {exc.strerror or exc}") from exc
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.seek(0)
            holder = self._file.read().strip()
            self._file.close()
            who = f" (pid {holder})" if holder else ""
            raise ConfigError(
                f"the run folder {path.parent} is in use by another swarm server{who}: stop it, or use another run_dir"
            ) from None
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()

    @property
    def released(self) -> bool:
        return self._file.closed

    def release(self) -> None:
        self._file.close()


def connect(path: Path) -> sqlite3.Connection:
    """A connection that writes; transactions are begun and committed explicitly, each commit is synced to disk."""
    connection = sqlite3.connect(
        path, timeout=1.0, isolation_level=None, check_same_thread=False, cached_statements=256
    )
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA temp_store = MEMORY")
    return connection


def connect_to_read(path: Path) -> sqlite3.Connection:
    """A connection that cannot write, beside a server that does."""
    address = f"{path.absolute().as_uri()}?mode=ro"
    return sqlite3.connect(address, uri=True, timeout=5.0, isolation_level=None, check_same_thread=False)


@contextmanager
def reading(path: Path) -> Generator[sqlite3.Connection]:
    """A connection to the journal of a server that runs or not, while the block runs.

    Raises:
        ConfigError: there is none, it is empty, or it cannot be read, in the block either.
    """
    if not path.is_file():
        raise ConfigError(f"there is no journal {path}: give the run_dir of a swarm server")
    try:
        with closing(connect_to_read(path)) as connection:
            if check(connection, path) == 0:
                raise ConfigError(f"the journal {path} is empty")
            yield connection
    except sqlite3.Error as exc:
        raise unreadable(path, exc) from exc


def prepare(path: Path) -> sqlite3.Connection:
    """Open the journal to write, and make it if there is none; only its owner may read what people said.

    Raises:
        ConfigError: it cannot be opened, is no journal, or was written by a newer version.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        connection = connect(path)
        try:
            version = check(connection, path)
            if version == 0:
                # takes effect only before the first table
                connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            connection.execute("PRAGMA journal_mode = WAL")
            if version < SCHEMA_VERSION:
                tables = "".join(_STEPS[step] for step in range(version, SCHEMA_VERSION))
                connection.executescript(
                    f"BEGIN; {tables} PRAGMA application_id = {APPLICATION_ID};"
                    f"PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
                )
            attach(connection)
        except BaseException:
            connection.close()
            raise
    except (sqlite3.Error, OSError) as exc:
        raise unreadable(path, exc) from exc
    return connection


def check(connection: sqlite3.Connection, path: Path) -> int:
    """The schema version of an open journal; 0: an empty file.

    Raises:
        ConfigError: it is another program's database, or of a newer version.
    """
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    application: int = connection.execute("PRAGMA application_id").fetchone()[0]
    empty = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
    if application != APPLICATION_ID and not empty:
        raise ConfigError(f"{path} is not a swarm journal: move it away, or use another run_dir")
    if version > SCHEMA_VERSION:
        raise ConfigError(
            f"{path} was written by a newer version of swarm-gateway (schema {version}, this one knows "
            f"{SCHEMA_VERSION}): upgrade, or use another run_dir"
        )
    return version


def unreadable(path: Path, exc: Exception) -> ConfigError:
    """What to tell an operator about a journal that SQLite cannot open or read."""
    return ConfigError(f"cannot read the journal {path}: {exc}; restore it from a copy, or use another run_dir")
