"""What is forgotten: the oldest episodes that are over, once there are too many of them or the file is too large.

Invariant: nothing that is claimed, waits for a batch or is in the one that is out is ever removed; each step of the
work is small, so that no commit waits long for it, and most commits have none of it: up to :data:`_STEP_EPISODES` and
:data:`_LOOK_BYTES` more than wanted may be there until the next.
"""

from __future__ import annotations

import json
import logging
import sqlite3

from swarm.server.journal.ledger import Changes, Ledger

logger = logging.getLogger(__name__)

#: rows of the small tables that are kept; a row has at most some kilobytes
_KEEP_STEPS, _KEEP_RUNS = 100_000, 1_000
#: most episodes that one step removes, and pages that it gives back to the file system
_STEP_EPISODES, _STEP_PAGES = 128, 512
#: bytes written after which the size of the file is looked at, and those of a row that are not counted one by one
_LOOK_BYTES, _ROW_BYTES = 1024 * 1024, 512


class Retention:
    """Belongs to the writer.

    Args:
        keep_episodes: how many episodes that are over are kept.
        keep_bytes: how much of the file may be in use, in bytes, before older ones go even so.
    """

    def __init__(self, connection: sqlite3.Connection, ledger: Ledger, keep_episodes: int, keep_bytes: int) -> None:
        self._connection = connection
        self._ledger = ledger
        self._keep_episodes = keep_episodes
        page_size: int = connection.execute("PRAGMA page_size").fetchone()[0]
        self._keep_pages = max(1, keep_bytes // page_size)
        #: whether the file was too large when it was looked at, and bytes written since
        self._full = False
        self._unseen = 0

    def due(self, changes: Changes) -> bool:
        """Whether the transaction that writes ``changes`` must :meth:`trim`."""
        self._unseen += changes.size + _ROW_BYTES * len(changes.rows)
        too_many = self._ledger.over - self._keep_episodes
        return too_many >= _STEP_EPISODES or self._unseen >= _LOOK_BYTES or self._full

    def trim(self, added: int) -> int:
        """Within a transaction that added so many episodes, remove about twice as many if there are too many; returns
        how many, to be counted once it is committed."""
        step = max(_STEP_EPISODES, 2 * added)
        pages, free = self._pages()
        self._full = pages - free > self._keep_pages
        self._unseen = 0
        limit = step if self._full else min(step, self._ledger.over - self._keep_episodes)
        if limit <= 0:
            return 0
        rows = self._connection.execute(
            "SELECT id, ended FROM episodes WHERE state >= 3 ORDER BY ended LIMIT ?", (limit,)
        ).fetchall()
        for table, key, values in (
            ("episodes", "id", [row[0] for row in rows]),
            ("trajectories", "ended", [row[1] for row in rows]),
            ("calls", "episode", [row[0] for row in rows]),
        ):
            self._connection.execute(
                f"DELETE FROM {table} WHERE {key} IN (SELECT value FROM json_each(?))", (json.dumps(values),)
            )
        return len(rows)

    def idle(self) -> bool:
        """One step of the same work while nothing else is to be done; whether there is more of it.

        Raises:
            sqlite3.Error: the disk refuses; nothing was changed.
        """
        execute = self._connection.execute
        execute("BEGIN IMMEDIATE")
        removed = self.trim(0)
        execute("DELETE FROM steps WHERE id <= (SELECT max(id) FROM steps) - ?", (_KEEP_STEPS,))
        execute("DELETE FROM runs WHERE id <= (SELECT max(id) FROM runs) - ?", (_KEEP_RUNS,))
        execute("COMMIT")
        self._ledger.over -= removed
        return removed > 0 or self._shrink()

    def _shrink(self) -> bool:
        """Give free pages back, but for what the next episodes will fill anyway; whether there were any."""
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
