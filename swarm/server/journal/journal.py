"""The journal as the event loop sees it: append without waiting, then wait until it is on disk.

Invariant: :meth:`Journal.synced` returns only after every record appended before it was called is committed and
synced to the disk.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Self

from swarm.errors import UnavailableError
from swarm.server.journal.checkpoint import Checkpointer
from swarm.server.journal.lookups import Lookups
from swarm.server.journal.reading import past_ending, recover
from swarm.server.journal.records import PastEnding, Record, Recovered
from swarm.server.journal.retention import Retention
from swarm.server.journal.schema import FolderLock, connect, connect_to_read, prepare, unreadable
from swarm.server.journal.store import load
from swarm.server.journal.writer import Writer
from swarm.types import Model

logger = logging.getLogger(__name__)

#: seconds that :meth:`Journal.close` gives a disk that fails
_CLOSE_SECONDS = 10.0

#: that a record may take to the disk before those who wait for it are let go
SYNC_SECONDS = 10.0

#: is told ``None``, or why it will not be told
OnDisk = Callable[[UnavailableError | None], None]


class JournalStats(Model):
    """How the journal does; seconds, bytes. ``error`` is empty unless the disk refuses what is pending."""

    pending: int
    oldest_pending_seconds: float
    last_commit_seconds: float
    commits: int
    records: int
    bytes: int
    error: str


class Journal:
    """The journal of one server. :meth:`append` and :meth:`synced` belong to one event loop."""

    def __init__(self, path: Path, lock: FolderLock, connection: sqlite3.Connection, writer: Writer) -> None:
        self._path = path
        self._lock = lock
        self._connection = connection
        self._writer = writer
        self._appended = 0
        #: what this turn of the event loop has appended
        self._gathered: list[Record] = []
        self._oldest = 0.0
        #: how many records must be committed, until when (on the event loop's clock), and who is told
        self._waiting: deque[tuple[int, float, OnDisk]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._reader = connect_to_read(path)
        self._lookups = Lookups(self._reader)
        writer.start(self._committed)

    @classmethod
    def open(cls, path: Path, *, keep_episodes: int = 100_000, keep_bytes: int = 4 * 1024**3) -> Self:
        """Open the journal at ``path`` to write, and make it if there is none.

        Args:
            keep_episodes: how many episodes that are over are kept, the latest.
            keep_bytes: size on disk above which the oldest of them go even so.

        Raises:
            ConfigError: another server has it, it is unreadable or no journal, or a newer version wrote it.
        """
        lock = FolderLock(path)
        try:
            connection = prepare(path)
            try:
                ledger = load(connection)
                retention = Retention(connection, ledger, keep_episodes, keep_bytes)
                checkpointer = Checkpointer(connect(path), connection)
            except sqlite3.Error as exc:
                connection.close()
                raise unreadable(path, exc) from exc
        except BaseException:
            lock.release()
            raise
        return cls(path, lock, connection, Writer(connection, ledger, retention, checkpointer))

    def recover(self) -> Recovered:
        """What an earlier server left, before anything is appended.

        Raises:
            ConfigError: the file is damaged.
        """
        try:
            return recover(self._reader)
        except (sqlite3.Error, ValueError) as exc:
            raise unreadable(self._path, exc) from exc

    @property
    def pending(self) -> int:
        """How many records are not on disk yet."""
        return self._appended - self._writer.committed

    def append(self, *records: Record) -> None:
        """Queue ``records`` to be written in this order, all or none; never waits, never raises.

        They must not be changed later. The writer gets what one turn of the event loop appends at once: woken by the
        first record, it would fight for the interpreter's lock with whoever appends the next.
        """
        if not self.pending:
            self._oldest = time.monotonic()
        self._appended += len(records)
        if not self._gathered:
            try:
                asyncio.get_running_loop().call_soon(self._hand_over)
            except RuntimeError:  # nothing runs yet that would come to a next turn
                self._writer.put(records)
                return
        self._gathered += records

    def on_disk(self, told: OnDisk) -> None:
        """Call ``told`` when everything appended so far is on disk, or with an :class:`UnavailableError` when it is not
        after :data:`SYNC_SECONDS` (``journal_unavailable``); it will be tried further. It may be called at once."""
        if self._writer.committed >= self._appended:
            told(None)
            return
        loop = self._loop = asyncio.get_running_loop()
        self._waiting.append((self._appended, loop.time() + SYNC_SECONDS, told))
        if self._deadline is None:
            self._deadline = loop.call_later(SYNC_SECONDS, self._expire)
        # the writer looks for waiters after it has committed: one of the two sees the other
        self._wake()

    async def synced(self) -> None:
        """Wait until everything appended so far is on disk.

        Raises:
            UnavailableError: see :meth:`on_disk`.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def told(error: UnavailableError | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        self.on_disk(told)
        await future

    async def past_ending(self, episode_uuid: str) -> PastEnding | None:
        """How an episode ended that memory has forgotten; ``None``: unknown.

        Raises:
            UnavailableError: the journal cannot be read now (``journal_unavailable``).
        """
        return await self._lookups.ask(lambda reader: past_ending(reader, episode_uuid), SYNC_SECONDS)

    def stats(self) -> JournalStats:
        """Counts, times and the size on disk."""
        writer = self._writer
        pending = self.pending
        oldest = max(self._oldest, writer.pending_since)
        return JournalStats(
            pending=pending,
            oldest_pending_seconds=time.monotonic() - oldest if pending else 0.0,
            last_commit_seconds=writer.last_commit_seconds,
            commits=writer.commits,
            records=writer.committed,
            bytes=sum(part.stat().st_size for part in _files(self._path) if part.exists()),
            error=writer.error,
        )

    async def close(self) -> None:
        """Write what is pending and release the folder; a second call does nothing.

        A disk that hangs has :data:`_CLOSE_SECONDS` for each part of it, and what it holds is left behind.
        """
        if self._lock.released:
            return
        self._hand_over()
        done = await asyncio.to_thread(self._writer.stop, _CLOSE_SECONDS)
        self._hand_over()
        self._wake()
        self._let_go(math.inf, "before the server ended")
        if self._deadline is not None:
            self._deadline.cancel()
        if not done:
            logger.error("%d journal records could not be written: %s", self.pending, self._writer.error)
        closed = await asyncio.to_thread(self._lookups.close, _CLOSE_SECONDS)
        # the last one to close copies the log into the database
        if done and not await asyncio.to_thread(_done_within, _CLOSE_SECONDS, self._connection.close):
            closed = False
        if not closed:
            logger.error("the disk hangs: the journal is left as it is, with all that was acknowledged")
        self._lock.release()

    def _hand_over(self) -> None:
        if self._gathered:
            records, self._gathered = self._gathered, []
            self._writer.put(records)

    def _committed(self) -> None:
        """In the writer's thread: let those go on who wait for what was just committed."""
        if self._waiting and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        committed = self._writer.committed
        while self._waiting and self._waiting[0][0] <= committed:
            _tell(self._waiting.popleft()[2], None)

    def _expire(self) -> None:
        """Let those go who have waited for too long, and look again when the next one will have."""
        self._deadline = None
        loop = self._loop
        assert loop is not None, "who waits has named the event loop"
        # after a standstill of this process: what the writer has told meanwhile may not have been looked at yet
        self._wake()
        now = loop.time()
        self._let_go(now, f"within {SYNC_SECONDS:g} s")
        if self._waiting:
            until = self._waiting[0][1]
            # it stood still before the writer had what they wait for
            self._deadline = loop.call_at(until if until > now else now + SYNC_SECONDS, self._expire)

    def _let_go(self, until: float, when: str) -> None:
        why = f": {self._writer.error}" if self._writer.error else ""
        handed_over = self._appended - len(self._gathered)
        while self._waiting and self._waiting[0][1] <= until and self._waiting[0][0] <= handed_over:
            message = f"the journal did not reach the disk {when}{why}; repeat the request"
            _tell(self._waiting.popleft()[2], UnavailableError(message, code="journal_unavailable"))


def _tell(told: OnDisk, error: UnavailableError | None) -> None:
    try:
        told(error)
    except Exception:
        # the others who wait are not to suffer for one of them
        logger.exception("an answer to what the journal has written failed")


def _files(path: Path) -> tuple[Path, Path]:
    return path, path.with_name(path.name + "-wal")


def _done_within(seconds: float, work: Callable[[], None]) -> bool:
    """Whether ``work`` ended in time; if not, it goes on in a thread that nothing waits for."""
    thread = threading.Thread(target=work, name="swarm-journal-close", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()
