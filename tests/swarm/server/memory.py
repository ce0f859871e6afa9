"""A journal that forgets: what it was told can be looked at, and its disk can be made to fail."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from swarm.errors import UnavailableError
from swarm.server.journal import OnDisk
from swarm.server.journal.records import PastEnding, Record, Recovered

RecordT = TypeVar("RecordT")


class MemoryJournal:
    """``records`` in their order; ``synced_records`` of them were there at the last successful :meth:`synced`.

    While ``failing`` is set, nothing gets to the disk; while ``gate`` is not, it takes its time.
    """

    def __init__(self, recovered: Recovered | None = None) -> None:
        self.recovered = recovered or Recovered()
        self.records: list[Record] = []
        #: the same as they came: those of one tuple are written together
        self.transactions: list[tuple[Record, ...]] = []
        self.synced_records = 0
        self.failing = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.pending = 0
        self.past: dict[str, PastEnding] = {}

    def recover(self) -> Recovered:
        return self.recovered

    def append(self, *records: Record) -> None:
        self.records += records
        self.transactions.append(records)

    def on_disk(self, told: OnDisk) -> None:
        assert self.gate.is_set(), "who must wait for the gate awaits synced()"
        self.synced_records = len(self.records) if not self.failing else self.synced_records
        told(UnavailableError("the disk is full", code="journal_unavailable") if self.failing else None)

    async def synced(self) -> None:
        count = len(self.records)
        await self.gate.wait()
        if self.failing:
            raise UnavailableError("the disk is full", code="journal_unavailable")
        self.synced_records = max(self.synced_records, count)

    async def past_ending(self, episode_uuid: str) -> PastEnding | None:
        return self.past.get(episode_uuid)

    def of(self, kind: type[RecordT]) -> list[RecordT]:
        """The records of one kind."""
        return [record for record in self.records if isinstance(record, kind)]
