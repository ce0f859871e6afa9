"""One episode as the server keeps it, groups of episodes, what claims ask for and get, and how episodes end.

Invariant: a key opens nothing once its episode is over (a group's key: once the first of its episodes is). Only digests
of keys are written anywhere; the key of a claim that may be repeated stays in memory while the episode runs. What is
trained of an episode are exactly its recorded tokens, or nothing and a reason says why. The first end of an episode
stands: its repetition gets the same answer, anything else a conflict.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from swarm.concurrency import Once
from swarm.credentials import digest
from swarm.errors import ConflictError, NotFoundError, SwarmGatewayError
from swarm.protocol import EpisodeType, SwarmThrottlePolicy
from swarm.server.episodes.timelines import count_tokens, merge_calls
from swarm.server.journal.rows import EndedHow, Ending, EpisodeRow
from swarm.states import EpisodeState
from swarm.tokens import ModelCall, Trajectory
from swarm.types import WorkflowOutput


def new_key() -> str:
    """A random key of 256 bits."""
    return "sk-swarm-" + secrets.token_urlsafe(32)


def is_one_of(key_digest: bytes, digests: Iterable[bytes]) -> bool:
    """Whether a key is one of those with ``digests``, in a time that does not depend on which."""
    # not any(...): all keys are compared, whichever fits
    return bool(sum(hmac.compare_digest(key_digest, allowed) for allowed in digests))


@dataclass(eq=False, slots=True, weakref_slot=True)
class LiveEpisode:
    """A running episode.

    ``last_active`` and ``cap`` (the end of its wall-clock time) are in seconds of the pool's clock. ``over`` happens
    when the episode ends in whatever way, and ``over_error`` is the error for calls still in flight.
    """

    claim: EpisodeRow
    last_active: float
    cap: float
    key_digests: list[bytes] = field(repr=False)
    key: str = field(default="", repr=False)
    state: EpisodeState = EpisodeState.REGISTERED
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
        self.key_digests.clear()
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


def new_uuid() -> str:
    """A fresh name of 128 random bits; many monitors show its beginning alone, which differs too."""
    return secrets.token_hex(16)


def group_uuid_of(key: str) -> str:
    """The uuid of the group that ``key`` opens."""
    return digest(key).hex()


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
