"""The one thread that writes: it takes all that is queued, commits it as one transaction, and says so.

Invariant: rows are committed in the order in which they were queued, each exactly once. Rows that the disk refuses are
kept and retried, and nothing behind them is written before them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence

from swarm.server.journal.retention import Retention
from swarm.server.journal.rows import Ending, Row
from swarm.server.journal.sqlite import past_ending, write

logger = logging.getLogger(__name__)

#: seconds between two attempts at a failed commit, growing to the second
RETRY_FIRST, RETRY_LAST = 0.05, 2.0
#: seconds without a row after which the file is tidied
IDLE_SECONDS = 1.0
#: seconds between two steps of that, during which rows go first
_PAUSE = 0.01


class Question:
    """A look-up for the writer thread, which answers it after it has committed everything queued before."""

    def __init__(self, episode_uuid: str) -> None:
        self.episode_uuid = episode_uuid
        self.answer: asyncio.Future[Ending | None] = asyncio.get_running_loop().create_future()

    def find(self, connection: sqlite3.Connection) -> None:
        """In the writer thread: look it up and hand the answer to the event loop."""
        found, error = None, None
        try:
            found = past_ending(connection, self.episode_uuid)
        except Exception as exc:
            error = exc
        # the loop may be closed by now, and the caller gone with it
        with contextlib.suppress(RuntimeError):
            self.answer.get_loop().call_soon_threadsafe(self._answer, found, error)

    def _answer(self, found: Ending | None, error: Exception | None) -> None:
        if self.answer.done():
            return
        if error is None:
            self.answer.set_result(found)
        else:
            self.answer.set_exception(error)


class Writer:
    """The thread that owns ``connection``; it ends with :meth:`stop`.

    Args:
        on_commit: called in the thread after each commit.
    """

    def __init__(self, connection: sqlite3.Connection, retention: Retention, on_commit: Callable[[], None]) -> None:
        self._connection = connection
        self._retention = retention
        self._on_commit = on_commit
        self._queue: queue.SimpleQueue[Sequence[Row] | Question | None] = queue.SimpleQueue()
        self._give_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="swarm-journal", daemon=True)
        #: committed rows; the others are for statistics
        self.committed = 0
        self.commits = 0
        self.last_commit_seconds = 0.0
        self.error = ""
        #: the earliest time at which the rows after the committed ones can have been queued
        self.pending_since = time.monotonic()
        self._thread.start()

    def put(self, item: Sequence[Row] | Question) -> None:
        """Queue rows for one transaction, or a question; never waits."""
        self._queue.put(item)

    def stop(self, within: float) -> bool:
        """Write what is queued and close the connection; whether the thread ended. A failing disk gets ``within`` s."""
        self._queue.put(None)
        self._thread.join(within)
        self._give_up.set()
        self._thread.join(within)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._serve(self._drain()):
                pass
            with contextlib.suppress(sqlite3.Error):
                # the last connection to close copies the log into the database
                self._connection.close()
        except BaseException as exc:
            # without this, those who wait would only learn that the disk is slow
            self.error = f"the writer died of {type(exc).__name__}: {exc}; restart the server"
            logger.critical("the journal accepts nothing more: %s", self.error, exc_info=True)

    def _drain(self) -> list[Sequence[Row] | Question | None]:
        """All items that are queued; waits for the first one, and tidies the file meanwhile."""
        items = [self._first()]
        with contextlib.suppress(queue.Empty):
            while items[-1] is not None:
                items.append(self._queue.get_nowait())
        return items

    def _first(self) -> Sequence[Row] | Question | None:
        wait = IDLE_SECONDS
        while True:
            try:
                return self._queue.get(timeout=wait)
            except queue.Empty:
                if not self._tidy():
                    return self._queue.get()
                wait = _PAUSE

    def _tidy(self) -> bool:
        try:
            return self._retention.tidy()
        except sqlite3.Error as exc:
            logger.warning("the journal cannot be tidied: %s", exc)
            self._roll_back()
            return False

    def _serve(self, items: Sequence[Sequence[Row] | Question | None]) -> bool:
        """Commit all rows of ``items`` as one transaction, then answer the questions; False at the end."""
        taken = time.monotonic()
        rows = [row for item in items if item is not None and not isinstance(item, Question) for row in item]
        if rows:
            if not self._commit(rows):
                # later rows rest on those that were given up
                return False
            self.pending_since = taken
            self.committed += len(rows)
            self._on_commit()
        for item in items:
            # whoever asked may have given up
            if isinstance(item, Question) and not item.answer.done():
                item.find(self._connection)
        return items[-1] is not None

    def _commit(self, rows: Sequence[Row]) -> bool:
        """Write until the disk accepts it; False if :meth:`stop` gave up on it."""
        delay = RETRY_FIRST
        while True:
            began = time.monotonic()
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                write(self._connection, rows)
                self._retention.apply(rows)
                self._connection.execute("COMMIT")
            except Exception as exc:  # whatever it is, later rows must not overtake these
                self._failed(exc)
            else:
                if self.error:
                    logger.warning("the journal writes again")
                    self.error = ""
                self.commits += 1
                self.last_commit_seconds = time.monotonic() - began
                return True
            if self._give_up.wait(delay * random.uniform(0.5, 1.0)):
                return False
            delay = min(2 * delay, RETRY_LAST)

    def _failed(self, exc: Exception) -> None:
        message = f"{type(exc).__name__}: {exc}"
        if message != self.error:
            logger.error("the journal cannot write and tries again: %s", message)
            self.error = message
        self._roll_back()

    def _roll_back(self) -> None:
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")
