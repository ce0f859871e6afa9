"""How episodes are claimed and claims throttled: one logical claim, many long polls, one idempotency key.

Invariant: all polls and retries of a claim carry the same key, so a claim whose answer was lost gets the episodes that
were granted to it, and no others. A claim that nobody waits for any more is withdrawn, with what it was granted.
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
from swarm.concurrency import Background, Interruptible, Signal
from swarm.errors import RequestError, StateError, SwarmGatewayError, UnavailableError
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
    if throttle is None:
        return None
    if isinstance(throttle, ThrottleSchedule):
        return throttle if task_id is None else throttle.for_task(task_id)
    policy = throttle if isinstance(throttle, SwarmThrottlePolicy) else wire.checked(_OurThrottle, throttle)
    return policy if task_id is None else policy.model_copy(update={"current_task_id": task_id})


class OpenClaims:
    """Claims that wait, until somebody ends them; those that begin later end at once."""

    def __init__(self) -> None:
        self._waiting: set[Interruptible] = set()
        self._left = Signal()
        self._error: Callable[[], SwarmGatewayError] | None = None

    @contextmanager
    def waiting(self) -> Generator[None]:
        """The block waits for a claim, and raises the error of :meth:`end`."""
        if self._error is not None:
            raise self._error()
        with Interruptible() as claim:
            self._waiting.add(claim)
            try:
                yield
            finally:
                self._waiting.discard(claim)
                self._left.notify()

    def end(self, error: Callable[[], SwarmGatewayError]) -> None:
        """End all, each with an ``error`` of its own."""
        self._error = error
        for claim in tuple(self._waiting):
            claim.interrupt(error())

    async def over(self) -> None:
        """Return once none waits."""
        await self._left.until(lambda: not self._waiting)


class UserRun:
    """User code under way: the episodes of ``client`` that it has begun and not ended, and its claims, at whichever
    client.

    A context variable names the run, so each thread and task has its own, and a call that a thread makes on the event
    loop counts for the thread's run.
    """

    def __init__(self, client: object) -> None:
        self.client = client
        self.loop = asyncio.get_running_loop()
        self.episodes: set[str] = set()
        self.claims = OpenClaims()

    def stop(self) -> None:
        """End its claims with the code ``run_stopped``."""
        stopped = "the run that this episode is part of is being stopped"
        self.claims.end(lambda: UnavailableError(stopped, code="run_stopped"))


current_run: ContextVar[UserRun | None] = ContextVar("run", default=None)


def note_ended(episode_uuids: Iterable[str]) -> None:
    """Tell the current run, if there is one, that these episodes have ended."""
    if (run := current_run.get()) is not None:
        run.episodes.difference_update(episode_uuids)


class Claimer:
    """Claims episodes for one client.

    Args:
        calls: the client's.
        background: for withdrawals.
    """

    def __init__(self, calls: Calls, background: Background) -> None:
        self._calls = calls
        self._background = background
        self._claims = OpenClaims()
        #: why claims waited at the last answer; empty: they did not
        self._waits_for = ""

    async def give_up(self) -> None:
        """End the claims that wait, with :class:`StateError`: the client is being closed."""
        self._claims.end(lambda: StateError("this client is closed"))
        # their withdrawals begin before the connections are closed
        await self._claims.over()

    async def claim(
        self, wanted: ClaimEpisodeRequest, wait_seconds: float, throttle: Throttle | None
    ) -> wire.EpisodeGroup:
        """Claim what is ``wanted`` within ``wait_seconds``. With the key of an earlier claim it gets the episodes of
        that one.

        Raises:
            UnavailableError: none in time; ``code`` says why.
            RequestError: the server refuses the request itself.
            StateError: the client is closed.
        """
        calls = self._calls
        deadline = monotonic() + wait_seconds
        life = wanted.max_episode_seconds or min(MAX_SECONDS, LIFE * wanted.discard_episode_timeout)
        key = wanted.idempotency_key or uuid.uuid4().hex
        throttle = as_policy(throttle)
        offline_since: float | None = None
        early = 0
        while True:
            policy = throttle
            if isinstance(policy, ThrottleSchedule):
                policy = policy.at((await calls.perform(wire.ENGINE_STATUS, deadline=deadline)).global_step)
            began = monotonic()
            poll = min(LONG_POLL, max(0.0, deadline - began))
            of_now = {"throttle_policy": policy, "wait_seconds": poll}
            body = wanted.model_copy(update={"idempotency_key": key, "max_episode_seconds": life, **of_now})
            answer = await self._poll(body, deadline, withdraws=wanted.idempotency_key is None)
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
                what = f"{wanted.count} episodes" if isinstance(wanted, ClaimGroupRequest) else "an episode"
                within = f"and gave up after {offline:.0f} s" if now < deadline else f"within {wait_seconds:g} s"
                raise UnavailableError(f"could not claim {what} {within}: {answer.fail_cause or code}", code=code)
            early = early + 1 if now - began < poll / 2 else 0
            await calls.pause_between_polls(early, deadline - now)

    async def _poll(self, body: ClaimEpisodeRequest, deadline: float, *, withdraws: bool) -> ClaimAnswer:
        """One poll. Where it ends without an answer, the server may be granting just now. So the claim is withdrawn,
        which hands back what it is granted; ``withdraws``: unless its caller has its key, and may repeat it."""
        timeout = body.wait_seconds + wire.WAIT_GRACE
        call: wire.Call[ClaimAnswer] = wire.Call("POST", "/claim_episode", ClaimEpisodeResponse, body, timeout)
        if isinstance(body, ClaimGroupRequest):
            call = wire.Call("POST", "/claim_group", ClaimGroupResponse, body, timeout)
        try:
            with self._claims.waiting():
                return await self._calls.perform(call, deadline=deadline)
        except UnsentError:
            raise
        except (asyncio.CancelledError, StateError, UnavailableError):
            if withdraws:
                names = {"client_uuid": body.client_uuid, "idempotency_key": body.idempotency_key}
                request = WithdrawClaimRequest.model_validate(names)
                withdrawal = wire.Call("POST", "/withdraw_claim", SuccessResponse, request)
                self._background.start(self._calls.release(withdrawal))
            raise

    async def _code_of(self, cause: str, deadline: float) -> str:
        for phrase, code in _PHRASE_CODES.items():
            if phrase in cause:
                return code
        status = await self._calls.perform(wire.ENGINE_STATUS, deadline=deadline)
        return _STATE_CODES.get(status.engine_status, "not_ready")
