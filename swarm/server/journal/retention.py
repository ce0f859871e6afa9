"""Removes the oldest episodes that are over, once there are too many of them or the file is too large.

Invariant: nothing that is claimed, waits for a batch or is in the batch that is out is ever removed. Each step is
small, so that no commit waits long for it, and most commits contain none: somewhat more than wanted may be kept.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence

from swarm.server.journal.rows import CallRow, EndRow, Row
from swarm.server.journal.schema import LIVE
from swarm.states import EpisodeState

#: rows that are kept of the small tables, whose rows have at most some kilobytes
_KEEP_STEPS, _KEEP_RUNS = 100_000, 1_000
#: written ends and token ids after which the limits are checked again
_CHECK_ENDS, _CHECK_TOKENS = 128, 64 * 1024
#: pages that one step gives back to the file system
_STEP_PAGES = 512


class Retention:
    """The limits of one journal; it belongs to the writer thread.

    Args:
        keep_episodes: how many episodes that are over are kept.
        keep_bytes: how many bytes of the file may be in use before older episodes go nevertheless.
    """

    def __init__(self, connection: sqlite3.Connection, keep_episodes: int, keep_bytes: int) -> None:
        self._connection = connection
        self._keep_episodes = keep_episodes
        page_size: int = connection.execute("PRAGMA page_size").fetchone()[0]
        self._keep_pages = max(1, keep_bytes // page_size)
        self._ends = self._tokens = 0

    def apply(self, rows: Sequence[Row]) -> None:
        """Remove what is too much, inside the transaction that writes ``rows``, if it is time to check."""
        for row in rows:
            if isinstance(row, EndRow):
                self._ends += 1
            elif isinstance(row, CallRow):
                self._tokens += len(row.call.prompt_ids) + len(row.call.response_ids)
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
        execute("DELETE FROM runs WHERE rowid <= (SELECT max(rowid) FROM runs) - ?", (_KEEP_RUNS,))
        execute("COMMIT")
        return removed > 0 or self._shrink()

    def _remove(self, most: int) -> int:
        """Remove up to ``most`` of the oldest episodes that are over; returns how many."""
        execute = self._connection.execute
        pages, free = self._pages()
        # both counts read an index only
        (over,) = execute(
            "SELECT (SELECT count(*) FROM episodes WHERE ended IS NOT NULL)"
            f" - (SELECT count(*) FROM episodes WHERE {LIVE} AND state != '{EpisodeState.CLAIMED}')"
        ).fetchone()
        too_many = over - self._keep_episodes
        limit = most if pages - free > self._keep_pages else min(most, too_many)
        if limit <= 0:
            return 0
        names = execute(
            f"SELECT uuid FROM episodes WHERE ended IS NOT NULL AND NOT {LIVE} ORDER BY ended LIMIT ?", (limit,)
        ).fetchall()
        listed = json.dumps([name for (name,) in names])
        for table, column in (("episodes", "uuid"), ("trajectories", "episode"), ("calls", "episode")):
            execute(f"DELETE FROM {table} WHERE {column} IN (SELECT value FROM json_each(?))", (listed,))
        return len(names)

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
        found: tuple[int, int] = self._connection.execute(
            "SELECT page_count, freelist_count FROM pragma_page_count, pragma_freelist_count"
        ).fetchone()
        return found
