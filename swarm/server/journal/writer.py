"""The one thread that writes: it takes all that is queued, commits it as one transaction, and says so.

Invariant: records are committed in the order they were queued, each exactly once; what the disk refuses is kept and
tried again, and nothing behind it is written before it.
"""

from __future__ import annotations

import logging
import queue
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence

from swarm.server.journal.checkpoint import Checkpointer
from swarm.server.journal.ledger import Changes, Ledger
from swarm.server.journal.records import Record
from swarm.server.journal.retention import Retention
from swarm.server.journal.store import write, write_at_once

logger = logging.getLogger(__name__)

#: seconds between two tries of a commit that failed, growing to the second
_RETRY_FIRST, _RETRY_LAST = 0.05, 2.0
#: seconds without a record after which the file is tidied
_IDLE = 1.0
#: seconds between two steps of that, in which records go first
_BREATH = 0.01


class Writer:
    """Owns ``connection`` and ``ledger`` from :meth:`start` to the end of :meth:`stop`."""

    def __init__(
        self, connection: sqlite3.Connection, ledger: Ledger, retention: Retention, checkpointer: Checkpointer
    ) -> None:
        self._connection = connection
        self._retention = retention
        self._checkpointer = checkpointer
        self._ledger = ledger
        self._queue: queue.SimpleQueue[Sequence[Record] | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        #: how many records were committed; the rest is for statistics
        self.committed = 0
        self.commits = 0
        self.last_commit_seconds = 0.0
        self.error = ""
        #: when the records after the committed ones began to be queued, at the earliest
        self.pending_since = time.monotonic()

    def start(self, on_commit: Callable[[], None]) -> None:
        """Begin to write; ``on_commit`` is called in the writer's thread after each commit."""
        self._thread = threading.Thread(target=self._run, args=(on_commit,), name="swarm-journal", daemon=True)
        self._thread.start()

    def put(self, records: Sequence[Record]) -> None:
        """Queue records, which go into one transaction; never waits."""
        self._queue.put(records)

    def stop(self, within: float) -> bool:
        """Write what is queued and end the thread; whether all is written. A disk that fails has so many seconds."""
        assert self._thread is not None
        self._queue.put(None)
        self._thread.join(within)
        self._stopping.set()
        self._thread.join(within)
        self._checkpointer.close()
        return not self._thread.is_alive() and not self.error

    def _run(self, on_commit: Callable[[], None]) -> None:
        try:
            self._write_all(on_commit)
        except BaseException as exc:
            # without a word those who wait would only learn that the disk is slow
            self.error = f"the writer died of {type(exc).__name__}: {exc}; restart the server"
            logger.critical("the journal takes nothing more: %s", self.error, exc_info=True)

    def _write_all(self, on_commit: Callable[[], None]) -> None:
        open_to_more = True
        while open_to_more:
            records, open_to_more = self._drain()
            taken = time.monotonic()
            if not records:
                continue
            if not self._commit(self._ledger.fold(records)):
                # what is queued behind rests on what was given up
                return
            self.pending_since = taken
            self.committed += len(records)
            on_commit()
            self._checkpointer.committed(len(records))

    def _drain(self) -> tuple[list[Record], bool]:
        """All records that are queued, waiting for the first; and whether more may come."""
        records: list[Record] = []
        together = self._first()
        while together is not None:
            records += together
            try:
                together = self._queue.get_nowait()
            except queue.Empty:
                return records, True
        return records, False

    def _first(self) -> Sequence[Record] | None:
        """What is queued next; the file is tidied while there is none."""
        wait = _IDLE
        while True:
            try:
                return self._queue.get(timeout=wait)
            except queue.Empty:
                if not self._tidy():
                    self._checkpointer.idle()
                    return self._queue.get()
                wait = _BREATH

    def _tidy(self) -> bool:
        try:
            return self._retention.idle()
        except sqlite3.Error as exc:
            logger.warning("the journal cannot be tidied: %s", exc)
            self._roll_back()
            return False

    def _commit(self, changes: Changes) -> bool:
        """Write until the disk takes it; false: :meth:`stop` gave up on it."""
        delay = _RETRY_FIRST
        trimming = self._retention.due(changes)
        while True:
            began = time.monotonic()
            removed = 0
            try:
                if trimming or not write_at_once(self._connection, changes):
                    self._connection.execute("BEGIN IMMEDIATE")
                    write(self._connection, changes)
                    if trimming:
                        removed = self._retention.trim(changes.ends)
                    self._connection.execute("COMMIT")
            except Exception as exc:  # whatever it is, what follows must not overtake it
                self._failed(exc)
            else:
                if self.error:
                    logger.warning("the journal writes again")
                    self.error = ""
                self._ledger.over -= removed
                self.commits += 1
                self.last_commit_seconds = time.monotonic() - began
                return True
            if self._stopping.wait(delay * random.uniform(0.5, 1.0)):
                return False
            delay = min(2 * delay, _RETRY_LAST)

    def _failed(self, exc: Exception) -> None:
        message = f"{type(exc).__name__}: {exc}"
        if message != self.error:
            logger.error("the journal cannot write and tries again: %s", message)
            self.error = message
        self._roll_back()

    def _roll_back(self) -> None:
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")
