"""What a server needs of its journal, and how it comes back from one.

Invariant: a pool that was recovered holds what the one before held: its waiting and outstanding episodes, its claimed
ones with their keys and calls, its counts, and what it remembers of ends. Idle time starts anew, wall-clock time goes
on.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from swarm.errors import ConfigError
from swarm.job import TrainJob, parse_job
from swarm.server.episodes.episode import Episode, EpisodeGroup
from swarm.server.episodes.pool import EpisodePool
from swarm.server.journal.journal import OnDisk
from swarm.server.journal.rows import ClaimedEpisode, Ending, Recovered, Row
from swarm.states import EpisodeState
from swarm.types import StepResult


class JournalPort(Protocol):
    """See :class:`swarm.server.journal.journal.Journal`."""

    @property
    def pending(self) -> int: ...

    def recover(self) -> Recovered: ...

    def append(self, *rows: Row) -> None: ...

    def on_disk(self, told: OnDisk) -> None: ...

    async def synced(self) -> None: ...

    async def past_ending(self, episode_uuid: str) -> Ending | None: ...


@dataclass(frozen=True, slots=True)
class Before:
    """How the server before stood; ``job`` and ``pool`` are ``None`` if it never had a job."""

    run_id: str
    stopped: bool
    job: TrainJob | None
    pool: EpisodePool | None
    steps: list[StepResult]
    claims: Mapping[tuple[str, str], list[str]]


def recover(journal: JournalPort, client_timeout: float) -> Before:
    """Read ``journal``, to which nothing has been appended yet.

    Raises:
        ConfigError: it is damaged, or its job is one that this version cannot read.
    """
    recovered = journal.recover()
    job = pool = None
    if recovered.job_yaml:
        try:
            job = parse_job(recovered.job_yaml, "the job in the journal")
        except ConfigError as exc:
            raise ConfigError(f"{exc.message}; go back to the version that wrote it, or use another run_dir") from exc
        pool = EpisodePool(job, journal.append, client_timeout)
        now, wall = time.monotonic(), time.time()
        episodes = [_revive(claimed, now, wall) for claimed in recovered.claimed]
        pool.restore(recovered, episodes, _groups(episodes))
    return Before(recovered.run_id, recovered.stopped, job, pool, recovered.steps, recovered.claims)


def _revive(claimed: ClaimedEpisode, now: float, wall: float) -> Episode:
    claim = claimed.claim
    # a clock that was set back must not give an episode more than its time
    used = max(0.0, wall - claim.claimed_at)
    return Episode(
        claim,
        last_active=now,
        cap=now + claim.max_seconds - used,
        key_digests=list(claimed.key_digests),
        state=EpisodeState.CLAIMED,
        calls=list(claimed.calls),
        quarantine_reason=claimed.quarantine_reason,
    )


def _groups(episodes: Iterable[Episode]) -> list[EpisodeGroup]:
    """The groups of which every member still runs."""
    members: dict[str, list[Episode]] = {}
    for episode in episodes:
        if episode.claim.group_uuid:
            members.setdefault(episode.claim.group_uuid, []).append(episode)
    return [
        EpisodeGroup(tuple(group), [group_uuid])
        for group_uuid, group in members.items()
        if len(group) == group[0].claim.group_size
    ]
