"""Episodes that run: their keys, groups and deadlines, what claims ask for and get, and how episodes end.

Invariant: an episode is in :class:`RunningEpisodes` exactly while it is claimed, and its keys open it for exactly as
long (a group's key: until the first of its episodes is over). Only digests of keys are written anywhere; the key of a
claim that may be repeated stays in memory while the episode runs. What is trained of an episode are exactly its
recorded tokens, or nothing and a reason says why. The first end of an episode stands: its repetition gets the same
answer, anything else a conflict.
"""

from __future__ import annotations

import heapq
import hmac
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, ValuesView
from dataclasses import dataclass, field
from typing import NamedTuple

from swarm.concurrency import Once
from swarm.credentials import digest
from swarm.errors import AuthenticationError, ConflictError, NotFoundError, SwarmGatewayError
from swarm.protocol import EpisodeType, SwarmThrottlePolicy
from swarm.server.episodes.timelines import count_tokens, merge_calls
from swarm.server.journal.rows import EndedHow, Ending, EpisodeRow, KeyRow, RecoveredEpisode
from swarm.tokens import ModelCall, Trajectory
from swarm.types import WorkflowOutput

#: entries of ended episodes beyond which the heap of deadlines is swept, at the least
_SLACK = 64
#: seconds between two looks at an episode with a call in flight, at the least
_SOONEST = 0.01


def new_key() -> str:
    """A random key of 256 bits."""
    return "sk-swarm-" + secrets.token_urlsafe(32)


def is_one_of(key_digest: bytes, digests: Iterable[bytes]) -> bool:
    """Whether a key is one of those with ``digests``, in a time that does not depend on which."""
    # not any(...): all keys are compared, whichever fits
    return bool(sum(hmac.compare_digest(key_digest, allowed) for allowed in digests))


def new_uuid() -> str:
    """A fresh name of 128 random bits; many monitors show its beginning alone, which differs too."""
    return secrets.token_hex(16)


def group_uuid_of(key: str) -> str:
    """The uuid of the group that ``key`` opens."""
    return digest(key).hex()


@dataclass(eq=False, slots=True, weakref_slot=True)
class LiveEpisode:
    """A running episode.

    ``last_active`` and ``cap`` (the end of its wall-clock time) are in seconds of the pool's clock. ``over`` happens
    when the episode ends in whatever way, and ``over_error`` is the error for calls still in flight. ``keys`` are
    digests of the keys that open it, and ``key`` is the latest of a claim that may be repeated.
    """

    claim: EpisodeRow
    last_active: float
    cap: float
    keys: list[bytes] = field(repr=False)
    key: str = field(default="", repr=False)
    group: LiveGroup | None = None
    in_flight: int = 0
    calls: list[ModelCall] = field(default_factory=lambda: [])
    #: of an eval episode: policy version and sampled tokens of each call
    unrecorded: list[tuple[int, int]] = field(default_factory=lambda: [])
    quarantine_reason: str = ""
    #: calls that were answered with an error alone, and that their caller may repeat
    refused: int = 0
    over: Once = field(default_factory=Once)
    _why_over: Callable[[], SwarmGatewayError] | None = field(default=None, init=False, repr=False)

    @property
    def episode_uuid(self) -> str:
        return self.claim.episode_uuid

    @property
    def client_uuid(self) -> str:
        return self.claim.client_uuid

    @property
    def episode_type(self) -> EpisodeType:
        return self.claim.episode_type

    @property
    def over_error(self) -> SwarmGatewayError | None:
        """A new error for a call still in flight once the episode is over; ``None`` while it runs."""
        return None if self._why_over is None else self._why_over()

    def deadline(self) -> float:
        """When the episode is taken back: after its idle timeout (not while a call is in flight), or at its cap."""
        return self.cap if self.in_flight else min(self.cap, self.last_active + self.claim.idle_timeout)

    def finish_calls(self, error: Callable[[], SwarmGatewayError]) -> None:
        """End the calls in flight because the episode is over; ``error`` creates the error that each of them gets."""
        self.keys.clear()
        self.key = ""
        self._why_over = error
        self.over.happen()

    def trajectory(self, task_id: str, output: WorkflowOutput) -> Trajectory | str:
        """What is trained of a train episode that ends with ``output``, or why nothing is."""
        if self.quarantine_reason:
            return f"quarantined: {self.quarantine_reason}"
        timelines = merge_calls(self.calls)
        if not timelines:
            return "no completed LLM call was recorded in the episode"
        try:
            return Trajectory(
                episode_uuid=self.episode_uuid,
                task_id=task_id,
                reward=output.reward,
                credit=output.credit,
                timelines=timelines,
                num_calls=len(self.calls),
                is_success=output.is_success,
                log_metrics=output.log_metrics,
                tokens=count_tokens(self.calls, timelines),
            )
        except ValueError as exc:
            return f"invalid trajectory: {exc}"


@dataclass(eq=False)
class LiveGroup:
    """Episodes claimed together, in the order of their claim.

    The group's uuid is the digest of its key, so the key can be checked although it is not stored; a group whose claim
    was repeated after a restart has several.
    """

    members: tuple[LiveEpisode, ...]
    uuids: list[str]
    key: str = field(default="", repr=False)


class ClaimWish(NamedTuple):
    """What a client asks for: all ``episodes`` at once or none; times in seconds.

    With ``unless_batch_waits`` it does not queue up while no episode is needed, with ``while_closed`` only until the
    next batch opens. All wishes with the same client and ``claim_key`` (unless empty) get what the first one got; after
    a restart, a wish for several episodes only if they were claimed ``as_group``.
    """

    client_uuid: str
    episode_type: EpisodeType = "train"
    idle_timeout: float = 240.0
    max_seconds: float = 3600.0
    episodes: int = 1
    as_group: bool = False
    claim_key: str = ""
    throttle: SwarmThrottlePolicy | None = None
    unless_batch_waits: bool = False
    while_closed: bool = False

    @property
    def task_hint(self) -> str:
        """The task that the client claims for, if it says so; otherwise empty."""
        return (self.throttle.current_task_id if self.throttle else None) or ""


class EpisodeKey(NamedTuple):
    """What a client gets for a claimed episode; the key exists nowhere else."""

    episode_uuid: str
    key: str


class Grant(NamedTuple):
    """What one claim got: its episodes in order, and the group's address if it was claimed as a group."""

    claims: tuple[EpisodeKey, ...]
    group_uuid: str = ""
    group_key: str = ""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a claim cannot be granted now; with ``holds_place`` the claims behind it must wait as well; ``share_full``:
    its client has its share of the batch; ``closed``: until the next batch opens, by itself."""

    reason: str
    holds_place: bool = True
    share_full: bool = False
    closed: bool = False


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
            episodes.append(LiveEpisode(claim, now, now + wish.max_seconds, [claim.key_digest], kept))
            claims.append(EpisodeKey(claim.episode_uuid, key))
        for episode in episodes:
            self._add(episode)
        if wish.as_group:
            self._form(LiveGroup(tuple(episodes), [group_uuid], group_key if wish.claim_key else ""))
        self._append(*(episode.claim for episode in episodes))
        return Grant(tuple(claims), group_uuid, group_key)

    def restore(self, claimed: Iterable[RecoveredEpisode]) -> None:
        """Go on after a restart with the episodes that ran, in the order of their claims, and with the groups whose
        members all still run."""
        now, wall = self._clock(), time.time()
        members: dict[str, list[LiveEpisode]] = {}
        for recovered in claimed:
            claim = recovered.claim
            # if the clock was set back, the episode must not get more than its time
            cap = now + claim.max_seconds - max(0.0, wall - claim.claimed_at)
            keys, calls, reason = list(recovered.key_digests), list(recovered.calls), recovered.quarantine_reason
            episode = LiveEpisode(claim, now, cap, keys, calls=calls, quarantine_reason=reason)
            self._add(episode)
            if claim.group_uuid:
                members.setdefault(claim.group_uuid, []).append(episode)
        for group_uuid, group in members.items():
            if len(group) == group[0].claim.group_size:
                self._form(LiveGroup(tuple(group), [group_uuid]))

    def _add(self, episode: LiveEpisode) -> None:
        self._episodes[episode.episode_uuid] = episode
        self.deadlines.add(episode)

    def _form(self, group: LiveGroup) -> None:
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
                episode.keys.append(digest(episode.key))
                self._append(KeyRow(episode_uuid, episode.keys[-1]))
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


#: why episodes of a subject are not trained
ERASED = "its data was deleted"
#: the code of an episode that the engine's next phase deleted
DELETED = "episode_deleted"

#: how -> code, of :data:`swarm.protocol.LATE_CODES`, and words for a result that comes after it
TOO_LATE: dict[EndedHow, tuple[str, str]] = {
    "aborted": ("episode_aborted", "was aborted by its client"),
    "idle": ("episode_timed_out", "was idle for longer than its discard_episode_timeout and was taken back"),
    "capped": ("episode_expired", "ran for longer than its max_episode_seconds and was taken back"),
    "engine": (DELETED, "was deleted, because its batch left without it or another training run began"),
}


def earlier_end(ending: Ending | None, client_uuid: str, episode_uuid: str, end_key: str) -> Ending:
    """The earlier ending of an episode, if this end repeats it.

    Raises:
        NotFoundError: the episode is unknown or another client's.
        ConflictError: it ended otherwise; says precisely what happened.
    """
    if ending is None or ending.client_uuid != client_uuid:
        raise unknown_error(episode_uuid)
    if ending.how == "ended":
        if end_key and ending.end_key and end_key != ending.end_key:
            raise ConflictError(
                f"episode {episode_uuid} was ended by another call: this result comes too late and is not counted",
                code="episode_ended",
            )
        return ending
    if ending.drop_reason == ERASED:
        # the end that was answered so gave it up
        return ending
    code, words = TOO_LATE[ending.how]
    raise ConflictError(f"episode {episode_uuid} {words}: its result came too late and is not counted", code=code)


def over_error(how: EndedHow, episode_uuid: str) -> ConflictError:
    """For a call of an episode that is over, by whoever had its key."""
    code, words = ("episode_ended", "has ended") if how == "ended" else TOO_LATE[how]
    return ConflictError(f"episode {episode_uuid} {words}: it takes no more calls, claim a new one", code=code)


def unknown_error(episode_uuid: str) -> NotFoundError:
    return NotFoundError(f"episode {episode_uuid} does not exist or is not yours", code="episode_not_found")
