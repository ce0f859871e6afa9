"""The journal's file: its tables, its connections, and the lock that makes it one server's own.

Invariant: only one process opens the file for writing, and only one that knows its schema reads or writes it.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Generator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO

from swarm.errors import ConfigError
from swarm.states import EpisodeState
from swarm.subjects import PRIVATE_DATA

#: in ``user_version``; raised with every change of the tables, or of the token data in them
SCHEMA_VERSION = 10
#: in ``application_id``, so that another program's database is not mistaken for a journal ("SwGw")
APPLICATION_ID = 0x53774777

#: The condition on ``episodes`` for live ones: they are in the server's memory and never removed from disk. The partial
#: index serves only queries that repeat it literally.
LIVE = f"state IN ('{EpisodeState.CLAIMED}', '{EpisodeState.FINISHED}', '{EpisodeState.BATCHED}')"
#: Alike, the condition for those that were given back because of a private answer.
PRIVATE = f"drop_reason = '{PRIVATE_DATA}'"

# ``ended`` numbers the ends in their order. ``drop_reason`` is what the client was told at the end, ``lost_reason`` why
# the episode was dropped later, ``tokens`` what became of its tokens (packed counts), ``size`` the bytes of its result
# and its token data, for the ``route`` that it came by. Token data has tables of its own, so that a change of state
# rewrites a short row. The calls of claimed episodes are in ``calls``; of an ended episode,
# the call whose tokens are its trajectory's, if any.
_TABLES = f"""
CREATE TABLE runs (
    run_id TEXT NOT NULL UNIQUE,
    job_yaml TEXT NOT NULL,
    stopped INTEGER NOT NULL,
    trained INTEGER NOT NULL DEFAULT 0,
    dropped INTEGER NOT NULL DEFAULT 0,
    quarantined INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE episodes (
    uuid TEXT NOT NULL UNIQUE,
    client_uuid TEXT NOT NULL,
    type TEXT NOT NULL,
    key_digest BLOB NOT NULL,
    idle_timeout REAL NOT NULL,
    max_seconds REAL NOT NULL,
    claimed_at REAL NOT NULL,
    claim_key TEXT NOT NULL,
    task_hint TEXT NOT NULL,
    group_uuid TEXT NOT NULL,
    group_size INTEGER NOT NULL,
    run_id TEXT NOT NULL,
    state TEXT NOT NULL DEFAULT '{EpisodeState.CLAIMED}',
    quarantine_reason TEXT NOT NULL DEFAULT '',
    ended INTEGER,
    how TEXT,
    ended_at REAL,
    task_id TEXT,
    reward REAL,
    output TEXT,
    drop_reason TEXT NOT NULL DEFAULT '',
    end_key TEXT NOT NULL DEFAULT '',
    lost_reason TEXT NOT NULL DEFAULT '',
    tokens BLOB,
    batch_id TEXT NOT NULL DEFAULT '',
    step INTEGER,
    route TEXT NOT NULL DEFAULT '',
    size INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX episodes_live ON episodes (state) WHERE {LIVE};
CREATE INDEX episodes_ended ON episodes (ended) WHERE ended IS NOT NULL;
CREATE INDEX episodes_of_route ON episodes (route, ended, size) WHERE route != '';
CREATE INDEX episodes_private ON episodes (drop_reason) WHERE {PRIVATE};
CREATE TABLE calls (episode TEXT NOT NULL, call_id TEXT NOT NULL, data BLOB NOT NULL, UNIQUE (episode, call_id));
CREATE TABLE trajectories (episode TEXT NOT NULL UNIQUE, data BLOB NOT NULL);
CREATE TABLE keys (episode TEXT NOT NULL, digest BLOB NOT NULL, UNIQUE (episode, digest));
CREATE TABLE batch (id INTEGER PRIMARY KEY CHECK (id = 1), batch_id TEXT, members TEXT, attempts INTEGER);
CREATE TABLE steps (
    run_id TEXT NOT NULL,
    batch_id TEXT NOT NULL,
    step INTEGER NOT NULL,
    seconds REAL NOT NULL,
    metrics TEXT NOT NULL,
    UNIQUE (run_id, batch_id)
);
CREATE TABLE evaluations (run_id TEXT NOT NULL, step INTEGER NOT NULL, sums TEXT NOT NULL, UNIQUE (run_id, step));
CREATE TABLE pairs (
    run_id TEXT NOT NULL, group_id TEXT NOT NULL, terms TEXT NOT NULL, pair TEXT NOT NULL, UNIQUE (run_id, group_id)
);
CREATE TABLE ratings (
    run_id TEXT NOT NULL, answer TEXT NOT NULL, terms TEXT NOT NULL, rating TEXT NOT NULL, UNIQUE (run_id, answer)
);
CREATE TABLE stages (
    run_id TEXT NOT NULL, route TEXT NOT NULL, incumbent TEXT NOT NULL, version INTEGER NOT NULL, stage TEXT NOT NULL,
    UNIQUE (run_id, route, incumbent, version)
);
CREATE TABLE resumptions (run_id TEXT NOT NULL, step INTEGER NOT NULL, UNIQUE (run_id, step));
CREATE TABLE losses (task_id TEXT PRIMARY KEY, lost INTEGER NOT NULL, version INTEGER NOT NULL);
CREATE TABLE agreements (client_uuid TEXT PRIMARY KEY);
"""


class FolderLock:
    """The right to write the journal at ``path``, held until :meth:`release` or the end of the process.

    It is on a file of its own: SQLite's locks are lost when this process closes any descriptor of the database.

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
        except BlockingIOError:
            self._file.seek(0)
            holder = self._file.read().strip()
            self._file.close()
            who = f" (pid {holder})" if holder else ""
            raise ConfigError(
                f"the run folder {path.parent} is in use by another swarm server{who}: stop it, or use another run_dir"
            ) from None
        except OSError as exc:
            self._file.close()
            # as on some network file systems
            raise ConfigError(f"cannot lock {beside}: {exc.strerror or exc}; use another run_dir") from exc
        self._file.truncate(0)
        with suppress(OSError):  # the disk is full: whoever is refused then learns no pid
            os.write(self._file.fileno(), str(os.getpid()).encode())

    @property
    def released(self) -> bool:
        return self._file.closed

    def release(self) -> None:
        self._file.close()


@contextmanager
def reading(path: Path) -> Generator[sqlite3.Connection]:
    """A read-only connection to a journal, whether its server runs or not, for the length of the block.

    Raises:
        ConfigError: there is no journal or it is empty (``no_journal``), or it cannot be read or is damaged, also
            inside the block.
    """
    if not path.is_file():
        message = f"there is no journal {path}: give the run folder of a swarm server (--run-dir)"
        raise ConfigError(message, code="no_journal")
    file = path.resolve()
    address = f"{file.as_uri()}?mode=ro"
    if not (os.access(file.parent, os.W_OK) or file.with_name(file.name + "-wal").exists()):
        # a copy that nobody writes, and beside which SQLite cannot put what readers share
        address += "&immutable=1"
    try:
        with closing(sqlite3.connect(address, uri=True)) as connection:
            if _version(connection, path) == 0:
                raise ConfigError(f"the journal {path} is empty", code="no_journal")
            yield connection
    except (sqlite3.Error, ValueError) as exc:  # ValueError: what is packed in a row, or no text
        raise unreadable(path, exc) from exc


def open_to_write(path: Path) -> sqlite3.Connection:
    """Open the journal for writing, and create it if there is none; only its owner may read what people said.

    Transactions are begun and committed explicitly, and each commit is synced to the disk.

    Raises:
        ConfigError: it cannot be opened, is no journal, or was written by a version with another schema.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        connection = sqlite3.connect(path, timeout=1.0, isolation_level=None, check_same_thread=False)
        try:
            version = _version(connection, path)
            if version == 0:
                # takes effect only before the first table
                connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA temp_store = MEMORY")
            # what is deleted is overwritten, see also erasure.py
            connection.execute("PRAGMA secure_delete = ON")
            if version == 0:
                connection.executescript(
                    f"BEGIN; {_TABLES} PRAGMA application_id = {APPLICATION_ID};"
                    f"PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
                )
        except BaseException:
            connection.close()
            raise
    except (sqlite3.Error, OSError, ValueError) as exc:  # ValueError: a text that is none
        raise unreadable(path, exc) from exc
    return connection


def unreadable(path: Path, exc: Exception) -> ConfigError:
    """The error for a journal that SQLite cannot open or read."""
    return ConfigError(f"cannot read the journal {path}: {exc}; restore it from a copy, or use another run_dir")


def _version(connection: sqlite3.Connection, path: Path) -> int:
    """The schema version of an open journal, ours or 0 for an empty file."""
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    application: int = connection.execute("PRAGMA application_id").fetchone()[0]
    empty = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
    if application != APPLICATION_ID and not empty:
        raise ConfigError(f"{path} is not a swarm journal: move it away, or use another run_dir")
    if version not in (0, SCHEMA_VERSION):
        age, remedy = "an older", "finish the run or export it with that version"
        if version > SCHEMA_VERSION:
            age, remedy = "a newer", "upgrade"
        raise ConfigError(
            f"{path} was written by {age} version of swarm-gateway (schema {version}, this one reads "
            f"{SCHEMA_VERSION}): {remedy}, or use another run_dir"
        )
    return version
