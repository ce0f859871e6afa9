"""The journal as the event loop sees it: append rows without waiting, and learn when they are on disk.

Invariant: rows appended in one turn of the event loop are in one transaction; :meth:`Journal.synced` returns only after
all rows appended before it are synced to the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import sqlite3
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

from swarm.errors import ConfigError, UnavailableError
from swarm.server.config import ServerConfig
from swarm.server.journal.erasure import (
    TOMBSTONES,
    Match,
    bury,
    clear,
    delete,
    find,
    log_emptied,
    report,
    tombstones,
    undone,
)
from swarm.server.journal.recovery import past_ending, recover
from swarm.server.journal.rows import Ending, JournalRow, Recovered
from swarm.server.journal.schema import FolderLock, open_to_write, reading, unreadable
from swarm.server.journal.writer import Retention, Writer
from swarm.status import JournalStatus
from swarm.subjects import DataReport, Subject, Tombstone

logger = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")

#: seconds that :meth:`Journal.close` gives a disk that fails
CLOSE_SECONDS = 10.0
#: seconds that a row may take to the disk before those who wait for it get an error
SYNC_SECONDS = 10.0
#: age of the oldest row that is not on disk, in seconds, from which on the disk sets the pace of claims
BEHIND_SECONDS = 0.05
#: seconds that a deletion may take, and a look at all episodes
ERASE_SECONDS = 300.0


class Journal:
    """The journal of one server; its methods belong to one event loop."""

    def __init__(self, path: Path, lock: FolderLock, connection: sqlite3.Connection, retention: Retention) -> None:
        self._path = path
        self._lock = lock
        self._appended = 0
        #: what this turn of the event loop has appended
        self._gathered: list[JournalRow] = []
        self._oldest = 0.0
        #: how many rows must be committed, until when (on the event loop's clock), and who waits
        self._waiting: deque[tuple[int, float, asyncio.Future[None]]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._writer = Writer(connection, retention, self._committed)

    @classmethod
    def open(cls, path: Path, config: ServerConfig | None = None) -> Self:
        """Open the journal at ``path`` for writing, and create it if there is none.

        Args:
            config: says by ``keep_episodes``, ``keep_bytes``, ``keep_seconds`` and ``keep_routes`` what is kept of the
                episodes that are over.

        Raises:
            ConfigError: another server has it, it is unreadable or no journal, another version wrote it, or the disk
                refuses what a deletion that was cut short still has to note.
        """
        with contextlib.ExitStack() as stack:
            lock = FolderLock(path)
            stack.callback(lock.release)
            connection = stack.enter_context(contextlib.closing(open_to_write(path)))
            try:
                # a deletion that was killed, or a journal from before it
                stones = undone(connection, path.parent)
                delete(connection, path.parent, stones)
                try:
                    if stones:
                        # minutes for gigabytes, and `up` shows the last lines where they are too many
                        size = path.stat().st_size / 1e9
                        logger.info("%s (%.1f GB) is written anew without what was deleted", path, size)
                        clear(connection, path, stones, 1.0)
                except (UnavailableError, OSError, sqlite3.Error) as exc:
                    logger.warning("what was deleted is cleared from %s when the server is idle: %s", path, exc)
                tidy = partial(_cleared, connection, path)
                retention = Retention(connection, config or ServerConfig(), tidy)
                journal = cls(path, lock, connection, retention)
            except (sqlite3.Error, ValueError) as exc:
                raise unreadable(path, exc) from exc
            except UnavailableError as exc:
                raise ConfigError(exc.message) from exc
            stack.pop_all()
        return journal

    def recover(self) -> Recovered:
        """What is on disk now.

        Raises:
            ConfigError: the file is damaged.
        """
        with reading(self._path) as connection:
            return replace(recover(connection), tombstones=tombstones(self._path.parent))

    @property
    def error(self) -> str:
        """Why the disk refuses what is pending; else empty."""
        return self._writer.error

    @property
    def behind(self) -> bool:
        """Whether a row has waited for the disk for more than :data:`BEHIND_SECONDS`."""
        return self._oldest_pending_seconds() > BEHIND_SECONDS

    @property
    def _pending(self) -> int:
        """How many rows are not on disk yet."""
        return self._appended - self._writer.committed

    def append(self, *rows: JournalRow) -> None:
        """Queue ``rows`` for the disk; never waits, never raises.

        The writer gets what one turn of the event loop appends at once, as one transaction: a crash finds all of it on
        disk, or nothing. Besides, a writer woken by each row would compete for the interpreter's lock.
        """
        if not self._pending:
            self._oldest = time.monotonic()
        self._appended += len(rows)
        if not self._gathered:
            try:
                asyncio.get_running_loop().call_soon(self._hand_over)
            except RuntimeError:  # no event loop runs, so there is no turn to wait for
                self._writer.put(rows)
                return
        self._gathered += rows

    async def synced(self) -> None:
        """Wait until everything appended so far is on disk.

        Raises:
            UnavailableError: it takes more than :data:`SYNC_SECONDS` (``journal_unavailable``); the writer goes on
                trying.
        """
        if self._writer.committed >= self._appended:
            return
        loop = self._loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiting.append((self._appended, loop.time() + SYNC_SECONDS, waiter))
        if self._deadline is None:
            self._deadline = loop.call_later(SYNC_SECONDS, self._expire)
        # the writer looks for waiting callers after it has committed: one of the two sees the other
        self._wake()
        await waiter

    async def past_ending(self, episode_uuid: str) -> Ending | None:
        """How an episode ended that memory has forgotten; ``None`` if it is unknown.

        Raises:
            UnavailableError: the journal cannot be read now (``journal_unavailable``).
        """
        return await self._done(lambda connection: past_ending(connection, episode_uuid))

    async def report(self, subject: Subject) -> DataReport:
        """What is on disk of ``subject``; raises as :meth:`past_ending`."""
        return await self._done(lambda connection: report(connection, self._path.parent, subject), ERASE_SECONDS)

    async def matches(self, subject: Subject, until: float) -> list[Match]:
        """The episodes that :meth:`erase` would delete; raises as :meth:`past_ending`."""
        return await self._done(lambda connection: list(find(connection, subject, until)), ERASE_SECONDS)

    async def erase(self, stone: Tombstone) -> DataReport:
        """Delete what ``stone`` names, which is written first; what there was. Everything else waits meanwhile.

        Raises:
            UnavailableError: it is not done yet; repeat it where the message does not say that it is noted.
        """
        folder = self._path.parent

        def do(connection: sqlite3.Connection) -> DataReport:
            current, stones = report(connection, folder, stone.subject), undone(connection, folder)
            delete(connection, folder, stones)
            if stones:
                clear(connection, self._path, stones)
            return current.model_copy(update={"earlier": [other for other in current.earlier if other.id != stone.id]})

        try:
            # the writer may be busy for longer than this waits for it
            async with asyncio.timeout(SYNC_SECONDS):
                await asyncio.to_thread(bury, folder, stone)
        except TimeoutError as exc:
            raise _unavailable(f"hangs: {TOMBSTONES} was not written; repeat the deletion") from exc
        try:
            return await self._done(do, ERASE_SECONDS)
        except UnavailableError as exc:
            raise UnavailableError(
                f"{exc}; the deletion is noted, and is done when the server is idle, or starts again", code=exc.code
            ) from exc

    async def _done(self, do: Callable[[sqlite3.Connection], ResultT], seconds: float = 0.0) -> ResultT:
        seconds = seconds or SYNC_SECONDS
        result: Future[ResultT] = Future()

        def work(connection: sqlite3.Connection) -> None:
            # unless whoever asked has given up
            if result.set_running_or_notify_cancel():
                try:
                    result.set_result(do(connection))
                except Exception as exc:
                    result.set_exception(exc)

        self._hand_over()
        self._writer.put(work)
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.wrap_future(result)
        except TimeoutError as exc:
            raise _unavailable(f"cannot be read: no answer within {seconds:g} s") from exc
        except (sqlite3.Error, OSError) as exc:
            raise _unavailable(f"cannot be read: {exc}") from exc

    def stats(self) -> JournalStatus:
        """Counts, times and the size on disk."""
        writer = self._writer
        log = self._path.with_name(self._path.name + "-wal")
        return JournalStatus(
            pending=self._pending,
            oldest_pending_seconds=self._oldest_pending_seconds(),
            last_commit_seconds=writer.last_commit_seconds,
            commits=writer.commits,
            records=writer.committed,
            bytes=sum(part.stat().st_size for part in (self._path, log) if part.exists()),
            error=writer.error,
        )

    async def close(self) -> None:
        """Write what is pending and release the folder; a second call does nothing.

        A disk that fails gets :data:`CLOSE_SECONDS`, and as long again if it hangs.
        """
        if self._lock.released:
            return
        self._hand_over()
        ended = await asyncio.to_thread(self._writer.stop, CLOSE_SECONDS)
        self._hand_over()
        self._wake()
        self._let_go(math.inf, "before the server ended")
        if self._deadline is not None:
            self._deadline.cancel()
        if self._pending:
            logger.error("%d journal records could not be written: %s", self._pending, self._writer.error)
        if not ended:
            logger.error("the disk hangs: the journal is left as it is, with all that was acknowledged")
        self._lock.release()

    def _oldest_pending_seconds(self) -> float:
        return time.monotonic() - max(self._oldest, self._writer.pending_since) if self._pending else 0.0

    def _hand_over(self) -> None:
        if self._gathered:
            rows, self._gathered = self._gathered, []
            self._writer.put(rows)

    def _committed(self) -> None:
        """In the writer thread: wake those who wait for what was just committed."""
        if self._waiting and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        committed = self._writer.committed
        while self._waiting and self._waiting[0][0] <= committed:
            waiter = self._waiting.popleft()[2]
            if not waiter.done():
                waiter.set_result(None)

    def _expire(self) -> None:
        """Give up for those who have waited too long, and look again when the next one will have."""
        self._deadline = None
        loop = self._loop
        assert loop is not None, "synced sets it before anyone waits"
        # after this process stood still, the writer's latest commits may not have been noticed yet
        self._wake()
        now = loop.time()
        self._let_go(now, f"within {SYNC_SECONDS:g} s")
        if self._waiting:
            until = self._waiting[0][1]
            # the process stood still before the writer got the rows: give it the full time now
            self._deadline = loop.call_at(until if until > now else now + SYNC_SECONDS, self._expire)

    def _let_go(self, until: float, when: str) -> None:
        why = f": {self._writer.error}" if self._writer.error else ""
        handed_over = self._appended - len(self._gathered)
        while self._waiting and self._waiting[0][1] <= until and self._waiting[0][0] <= handed_over:
            waiter = self._waiting.popleft()[2]
            if not waiter.done():
                waiter.set_exception(_unavailable(f"did not reach the disk {when}{why}; repeat the request"))


def _cleared(connection: sqlite3.Connection, path: Path, anew: bool) -> bool:
    """In an idle writer: do what a deletion left, write the file ``anew``, and empty the log; whether it is empty."""
    stones = undone(connection, path.parent)
    if not log_emptied(connection):
        return False
    delete(connection, path.parent, stones)
    if stones or anew:
        clear(connection, path, stones, 1.0)
    return True


def _unavailable(why: str) -> UnavailableError:
    return UnavailableError(f"the journal {why}", code="journal_unavailable")
