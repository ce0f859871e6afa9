"""How episodes are claimed and claims throttled: one logical claim, many long polls, one idempotency key.

Invariant: all polls and retries of a claim carry the same key, so a claim whose answer was lost gets the episodes that
were granted to it, and no others. Episodes granted to a claim that nobody waits for any more are handed back.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

from pydantic import ConfigDict

from swarm.client import wire
from swarm.client.calls import Calls, UnsentError
from swarm.concurrency import Background, Interruptible
from swarm.errors import RequestError, StateError, UnavailableError
from swarm.protocol import (
    BATCH_WAITS,
    LONG_POLL,
    MAX_SECONDS,
    NO_EPISODES,
    POST_ROLLING,
    SYNCING,
    THROTTLED,
    TRAINED_OUT,
    TRAINER_AWAY,
    TRAINING_WAITS,
    ClaimEpisodeRequest,
    ClaimEpisodeResponse,
    ClaimGroupRequest,
    ClaimGroupResponse,
    EpisodeType,
    SuccessResponse,
    SwarmThrottlePolicy,
    WithdrawClaimRequest,
)
from swarm.states import EngineState

logger = logging.getLogger(__name__)

ClaimAnswer = ClaimEpisodeResponse | ClaimGroupResponse

#: A claim gives up early when the engine has been OFFLINE this long: nothing will come by itself.
OFFLINE_GRACE = 5.0
#: An episode may last this many idle timeouts, unless the caller sets ``max_episode_seconds``.
LIFE = 8.0

#: The first phrase that is found counts: a throttled claim is without an episode, too.
_PHRASE_CODES = {
    BATCH_WAITS: "batch_waits",
    TRAINING_WAITS: "batch_waits",
    TRAINED_OUT: "batch_waits",
    TRAINER_AWAY: "trainer_away",
    SYNCING: "engine_syncing",
    POST_ROLLING: "engine_post_rolling",
    THROTTLED: "throttled",
    NO_EPISODES: "no_episodes",
}
#: While vLLM serves, but no train episode is needed, or none of this client.
NO_EPISODE_NEEDED = frozenset({"batch_waits", "trainer_away", "throttled"})
_STATE_CODES = {
    EngineState.OFFLINE: "engine_offline",
    EngineState.BOOTING: "engine_booting",
    EngineState.WEIGHT_SYNCING: "engine_syncing",
    EngineState.ROLLING_POST: "engine_post_rolling",
}


@dataclass(frozen=True)
class ThrottleSchedule:
    """A throttle policy whose ratio depends on the training step.

    Args:
        ratios: a function from the step to the ratio, or steps with the ratio from each on, e.g.
            ``[(0, 0.8), (100, 0.4)]``; before the first of them, the first ratio holds.
        expected_batch_size: tasks per batch; default the job's.
        expected_num_repeat: episodes per task; default the job's.
        current_task_id: the task that the next episode is for; see :meth:`for_task`.

    Raises:
        RequestError: no ratios, or steps that do not rise.
    """

    ratios: Callable[[int], float] | Sequence[tuple[int, float]]
    expected_batch_size: int | None = None
    expected_num_repeat: int | None = None
    current_task_id: str | None = None

    def __post_init__(self) -> None:
        if callable(self.ratios):
            return
        steps = [step for step, _ in self.ratios]
        if not steps or any(later <= earlier for earlier, later in itertools.pairwise(steps)):
            raise RequestError("a ratio schedule is a list of (step, ratio) with rising steps", param="ratios")

    def for_task(self, task_id: str) -> ThrottleSchedule:
        """The same schedule for an episode of this task: one already begun is never delayed."""
        return replace(self, current_task_id=task_id)

    def at(self, step: int) -> SwarmThrottlePolicy:
        """The policy of a training step.

        Raises:
            RequestError: the ratio is no positive number.
        """
        fields = {
            "ratio": self._ratio(step),
            "expected_batch_size": self.expected_batch_size,
            "expected_num_repeat": self.expected_num_repeat,
            "current_task_id": self.current_task_id,
        }
        return wire.checked(SwarmThrottlePolicy, fields)

    def _ratio(self, step: int) -> float:
        if callable(self.ratios):
            return self.ratios(step)
        return next((ratio for begin, ratio in reversed(self.ratios) if begin <= step), self.ratios[0][1])


#: How a claim may be throttled: one policy, a policy that follows the step, or a policy's fields.
Throttle = SwarmThrottlePolicy | ThrottleSchedule | Mapping[str, Any]


class _OurThrottle(SwarmThrottlePolicy):
    """What a caller here misspells is no field of a foreign client."""

    model_config = ConfigDict(extra="forbid")


def as_policy(throttle: Throttle | None, task_id: str | None = None) -> SwarmThrottlePolicy | ThrottleSchedule | None:
    """``throttle`` with its fields checked, for an episode of the task ``task_id`` if one is named.

    Raises:
        RequestError: a field is out of range, or there is no such field.
    """
    policy = wire.checked(_OurThrottle, throttle) if isinstance(throttle, Mapping) else throttle
    if policy is None or task_id is None:
        return policy
    if isinstance(policy, ThrottleSchedule):
        return policy.for_task(task_id)
    return policy.model_copy(update={"current_task_id": task_id})


@dataclass(frozen=True)
class Claim:
    """A claim of ``count`` episodes at once, or of one by ``/claim_episode`` if it is ``None``.

    Times are in seconds. A claim with the ``idempotency_key`` of an earlier one, after a crash say, gets the episodes
    of that one.
    """

    count: int | None
    wait_seconds: float
    episode_type: EpisodeType
    discard_episode_timeout: float
    max_episode_seconds: float | None = None
    throttle: Throttle | None = None
    idempotency_key: str | None = None
    unless_batch_waits: bool = False


class UserRun:
    """User code under way: the episodes of ``client`` that it has begun and not ended, and the claims that wait.

    A context variable names the run, so each thread and task has its own, and a call that a thread makes on the event
    loop counts for the thread's run.
    """

    def __init__(self, client: object) -> None:
        self.client = client
        self.loop = asyncio.get_running_loop()
        self.episodes: set[str] = set()
        self._claims: set[Interruptible] = set()
        self._stopped = False

    def stop(self) -> None:
        """End the claims that wait, at whichever client, and those to come."""
        self._stopped = True
        for claim in tuple(self._claims):
            claim.interrupt(_run_stopped())

    @contextmanager
    def claiming(self) -> Generator[None]:
        """The block waits for a claim.

        Raises:
            UnavailableError: ``run_stopped``.
        """
        if self._stopped:
            raise _run_stopped()
        with Interruptible() as claim:
            self._claims.add(claim)
            try:
                yield
            finally:
                self._claims.discard(claim)


current_run: ContextVar[UserRun | None] = ContextVar("run", default=None)


def _run_stopped() -> UnavailableError:
    return UnavailableError("the run that this episode is part of is being stopped", code="run_stopped")


def note_ended(episode_uuids: Iterable[str]) -> None:
    """Tell the current run, if there is one, that these episodes have ended."""
    if (run := current_run.get()) is not None:
        run.episodes.difference_update(episode_uuids)


class Claimer:
    """Claims episodes for one client.

    Args:
        calls: the client's.
        background: for work that is done although nobody waits for it.
    """

    def __init__(self, calls: Calls, background: Background) -> None:
        self._calls = calls
        self._background = background
        self._waiting: set[asyncio.Future[ClaimAnswer]] = set()
        #: why claims waited at the last answer; empty: they did not
        self._waits_for = ""

    async def give_up(self) -> None:
        """End the claims that wait, with :class:`StateError`: the client is being closed."""
        for waiting in (ended := tuple(self._waiting)):
            waiting.cancel()
        if ended:
            # an answer that came just now is handed back before the connections are closed
            await asyncio.wait(ended)

    async def claim(self, wanted: Claim) -> wire.EpisodeGroup:
        """Claim episodes within ``wanted.wait_seconds``.

        Raises:
            UnavailableError: none in time; ``code`` says why.
            RequestError: the server refuses the request itself.
            StateError: the client is closed.
        """
        calls = self._calls
        deadline = monotonic() + wanted.wait_seconds
        key = wanted.idempotency_key or uuid.uuid4().hex
        throttle = as_policy(wanted.throttle)
        offline_since: float | None = None
        early = 0
        while True:
            policy = throttle
            if isinstance(policy, ThrottleSchedule):
                policy = policy.at((await calls.perform(wire.ENGINE_STATUS, deadline=deadline)).global_step)
            began = monotonic()
            poll = min(LONG_POLL, max(0.0, deadline - began))
            answer = await self._poll(_call(calls.client_uuid, wanted, poll, policy, key), wanted, deadline, key)
            if answer.success:
                self._waits_for = ""
                return wire.episodes_of(answer, calls.server_url)
            code = await self._code_of(answer.fail_cause, deadline)
            if code != self._waits_for:
                # of many claims that wait for one thing, one line
                logger.info("waiting for episodes of %s: %s", calls.server_url, answer.fail_cause or code)
                self._waits_for = code
            now = monotonic()
            offline_since = (offline_since or began) if code == "engine_offline" else None
            offline = now - offline_since if offline_since is not None else -1.0
            refused = wanted.unless_batch_waits and code in NO_EPISODE_NEEDED
            if now >= deadline or offline >= OFFLINE_GRACE or refused:
                what = "an episode" if wanted.count is None else f"{wanted.count} episodes"
                within = f"and gave up after {offline:.0f} s" if now < deadline else f"within {wanted.wait_seconds:g} s"
                raise UnavailableError(f"could not claim {what} {within}: {answer.fail_cause or code}", code=code)
            early = early + 1 if now - began < poll / 2 else 0
            await calls.pause_between_polls(early, deadline - now)

    async def _poll(self, call: wire.Call[ClaimAnswer], wanted: Claim, deadline: float, key: str) -> ClaimAnswer:
        """One poll. It goes on in the background when the caller is cancelled: the server may be granting just now."""
        calls = self._calls
        abandoned = False

        def stop_if_abandoned() -> None:
            if abandoned:
                raise asyncio.CancelledError

        polling = self._background.start(calls.perform(call, deadline=deadline, on_retry=stop_if_abandoned))
        waiting = asyncio.shield(polling)
        self._waiting.add(waiting)
        # the server forgets the claim at once, so that those behind it in the queue are next
        body = WithdrawClaimRequest(client_uuid=calls.client_uuid, idempotency_key=key)
        withdraw = wire.Call("POST", "/withdraw_claim", SuccessResponse, body)
        try:
            answer = await waiting
        except asyncio.CancelledError:
            abandoned = True
            if wanted.idempotency_key is None:
                polling.add_done_callback(self._hand_back)
                if not polling.done():
                    self._background.start(calls.release(withdraw))
            task = asyncio.current_task()
            if calls.closing and task is not None and not task.cancelling():
                raise StateError("this client is closed") from None
            raise
        except UnavailableError as exc:
            if wanted.idempotency_key is None and not isinstance(exc, UnsentError):
                # it may have been granted, and nobody will repeat the claim
                self._background.start(calls.release(withdraw))
            raise
        finally:
            self._waiting.discard(waiting)
        if calls.closing:
            if wanted.idempotency_key is None:
                self._hand_back(polling)
            raise StateError("this client is closed")
        return answer

    def _hand_back(self, polling: asyncio.Task[ClaimAnswer]) -> None:
        if polling.cancelled() or polling.exception() is not None:
            return
        answer = polling.result()
        for episode in wire.episodes_of(answer, self._calls.server_url) if answer.success else ():
            self._background.start(self._calls.release(wire.abort_call(self._calls.client_uuid, episode.episode_uuid)))

    async def _code_of(self, cause: str, deadline: float) -> str:
        for phrase, code in _PHRASE_CODES.items():
            if phrase in cause:
                return code
        status = await self._calls.perform(wire.ENGINE_STATUS, deadline=deadline)
        return _STATE_CODES.get(status.engine_status, "not_ready")


def _call(
    client_uuid: str, wanted: Claim, poll: float, policy: SwarmThrottlePolicy | None, key: str
) -> wire.Call[ClaimEpisodeResponse] | wire.Call[ClaimGroupResponse]:
    fields: dict[str, Any] = {
        "client_uuid": client_uuid,
        "episode_type": wanted.episode_type,
        "discard_episode_timeout": wanted.discard_episode_timeout,
        "max_episode_seconds": min(MAX_SECONDS, LIFE * wanted.discard_episode_timeout)
        if wanted.max_episode_seconds is None
        else wanted.max_episode_seconds,
        "throttle_policy": policy,
        "wait_seconds": poll,
        "unless_batch_waits": wanted.unless_batch_waits,
        "idempotency_key": key,
    }
    timeout = poll + wire.WAIT_GRACE
    if wanted.count is None:
        body = wire.checked(ClaimEpisodeRequest, fields)
        return wire.Call("POST", "/claim_episode", ClaimEpisodeResponse, body, timeout)
    many = wire.checked(ClaimGroupRequest, fields | {"count": wanted.count})
    return wire.Call("POST", "/claim_group", ClaimGroupResponse, many, timeout)
