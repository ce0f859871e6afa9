"""What a monitor shows of the server, put together from all its parts.

Invariant: looking changes nothing, and costs at most as much as there are running episodes.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from swarm.protocol import JournalStatus, ReplicaStatus, RunningEpisode, ServerStatus
from swarm.server.engine.controller import Controller
from swarm.server.engine.runs import MAX_STEPS
from swarm.server.engine.verbose import VerboseLog
from swarm.server.episodes.episode import Episode
from swarm.server.journal.journal import JournalStats
from swarm.server.meters import Meters

#: running episodes that a status tells of unless it is asked for another number
EPISODES = 100
#: How much of an episode's name is shown to callers that might end it: enough to tell episodes apart. Of its end: it
#: begins with the time, which those of the same minute share.
SHORT_UUID = 8


@dataclass
class Monitor:
    """The parts of one server, as far as a monitor looks at them; ``journal`` is set once it is open."""

    controller: Controller
    meters: Meters
    log: VerboseLog
    replicas: Callable[[], list[ReplicaStatus]]
    journal: Callable[[], JournalStats] | None = None

    def status(self, *, steps: int = MAX_STEPS, episodes: int = EPISODES, whole_uuids: bool = True) -> ServerStatus:
        """Everything, with at most so many recent ``steps`` and running ``episodes`` (those idle for longest)."""
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
    """Rows of the ``most`` episodes that have been idle for longest."""
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
    """How long the episode has had no LLM call, at ``now`` of the monotonic clock."""
    return 0.0 if episode.in_flight else max(0.0, now - episode.last_active)


def shown_uuid(episode_uuid: str, whole: bool) -> str:
    """The name of an episode as a caller may see it: whoever knows all of it, and its client's, may end it."""
    return episode_uuid if whole else episode_uuid[-SHORT_UUID:]
