"""A journal that forgets: what it was told can be looked at, and its disk can be made to fail."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import anyio.lowlevel

from swarm.errors import UnavailableError
from swarm.server.journal.rows import BatchRow, Ending, JournalRow, Recovered, RunRow

RowT = TypeVar("RowT")


class MemoryJournal:
    """``records`` are all rows in order; ``synced_records`` of them were there at the last successful :meth:`synced`.

    While ``failing`` is set, nothing gets to the disk; while ``gate`` is not, it takes its time.
    """

    def __init__(self, recovered: Recovered | None = None) -> None:
        self.recovered = recovered or Recovered()
        self.records: list[JournalRow] = []
        self.synced_records = 0
        self.failing = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.error = ""
        self.behind = False
        self.past: dict[str, Ending] = {}

    def recover(self) -> Recovered:
        return self.recovered

    def append(self, *rows: JournalRow) -> None:
        self.records += rows

    async def synced(self) -> None:
        count = len(self.records)
        await self.gate.wait()
        if self.failing:
            await anyio.lowlevel.checkpoint()
            raise UnavailableError("the disk is full", code="journal_unavailable")
        self.synced_records = max(self.synced_records, count)

    async def past_ending(self, episode_uuid: str) -> Ending | None:
        return self.past.get(episode_uuid)

    def of(self, kind: type[RowT]) -> list[RowT]:
        """The rows of one kind."""
        return [row for row in self.records if isinstance(row, kind)]

    @property
    def failures(self) -> list[int]:
        """The attempts of each batch row that was written because the trainer failed on the batch."""
        return [row.attempts for row in self.of(BatchRow) if row.attempts]

    @property
    def stops(self) -> int:
        """How often a run was stopped."""
        return sum(row.stopped for row in self.of(RunRow))
