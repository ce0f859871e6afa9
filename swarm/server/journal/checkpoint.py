"""The write-ahead log is copied into the database by a thread of its own, so that commits do not wait for it.

Invariant: the log stays bounded under a load that never pauses. A passive checkpoint beside a busy writer always leaves
the frames written meanwhile, and SQLite starts the log anew only once none is left: those few the writer copies itself.
"""

from __future__ import annotations

import logging
import sqlite3
import threading

logger = logging.getLogger(__name__)

#: records after which the log is copied: some megabytes of it, a few hundred milliseconds at full speed
_RECORDS = 2_000
_CLOSE_SECONDS = 5.0


class Checkpointer:
    """Belongs to the writer, which calls it between its transactions.

    Args:
        own: the connection of the checkpointing thread.
        writers: the writer's connection.
    """

    def __init__(self, own: sqlite3.Connection, writers: sqlite3.Connection) -> None:
        self._own = own
        self._writers = writers
        self._records = 0
        self._wanted = threading.Event()
        self._copied = threading.Event()
        self._closing = False
        for connection in (own, writers):
            connection.execute("PRAGMA wal_autocheckpoint = 0")
        self._thread = threading.Thread(target=self._run, name="swarm-journal-checkpoint", daemon=True)
        self._thread.start()

    def committed(self, records: int) -> None:
        """The writer has committed so many records."""
        self._records += records
        if self._copied.is_set():
            self._copied.clear()
            _copy(self._writers)
        elif self._records >= _RECORDS:
            self.idle()

    def idle(self) -> None:
        """The writer has nothing to do: a good time."""
        if self._records:
            self._records = 0
            self._wanted.set()

    def close(self) -> None:
        """End the thread, unless the disk holds it."""
        self._closing = True
        self._wanted.set()
        self._thread.join(_CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._own.close()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            if self._closing:
                return
            self._wanted.clear()
            _copy(self._own)
            self._copied.set()


def _copy(connection: sqlite3.Connection) -> None:
    try:
        connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    except sqlite3.Error as exc:
        # the log has it all, only longer than it should be
        logger.warning("the journal's log could not be copied into the database: %s", exc)
