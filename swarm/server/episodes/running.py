"""The episodes that run now: their keys, their groups, and their deadlines.

Invariant: an episode is here exactly while it is claimed, and its keys open it for exactly as long; a group can be
opened while all of its episodes are here.
"""

from __future__ import annotations

import heapq
import hmac
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, ValuesView

from swarm.credentials import digest
from swarm.errors import AuthenticationError
from swarm.server.episodes.episode import (
    ClaimWish,
    EpisodeKey,
    Grant,
    LiveEpisode,
    LiveGroup,
    group_uuid_of,
    is_one_of,
    new_key,
    new_uuid,
)
from swarm.server.journal.rows import EpisodeRow, KeyRow
from swarm.states import EpisodeEvent, EpisodeState, next_episode

#: entries of ended episodes beyond which the heap is swept, at the least
_SLACK = 64
#: seconds between two looks at an episode with a call in flight, at the least
_SOONEST = 0.01


class Deadlines:
    """Deadlines of the episodes in ``running``, in seconds of the pool's clock: a heap whose entries move lazily.

    Each running episode has exactly one entry, never later than its deadline; so a claim costs one push, and a call or
    an end costs nothing.
    """

    def __init__(self, running: Mapping[str, LiveEpisode]) -> None:
        self._running = running
        self._heap: list[tuple[float, str]] = []

    def add(self, episode: LiveEpisode) -> None:
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

    def due(self, now: float) -> list[LiveEpisode]:
        """The episodes whose deadline is not after ``now``; the caller must end them."""
        due: list[LiveEpisode] = []
        while (first := self.next()) is not None and first <= now:
            _, episode_uuid = heapq.heappop(self._heap)
            episode = self._running[episode_uuid]
            if (deadline := episode.deadline()) > now and episode.in_flight:
                # the call may end at any moment, and the idle time begins then
                deadline = min(deadline, now + max(episode.claim.idle_timeout, _SOONEST))
            if deadline <= now:
                due.append(episode)
            else:
                heapq.heappush(self._heap, (deadline, episode_uuid))
        return due


class RunningEpisodes:
    """Claimed episodes, oldest claim first; the arguments are as for the pool."""

    def __init__(self, append: Callable[..., None], clock: Callable[[], float]) -> None:
        self._append, self._clock = append, clock
        self._episodes: dict[str, LiveEpisode] = {}
        self._groups: dict[str, LiveGroup] = {}
        self.deadlines = Deadlines(self._episodes)

    def __len__(self) -> int:
        return len(self._episodes)

    def get(self, episode_uuid: str) -> LiveEpisode | None:
        return self._episodes.get(episode_uuid)

    def values(self) -> ValuesView[LiveEpisode]:
        return self._episodes.values()

    def of(self, client_uuid: str, episode_uuid: str) -> LiveEpisode | None:
        """The episode, if it runs and is this client's."""
        episode = self._episodes.get(episode_uuid)
        return episode if episode is not None and episode.client_uuid == client_uuid else None

    # ------------------------------------------------------------------ coming and going

    def begin(self, wish: ClaimWish, run_id: str) -> Grant:
        """Start all episodes of ``wish``."""
        now, wall = self._clock(), time.time()
        group_key = new_key() if wish.as_group else ""
        group_uuid = group_uuid_of(group_key) if group_key else ""
        state = next_episode(EpisodeState.REGISTERED, EpisodeEvent.CLAIM)
        episodes: list[LiveEpisode] = []
        claims: list[EpisodeKey] = []
        for _ in range(wish.episodes):
            key = new_key()
            claim = EpisodeRow(
                episode_uuid=new_uuid(),
                client_uuid=wish.client_uuid,
                episode_type=wish.episode_type,
                key_digest=digest(key),
                idle_timeout=wish.idle_timeout,
                max_seconds=wish.max_seconds,
                claimed_at=wall,
                claim_key=wish.claim_key,
                task_hint=wish.task_hint,
                group_uuid=group_uuid,
                group_size=wish.episodes,
                run_id=run_id,
            )
            kept = key if wish.claim_key else ""
            episodes.append(LiveEpisode(claim, now, now + wish.max_seconds, [claim.key_digest], kept, state))
            claims.append(EpisodeKey(claim.episode_uuid, key))
        group = LiveGroup(tuple(episodes), [group_uuid], group_key if wish.claim_key else "")
        self.add(episodes, [group] if wish.as_group else [])
        self._append(*(episode.claim for episode in episodes))
        return Grant(tuple(claims), group_uuid, group_key)

    def add(self, episodes: Iterable[LiveEpisode], groups: Iterable[LiveGroup]) -> None:
        """Take in claimed episodes and the groups that they form."""
        for episode in episodes:
            self._episodes[episode.episode_uuid] = episode
            self.deadlines.add(episode)
        for group in groups:
            for episode in group.members:
                episode.group = group
            for group_uuid in group.uuids:
                self._groups[group_uuid] = group

    def remove(self, episode: LiveEpisode) -> None:
        """Forget an episode that is over: neither its keys nor its group's open anything from now on."""
        del self._episodes[episode.episode_uuid]
        if episode.group is not None:
            for group_uuid in episode.group.uuids:
                self._groups.pop(group_uuid, None)
            episode.group.uuids.clear()
            episode.group.key = ""

    # ------------------------------------------------------------------ keys

    def grant_again(self, episode_uuids: Sequence[str], *, as_group: bool) -> Grant:
        """What an earlier claim got, with keys that open the episodes that still run."""
        claims: list[EpisodeKey] = []
        for episode_uuid in episode_uuids:
            episode = self._episodes.get(episode_uuid)
            if episode is not None and not episode.key:
                # only the digest of the first key survived the restart
                episode.key = new_key()
                episode.key_digests.append(digest(episode.key))
                self._append(KeyRow(episode_uuid, episode.key_digests[-1]))
            claims.append(EpisodeKey(episode_uuid, episode.key if episode is not None else new_key()))
        if not as_group:
            return Grant(tuple(claims))
        first = self._episodes.get(episode_uuids[0])
        group = first.group if first is not None else None
        key = (group.key if group is not None else "") or new_key()
        if group is not None and group.uuids and not group.key:
            group.key = key
            group.uuids.append(group_uuid_of(key))
            self._groups[group.uuids[-1]] = group
        return Grant(tuple(claims), group_uuid_of(key), key)

    def open(self, episode_uuid: str, key: str) -> LiveEpisode:
        """The running episode that ``key`` opens; that is a sign of life even if no engine can serve the call.

        Raises:
            AuthenticationError: no such episode, a wrong key, or the episode is over.
        """
        episode = self._episodes.get(episode_uuid)
        key_digest = digest(key)
        # an unknown episode costs the same comparison as a known one
        opens = is_one_of(key_digest, [b"\0" * 32] if episode is None else episode.key_digests)
        if episode is None or not opens:
            raise AuthenticationError("wrong or missing episode key, or the episode is over: claim a new episode")
        self.touch(episode)
        return episode

    def touch(self, episode: LiveEpisode) -> None:
        """The episode gave a sign of life."""
        episode.last_active = self._clock()

    def open_group(self, group_uuid: str, key: str) -> LiveGroup:
        """The running group that ``key`` opens; all its episodes run, and show a sign of life.

        Raises:
            AuthenticationError: no such group, a wrong key, or one of its episodes is over.
        """
        group = self._groups.get(group_uuid)
        if not hmac.compare_digest(group_uuid_of(key).encode(), group_uuid.encode()) or group is None:
            raise AuthenticationError("wrong or missing group key, or an episode of the group is over: claim again")
        now = self._clock()
        for episode in group.members:
            episode.last_active = now
        return group
