"""Open groups: scored and not yet submitted, because feedback or the end of a session may still count.

Invariant: an open group keeps nobody waiting. It holds its episodes, so it is closed early when a claim finds none
free, when too many are open (half of the job's slots), when a weight sync would cost it its training, and at shutdown.
Where episodes run between steps only, each sync does: it waits for running episodes, and deletes them. Else the
``max_staleness``th does: after one more the answers would be too old to be trained.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress

from swarm.client import AsyncSwarmClient
from swarm.concurrency import Signal
from swarm.states import EngineState
from swarm.status import ServerStatus


class Hold:
    """How long one group stays open; ``until`` is on the event loop's clock. ``began`` is the number of weight syncs
    until then, as far as it is known."""

    def __init__(self, until: float) -> None:
        self.until = until
        self.why = ""
        self.began: int | None = None
        self._changed = Signal()

    def shorten(self, until: float) -> None:
        """Close the group earlier."""
        self.until = until
        self._changed.notify()

    def release(self, why: str) -> None:
        """Close the group now, whatever ``until`` says; the first reason stands."""
        self.why = self.why or why
        self._changed.notify()

    async def over(self) -> None:
        """Return when ``until`` has passed, or at the release."""
        loop = asyncio.get_running_loop()
        while not self.why and self.until > loop.time():
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self.until):
                    await self._changed.wait()


class OpenGroups:
    """The open groups of one swarm server, oldest first.

    Attributes:
        held: the open groups.
        closed: how many groups were closed, by why: ``window`` (nothing closed it early), ``room``, ``limit``,
            ``sync``, ``shutdown``.
    """

    def __init__(self, client: AsyncSwarmClient) -> None:
        self._client = client
        self.held: dict[Hold, None] = {}
        self._watch: asyncio.Task[None] | None = None
        self._rolling = True
        self._limit: int | None = None
        self._syncs: int | None = None
        self._over = False
        self.closed: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self.held)

    async def keep(self, hold: Hold) -> None:
        """Return when the group of ``hold`` is to be submitted."""
        self.held[hold] = None
        hold.began = self._syncs
        try:
            if self._over:
                hold.release("shutdown")
            elif not self._rolling:
                hold.release("sync")
            elif self._watch is None:
                watch = self._client.engine.watch(self._observe)
                self._watch = asyncio.create_task(watch, name="watching the engine for open groups")
            self._trim()
            await hold.over()
        finally:
            del self.held[hold]
            self.closed[hold.why or "window"] += 1
            if not self.held:
                self._stop_watching()

    def make_room(self, groups: int = 1) -> None:
        """Close the oldest ``groups``: a request waits for episodes, and these are free once they are submitted."""
        self._release_oldest(groups, "room")

    def close(self) -> None:
        """Close all, and keep none open from now on."""
        self._over = True
        self._release_oldest(len(self.held), "shutdown")

    def _trim(self) -> None:
        if self._limit is not None:
            self._release_oldest(len(self.held) - self._limit, "limit")

    def _release_oldest(self, count: int, why: str) -> None:
        for hold in [hold for hold in self.held if not hold.why][: max(0, count)]:
            hold.release(why)

    async def _observe(self, status: ServerStatus) -> None:
        state, always, job = status.engine.engine_status, status.serving == "always", status.job
        self._rolling = state is EngineState.ROLLING or (always and state is EngineState.WEIGHT_SYNCING)
        self._syncs = status.weight_syncs
        if not self._rolling:
            self._release_oldest(len(self.held), "sync")
        if job is None:
            return
        self._limit = max(1, job.slots // job.num_repeat // 2)
        for hold in self.held:
            if hold.began is None:
                hold.began = self._syncs
            elif always and job.max_staleness is not None and self._syncs - hold.began >= job.max_staleness:
                hold.release("sync")
        self._trim()

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        self._syncs = None
        self._rolling = True
