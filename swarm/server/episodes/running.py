"""The episodes that run now: their keys, their groups, and when they are due.

Invariant: an episode is here exactly while it is claimed, and its keys open it for exactly as long; a group can be
opened while all of its episodes are here.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Sequence, ValuesView

from swarm.credentials import digest
from swarm.errors import AuthenticationError
from swarm.server.episodes.deadlines import Deadlines
from swarm.server.episodes.episode import (
    Claim,
    ClaimWish,
    Episode,
    EpisodeGroup,
    Grant,
    group_uuid_of,
    new_key,
    new_uuid,
)
from swarm.server.journal.records import EpisodeClaimed, EpisodeKeyAdded
from swarm.states import EngineState, EpisodeEvent, EpisodeState, next_episode


class RunningEpisodes:
    """Claimed episodes, oldest claim first."""

    def __init__(self) -> None:
        self._episodes: dict[str, Episode] = {}
        self._groups: dict[str, EpisodeGroup] = {}
        self.deadlines = Deadlines(self._episodes)

    def __len__(self) -> int:
        return len(self._episodes)

    def get(self, episode_uuid: str) -> Episode | None:
        return self._episodes.get(episode_uuid)

    def values(self) -> ValuesView[Episode]:
        return self._episodes.values()

    def of(self, client_uuid: str, episode_uuid: str) -> Episode | None:
        """The episode, if it runs and is this client's."""
        episode = self._episodes.get(episode_uuid)
        return episode if episode is not None and episode.client_uuid == client_uuid else None

    # ------------------------------------------------------------------ coming and going

    def begin(
        self, wish: ClaimWish, engine: EngineState, now: float, wall: float
    ) -> tuple[Grant, tuple[EpisodeClaimed, ...]]:
        """Start all the episodes of ``wish`` at ``now`` (clock) and ``wall`` (Unix): what the client gets, and what the
        journal does."""
        group_key = new_key() if wish.as_group else ""
        group_uuid = group_uuid_of(group_key) if wish.as_group else ""
        state = next_episode(EpisodeState.REGISTERED, EpisodeEvent.CLAIM, engine)
        episodes: list[Episode] = []
        claims: list[Claim] = []
        for _ in range(wish.episodes):
            key = new_key()
            claim = EpisodeClaimed(
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
            )
            kept = key if wish.claim_key else ""
            episodes.append(Episode(claim, now, now + wish.max_seconds, [claim.key_digest], kept, state))
            claims.append(Claim(claim.episode_uuid, key))
        groups: list[EpisodeGroup] = []
        if wish.as_group:
            groups.append(EpisodeGroup(tuple(episodes), [group_uuid], group_key if wish.claim_key else ""))
        self.add(episodes, groups)
        return Grant(tuple(claims), group_uuid, group_key), tuple(episode.claim for episode in episodes)

    def add(self, episodes: Iterable[Episode], groups: Iterable[EpisodeGroup]) -> None:
        """Take in claimed episodes and the groups that they form."""
        for episode in episodes:
            self._episodes[episode.episode_uuid] = episode
            self.deadlines.add(episode)
        for group in groups:
            for episode in group.members:
                episode.group = group
            for group_uuid in group.uuids:
                self._groups[group_uuid] = group

    def remove(self, episode: Episode) -> None:
        """The episode is over: its keys open nothing more, nor do its group's."""
        del self._episodes[episode.episode_uuid]
        if episode.group is not None:
            for group_uuid in episode.group.uuids:
                self._groups.pop(group_uuid, None)
            episode.group.uuids.clear()
            episode.group.key = ""

    # ------------------------------------------------------------------ keys

    def grant_again(self, episode_uuids: Sequence[str], *, as_group: bool) -> tuple[Grant, tuple[EpisodeKeyAdded, ...]]:
        """What an earlier claim got, with keys that open what of it still runs, and the keys that are new by that."""
        added: list[EpisodeKeyAdded] = []
        claims: list[Claim] = []
        for episode_uuid in episode_uuids:
            episode = self._episodes.get(episode_uuid)
            if episode is not None and not episode.key:
                # of the first key only the digest has survived the restart
                episode.key = new_key()
                episode.key_digests.append(digest(episode.key))
                added.append(EpisodeKeyAdded(episode_uuid, episode.key_digests[-1]))
            claims.append(Claim(episode_uuid, episode.key if episode is not None else new_key()))
        if not as_group:
            return Grant(tuple(claims)), tuple(added)
        first = self._episodes.get(episode_uuids[0])
        group = first.group if first is not None else None
        if group is None or not group.uuids:
            key = new_key()
        elif group.key:
            key = group.key
        else:
            key = group.key = new_key()
            group.uuids.append(group_uuid_of(key))
            self._groups[group.uuids[-1]] = group
        return Grant(tuple(claims), group_uuid_of(key), key), tuple(added)

    def open(self, episode_uuid: str, key: str) -> Episode:
        """The running episode that ``key`` opens.

        Raises:
            AuthenticationError: no such episode, a wrong key, or the episode is over.
        """
        episode = self._episodes.get(episode_uuid)
        given = digest(key)
        # an unknown episode costs the same comparison as a known one
        opens = episode.opens(given) if episode is not None else hmac.compare_digest(given, b"\0" * 32)
        if episode is None or not opens:
            raise AuthenticationError("wrong or missing episode key, or the episode is over: claim a new episode")
        return episode

    def open_group(self, group_uuid: str, key: str) -> EpisodeGroup:
        """The running group that ``key`` opens.

        Raises:
            AuthenticationError: no such group, a wrong key, or one of its episodes is over.
        """
        group = self._groups.get(group_uuid)
        if not hmac.compare_digest(group_uuid_of(key).encode(), group_uuid.encode()) or group is None:
            raise AuthenticationError("wrong or missing group key, or an episode of the group is over: claim again")
        return group
