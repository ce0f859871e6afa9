"""What a monitor shows of the server, collected from all its parts, and the lines that are pushed for it.

Invariant: looking changes nothing, and costs no more than there are running episodes. A pushed line is gone after
:data:`KEPT_SECONDS`, and there are at most :data:`MAX_LINES`, however many are pushed.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from swarm.protocol import JournalStatus, LogEntry, ReplicaStatus, RunningEpisode, ServerStatus
from swarm.server.engine.controller import Controller
from swarm.server.engine.runs import MAX_STEPS
from swarm.server.episodes.episode import Episode
from swarm.server.journal.journal import JournalStats
from swarm.server.meters import Meters

#: seconds for which a pushed line is kept, and how many lines at most
KEPT_SECONDS = 30.0
MAX_LINES = 200
#: characters of a line and of its tag
MAX_MESSAGE, MAX_TAG = 2000, 100
#: running episodes that a status lists by default
EPISODES = 100
#: How many characters of an episode's name are shown to callers that could end it: the last ones, which tell episodes
#: apart (the first ones are the time).
SHORT_UUID = 8


class VerboseLog:
    """The latest lines that a trainer or an operator pushed, oldest first.

    Args:
        wall: Unix seconds.
    """

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._lines: deque[LogEntry] = deque(maxlen=MAX_LINES)

    def push(self, tag: str, message: str) -> None:
        """Keep a line for a while, cut to :data:`MAX_MESSAGE` characters."""
        self._lines.append(LogEntry(timestamp=self._wall(), tag=tag[:MAX_TAG], message=message[:MAX_MESSAGE]))

    def entries(self) -> list[LogEntry]:
        """The lines that are still kept."""
        oldest = self._wall() - KEPT_SECONDS
        while self._lines and self._lines[0].timestamp < oldest:
            self._lines.popleft()
        return list(self._lines)


@dataclass
class Monitor:
    """The parts of one server that a monitor shows; ``journal`` is set once it is open."""

    controller: Controller
    meters: Meters
    log: VerboseLog
    replicas: Callable[[], list[ReplicaStatus]]
    journal: Callable[[], JournalStats] | None = None

    def status(self, *, steps: int = MAX_STEPS, episodes: int = EPISODES, whole_uuids: bool = True) -> ServerStatus:
        """Everything, with at most ``steps`` recent steps and ``episodes`` running ones (the longest idle first)."""
        controller, meters = self.controller, self.meters
        pool = controller.pool if controller.has_job else None
        return controller.status(steps).model_copy(
            update={
                "running": running_rows(pool.episodes, episodes, whole_uuids) if pool is not None else [],
                "longest_wait_seconds": controller.claims.longest_wait(),
                "rates": meters.rates(),
                "outcomes": dict(meters.outcomes),
                "quarantined": meters.quarantined.counts(),
                "dropped": meters.dropped.counts(),
                "clients": pool.collection.rows() if pool is not None else [],
                "replicas": self.replicas(),
                "journal": JournalStatus.model_validate(self.journal().model_dump()) if self.journal else None,
                "log": self.log.entries(),
            }
        )


def running_rows(episodes: Iterable[Episode], most: int, whole_uuids: bool) -> list[RunningEpisode]:
    """Rows of at most ``most`` episodes, the longest idle first."""
    now, wall = time.monotonic(), time.time()
    chosen = heapq.nlargest(most, episodes, key=lambda episode: idle_seconds(episode, now))
    return [
        RunningEpisode(
            episode_uuid=shown_uuid(episode.episode_uuid, whole_uuids),
            client_uuid=episode.client_uuid,
            episode_type=episode.episode_type,
            task_id=episode.claim.task_hint,
            seconds=max(0.0, wall - episode.claim.claimed_at),
            seconds_left=max(0.0, episode.cap - now),
            idle_seconds=idle_seconds(episode, now),
            idle_timeout=episode.claim.idle_timeout,
            in_flight=episode.in_flight,
            calls=len(episode.calls),
            quarantined=episode.quarantine_reason,
        )
        for episode in chosen
    ]


def idle_seconds(episode: Episode, now: float) -> float:
    """For how long the episode has had no LLM call, at monotonic time ``now``."""
    return 0.0 if episode.in_flight else max(0.0, now - episode.last_active)


def shown_uuid(episode_uuid: str, whole: bool) -> str:
    """The name of an episode as a caller may see it: who knows all of it, and its client's, may end the episode."""
    return episode_uuid if whole else episode_uuid[-SHORT_UUID:]
