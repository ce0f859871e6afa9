"""The one thread that writes: it takes all that is queued, commits it as one transaction, says so, and tidies the file.

Invariant: rows are committed in the order in which they were queued, each exactly once. Rows that the disk refuses are
kept and retried, and nothing behind them is written before them. Nothing that is claimed, waits for a batch or is in
the batch that is out is ever removed; each step of that is small, so that no commit waits long for it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence

from swarm.concurrency import backoff
from swarm.errors import SwarmGatewayError
from swarm.server.config import RouteRetention, ServerConfig
from swarm.server.journal.rows import CallRow, EndRow, JournalRow, PairRow, RatingRow
from swarm.server.journal.schema import LIVE, PRIVATE
from swarm.server.journal.sqlite import write
from swarm.states import EpisodeState
from swarm.subjects import PRIVATE_DATA

logger = logging.getLogger(__name__)

#: seconds between two attempts at a failed commit, growing to the second
RETRY_FIRST, RETRY_LAST = 0.05, 2.0
#: seconds without a row after which the file is tidied
IDLE_SECONDS = 1.0
#: seconds between two looks of a server that nobody asks whether something has become too old
AGE_SECONDS = 30.0
#: seconds between two steps of that, during which rows go first
_PAUSE = 0.01
#: rows that are kept of the small tables, whose rows have at most some kilobytes
_KEEP_STEPS, _KEEP_RUNS = 100_000, 1_000
#: Pairs and ratings that are kept, of about a kilobyte each: more than any comparison has. Episodes get the other room.
_KEEP_EVIDENCE = 1_000_000
#: written ends (pairs and ratings too) and token ids after which the limits are checked again
_CHECK_ENDS, _CHECK_TOKENS = 128, 64 * 1024
#: share of time that a server may spend on writing its file anew, without copies of what became too old
ANEW_SHARE = 0.001
#: pages that one step gives back to the file system
_STEP_PAGES = 512


class Retention:
    """The limits of one journal, see :meth:`Journal.open`; it belongs to the writer thread.

    Args:
        clear: tries to empty the log of what was removed, and does what a deletion left, or, with true, writes the
            whole file anew; whether the log is empty.

    Attributes:
        unclean: whether the log may have something that was removed, or the file something that is to be.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        config: ServerConfig,
        clear: Callable[[bool], bool] = lambda anew: True,
    ) -> None:
        self._connection = connection
        self._config = config
        self._clear = clear
        self.unclean = True
        # rows that moved leave copies in the gaps of pages; of what has a term, and of private answers, none may stay
        (private,) = connection.execute(f"SELECT EXISTS (SELECT 1 FROM episodes WHERE {PRIVATE})").fetchone()
        self._strict = config.keep_seconds is not None or bool(config.keep_routes or private)
        self._copies = self._strict
        self._anew_from = -math.inf
        page_size: int = connection.execute("PRAGMA page_size").fetchone()[0]
        self._keep_pages = max(1, config.keep_bytes // page_size)
        self._ends = self._tokens = 0

    def apply(self, rows: Sequence[JournalRow]) -> None:
        """Remove what is too much, inside the transaction that writes ``rows``, if it is time to check."""
        self.unclean = True
        for row in rows:
            if isinstance(row, EndRow):
                self._ends += 1
                self._strict = self._strict or row.drop_reason == PRIVATE_DATA
                # of some that are given up with their process, nobody says that they are private
                self._copies = self._copies or (self._strict and not row.kept_call)
            elif isinstance(row, CallRow):
                self._tokens += len(row.call.prompt_ids) + len(row.call.response_ids)
            elif isinstance(row, PairRow | RatingRow):
                self._ends += 1
        if self._ends >= _CHECK_ENDS or self._tokens >= _CHECK_TOKENS:
            self._remove(2 * max(self._ends, _CHECK_ENDS))
            self._ends = self._tokens = 0

    def tidy(self) -> bool:
        """Do one step of the same in a transaction of its own while the server is idle; whether there is more to do.

        Raises:
            sqlite3.Error: the disk refuses; nothing was changed.
        """
        execute = self._connection.execute
        execute("BEGIN IMMEDIATE")
        removed = self._remove(2 * _CHECK_ENDS)
        execute("DELETE FROM steps WHERE rowid <= (SELECT max(rowid) FROM steps) - ?", (_KEEP_STEPS,))
        execute("DELETE FROM evaluations WHERE rowid <= (SELECT max(rowid) FROM evaluations) - ?", (_KEEP_STEPS,))
        gone = execute("DELETE FROM runs WHERE rowid <= (SELECT max(rowid) FROM runs) - ?", (_KEEP_RUNS,)).rowcount
        for table in ("pairs", "ratings") if gone > 0 else ():  # to look for them takes a second for a million
            execute(f"DELETE FROM {table} WHERE run_id NOT IN (SELECT run_id FROM runs)")
        execute("COMMIT")
        if removed > 0 or self._shrink():
            self.unclean = True
            return True
        began = time.monotonic()
        anew = self._copies and began >= self._anew_from
        if self.unclean or anew:
            self.unclean = not self._clear(anew)
            if anew and not self.unclean:
                ended = time.monotonic()
                self._copies, self._anew_from = False, ended + (ended - began) / ANEW_SHARE
        return False

    def _remove(self, most: int) -> int:
        """Remove up to ``most`` of the oldest episodes that are over, as many of each route that has limits of its own,
        and of pairs and of ratings; returns how many."""
        execute, evidence = self._connection.execute, 0
        for table in ("pairs", "ratings"):
            oldest = f"SELECT rowid FROM {table} WHERE rowid <= (SELECT max(rowid) FROM {table}) - ? LIMIT ?"
            evidence += execute(f"DELETE FROM {table} WHERE rowid IN ({oldest})", (_KEEP_EVIDENCE, most)).rowcount
        pages, free = self._pages()
        # both counts read an index only
        (over,) = execute(
            "SELECT (SELECT count(*) FROM episodes WHERE ended IS NOT NULL)"
            f" - (SELECT count(*) FROM episodes WHERE {LIVE} AND state != '{EpisodeState.CLAIMED}')"
        ).fetchone()
        too_many = over - self._config.keep_episodes
        limit = most if pages - free > self._keep_pages else min(most, too_many)
        names: set[str] = set()
        if limit > 0 or self._config.keep_seconds is not None:
            of_all = f"FROM episodes WHERE ended IS NOT NULL AND NOT {LIVE}"
            is_old = self._is_old(self._config.keep_seconds, of_all)
            ended = execute(f"SELECT uuid, ended_at, ended {of_all} ORDER BY ended LIMIT ?", (most,))
            names |= {name for rank, (name, *end) in enumerate(ended) if rank < limit or is_old(*end)}
        for route, limits in self._config.keep_routes.items():
            names |= self._too_much(route, limits, most)
        if not names:
            return evidence
        listed = json.dumps([*names])
        for table, column in (("episodes", "uuid"), ("trajectories", "episode"), ("calls", "episode")):
            execute(f"DELETE FROM {table} WHERE {column} IN (SELECT value FROM json_each(?))", (listed,))
        self._copies = self._copies or self._strict
        return len(names) + evidence

    def _too_much(self, route: str, limits: RouteRetention, most: int) -> set[str]:
        """Up to ``most`` episodes of ``route`` that are to go, the oldest."""
        execute, over = self._connection.execute, 0
        # all statements read the index of routes
        of_route = "FROM episodes WHERE route = ? AND route != '' AND ended IS NOT NULL"
        if limits.keep_bytes is not None:
            (size,) = execute(f"SELECT coalesce(sum(size), 0) {of_route}", (route,)).fetchone()
            over = size - limits.keep_bytes
        is_old = self._is_old(limits.keep_seconds, f"{of_route} AND NOT {LIVE}", route)
        names: set[str] = set()
        for name, size, *end in execute(
            f"SELECT uuid, size, ended_at, ended {of_route} AND NOT {LIVE} ORDER BY ended LIMIT ?", (route, most)
        ):
            if over > 0 or is_old(*end):
                names.add(name)
                over -= size
        return names

    def _is_old(self, keep_seconds: float | None, which: str, *values: str) -> Callable[[float, int], bool]:
        """Whether one of ``which`` is too old, by the time and the number of its end: also one that a clock which was
        ahead has dated, once the first behind it is too old that a right clock has."""
        if keep_seconds is None:
            return lambda ended_at, number: False
        now = time.time()
        oldest, behind = now - keep_seconds, 0
        first = f"SELECT ended_at, ended {which} AND ended_at <= ? ORDER BY ended LIMIT 1"
        for ended_at, number in self._connection.execute(first, (*values, now)):
            behind = number if ended_at < oldest else 0
        return lambda ended_at, number: ended_at < oldest or number < behind

    def _shrink(self) -> bool:
        """Give free pages back, except for those that the next episodes will fill anyway; whether there were any."""
        pages, free = self._pages()
        slack = max(_STEP_PAGES, pages // 10)
        if free <= slack:
            return False
        self._connection.execute(f"PRAGMA incremental_vacuum({min(_STEP_PAGES, free - slack)})").fetchall()
        return True

    def _pages(self) -> tuple[int, int]:
        """Pages of the file in all, and free ones."""
        pages: tuple[int, int] = self._connection.execute(
            "SELECT page_count, freelist_count FROM pragma_page_count, pragma_freelist_count"
        ).fetchone()
        return pages


#: Something to do with the connection, after everything queued before is committed; it raises nothing.
Work = Callable[[sqlite3.Connection], None]


class Writer:
    """The thread that owns ``connection``; it ends with :meth:`stop`.

    Args:
        on_commit: called in the thread after each commit.
    """

    def __init__(self, connection: sqlite3.Connection, retention: Retention, on_commit: Callable[[], None]) -> None:
        self._connection = connection
        self._retention = retention
        self._on_commit = on_commit
        self._queue: queue.SimpleQueue[Sequence[JournalRow] | Work | None] = queue.SimpleQueue()
        self._give_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="swarm-journal", daemon=True)
        #: committed rows; the others are for statistics
        self.committed = 0
        self.commits = 0
        self.last_commit_seconds = 0.0
        self.error = ""
        #: why the file could not be tidied, the last time
        self._untidy = ""
        #: the earliest time at which the rows after the committed ones can have been queued
        self.pending_since = time.monotonic()
        self._thread.start()

    def put(self, item: Sequence[JournalRow] | Work) -> None:
        """Queue rows for one transaction, or work; never waits."""
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

    def _drain(self) -> list[Sequence[JournalRow] | Work | None]:
        """All items that are queued; waits for the first one, and tidies the file meanwhile."""
        items = [self._first()]
        with contextlib.suppress(queue.Empty):
            while items[-1] is not None:
                items.append(self._queue.get_nowait())
        return items

    def _first(self) -> Sequence[JournalRow] | Work | None:
        wait = IDLE_SECONDS
        while True:
            try:
                return self._queue.get(timeout=wait)
            except queue.Empty:
                # age comes by itself
                wait = _PAUSE if self._tidy() else AGE_SECONDS

    def _tidy(self) -> bool:
        try:
            return self._retention.tidy()
        except (sqlite3.Error, OSError, SwarmGatewayError) as exc:
            if str(exc) != self._untidy:
                logger.warning("the journal cannot be tidied: %s", exc)
            self._untidy = str(exc)
            self._roll_back()
            return False

    def _serve(self, items: Sequence[Sequence[JournalRow] | Work | None]) -> bool:
        """Commit all rows of ``items`` as one transaction, then do the work; False at the end."""
        taken = time.monotonic()
        rows = [row for item in items if isinstance(item, Sequence) for row in item]
        if rows:
            if not self._commit(rows):
                # later rows rest on those that were given up
                return False
            self.pending_since = taken
            self.committed += len(rows)
            self._on_commit()
        for item in items:
            if item is not None and not isinstance(item, Sequence):
                item(self._connection)
                self._roll_back()
                self._retention.unclean = True
        return items[-1] is not None

    def _commit(self, rows: Sequence[JournalRow]) -> bool:
        """Write until the disk accepts it; False if :meth:`stop` gave up on it."""
        failures = 0
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
            failures += 1
            if self._give_up.wait(backoff(failures, RETRY_FIRST, RETRY_LAST)):
                return False

    def _failed(self, exc: Exception) -> None:
        message = f"{type(exc).__name__}: {exc}"
        if message != self.error:
            logger.error("the journal cannot write and tries again: %s", message)
            self.error = message
        self._roll_back()

    def _roll_back(self) -> None:
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")
