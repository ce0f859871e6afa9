"""When running episodes are to be taken back: a heap whose entries move lazily.

Invariant: each running episode has exactly one entry, never later than its deadline; so a claim costs one push
and a call or an end costs nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from swarm.server.episodes.episode import Episode

#: entries of ended episodes beyond which the heap is swept, at the least
_SLACK = 64
#: an episode with a call in flight is not looked at more often, in seconds
_SOONEST = 0.01


class Deadlines:
    """Deadlines of the episodes in ``running``, in seconds of the clock that made them."""

    def __init__(self, running: Mapping[str, Episode]) -> None:
        self._running = running
        self._heap: list[tuple[float, str]] = []

    def add(self, episode: Episode) -> None:
        """Watch an episode that has just begun to run."""
        if len(self._heap) > 2 * len(self._running) + _SLACK:
            self._heap = [entry for entry in self._heap if entry[1] in self._running]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (episode.deadline(), episode.episode_uuid))

    def next(self) -> float | None:
        """The earliest moment at which an episode may be due; ``None`` when none runs."""
        while self._heap and self._heap[0][1] not in self._running:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> list[Episode]:
        """The episodes whose deadline is not after ``now``; it is for the caller to end them."""
        due: list[Episode] = []
        while (first := self.next()) is not None and first <= now:
            _, episode_uuid = heapq.heappop(self._heap)
            episode = self._running[episode_uuid]
            if (deadline := episode.deadline()) > now and episode.in_flight:
                # the call may end in the next moment, and the idle time begins then
                deadline = min(deadline, now + max(episode.claim.idle_timeout, _SOONEST))
            if deadline <= now:
                due.append(episode)
            else:
                heapq.heappush(self._heap, (deadline, episode_uuid))
        return due
