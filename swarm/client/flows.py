"""What the clients do, as generators without I/O: each yields requests and pauses, and a driver carries them out.

Invariant: sync and async clients run the very same flows, and every flow ends by its deadline.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel

from swarm.client import wire
from swarm.client.policy import Outcome, RetryPolicy, may_retry, retry_after
from swarm.errors import ConflictError, EngineError, RequestError, SwarmGatewayError, UnavailableError
from swarm.job import TrainJob
from swarm.protocol import NO_EPISODES, POST_ROLLING, SYNCING, EpisodeType, ServerStatus
from swarm.states import EngineState

logger = logging.getLogger(__name__)

T = TypeVar("T")
AnswerT = TypeVar("AnswerT", bound=BaseModel)

#: Seconds of one long poll; short, because a claim given up meanwhile holds its place until the poll ends.
LONG_POLL = 5.0
#: A claim gives up early when the engine has been OFFLINE this long: nothing will come by itself.
OFFLINE_GRACE = 5.0
#: Cleanup must not hold anyone up: the server's idle timeout does the same job a little later.
ABORT_POLICY = RetryPolicy(attempts=4, total=5.0)

_PHRASE_CODES = {SYNCING: "engine_syncing", POST_ROLLING: "engine_post_rolling", NO_EPISODES: "no_episodes"}
_STATE_CODES = {
    EngineState.OFFLINE: "engine_offline",
    EngineState.BOOTING: "engine_booting",
    EngineState.WEIGHT_SYNCING: "engine_syncing",
    EngineState.ROLLING_POST: "engine_post_rolling",
}


@dataclass(frozen=True)
class Send:
    """Carry out this request and send the flow its outcome."""

    method: str
    url: str
    headers: dict[str, str]
    content: bytes | None
    timeout: httpx.Timeout


@dataclass(frozen=True)
class Pause:
    """Wait this many seconds."""

    seconds: float


Flow = Generator[Send | Pause, Outcome | None, T]


@dataclass(frozen=True)
class Flows:
    """The flows of one client; ``clock`` is monotonic seconds."""

    server_url: httpx.URL
    token: str
    client_uuid: str
    request_timeout: float
    policy: RetryPolicy
    clock: Callable[[], float] = field(default=time.monotonic)

    @classmethod
    def of(
        cls,
        server_url: str,
        token: str | None,
        client_uuid: str | None,
        request_timeout: float,
        policy: RetryPolicy | None,
    ) -> Flows:
        """From a client's constructor arguments; the token defaults to ``$SWARM_TOKEN``, the uuid to a fresh one."""
        return cls(
            server_url=wire.parse_server_url(server_url),
            token=token if token is not None else os.environ.get("SWARM_TOKEN", ""),
            client_uuid=client_uuid or uuid.uuid4().hex,
            request_timeout=request_timeout,
            policy=policy or RetryPolicy(),
        )

    def perform(
        self,
        call: wire.Call[AnswerT],
        *,
        policy: RetryPolicy | None = None,
        deadline: float = float("inf"),
        on_retry: Callable[[], None] = lambda: None,
    ) -> Flow[AnswerT]:
        """Send ``call`` until it is answered; ``on_retry`` is called before each repetition.

        Raises:
            UnavailableError: ``server_unreachable`` after the policy's bound or ``deadline`` (on the clock).
            SwarmGatewayError: the answer was an error.
        """
        policy = policy or self.policy
        seconds = call.timeout or self.request_timeout
        headers = {"authorization": f"Bearer {self.token}"} if self.token else {}
        if call.body is not None:
            headers["content-type"] = "application/json"
        send = Send(
            call.method,
            f"{wire.at_server(self.server_url, call.path)}{'?' if call.query else ''}{httpx.QueryParams(call.query)}",
            headers,
            call.content,
            httpx.Timeout(seconds, connect=min(5.0, seconds)),
        )
        started = self.clock()
        deadline = min(deadline, started + policy.total)
        failures = 0
        while True:
            outcome = yield send
            assert outcome is not None
            if not isinstance(outcome, httpx.RequestError) and not may_retry(outcome):
                return wire.read_answer(call, outcome)
            failures += 1
            pause = policy.delay(failures, retry_after(outcome))
            if not may_retry(outcome) or failures >= policy.attempts or self.clock() + pause > deadline:
                raise self._gave_up(call, outcome, failures, self.clock() - started)
            yield Pause(pause)
            on_retry()

    def _gave_up(self, call: wire.Call[Any], outcome: Outcome, tries: int, seconds: float) -> SwarmGatewayError:
        if not isinstance(outcome, httpx.RequestError):
            return wire.error_of(call, outcome)
        why = str(outcome) or type(outcome).__name__
        return UnavailableError(
            f"no swarm server answers at {self.server_url} ({tries} tries in {seconds:.1f} s, last: {why}); start one "
            "with `swarm-gateway swarm start` or check the address",
            code="server_unreachable",
        )

    def claim(
        self,
        count: int | None,
        wait_seconds: float,
        episode_type: EpisodeType,
        discard_episode_timeout: float,
        throttle_policy: Mapping[str, Any] | None = None,
    ) -> Flow[list[wire.EpisodeEndpoint]]:
        """Claim ``count`` episodes (``None``: one, by ``/claim_episode``) within ``wait_seconds``.

        Raises:
            UnavailableError: none in time; ``code`` says why.
        """
        deadline = self.clock() + wait_seconds
        offline_since: float | None = None
        rounds = 0
        while True:
            asked = self.clock()
            poll = min(LONG_POLL, max(0.0, deadline - asked))
            call = wire.claim_call(
                self.client_uuid, count, poll, episode_type, discard_episode_timeout, throttle_policy
            )
            answer = yield from self.perform(call, deadline=deadline)
            if answer.success:
                return wire.endpoints(answer, self.server_url)
            code = yield from self._why(answer.fail_cause, deadline)
            now = self.clock()
            offline_since = (offline_since or asked) if code == "engine_offline" else None
            if now >= deadline or (offline_since is not None and now - offline_since >= OFFLINE_GRACE):
                what = "an episode" if count is None else f"{count} episodes"
                raise UnavailableError(
                    f"could not claim {what} within {wait_seconds:g} s: {answer.fail_cause or code}", code=code
                )
            rounds = rounds + 1 if now - asked < poll / 2 else 0
            if rounds:
                # answered before its time: it does not long-poll, or the state it waits in has just changed
                yield Pause(self._breath(rounds, deadline - now))

    def _breath(self, rounds: int, remaining: float) -> float:
        """Seconds to wait after so many polls in a row that came back before their time."""
        return min(self.policy.delay(min(rounds, 4)), remaining)

    def _why(self, cause: str, deadline: float) -> Flow[str]:
        for phrase, code in _PHRASE_CODES.items():
            if phrase in cause:
                return code
        status = yield from self.perform(wire.ENGINE_STATUS, deadline=deadline)
        return _STATE_CODES.get(status.engine_status, "not_ready")

    def wait_for_state(self, states: tuple[EngineState, ...], wait_seconds: float) -> Flow[ServerStatus]:
        """Poll the status until the engine is in one of ``states``.

        Raises:
            EngineError: the engine is OFFLINE and that was not waited for.
            UnavailableError: not within ``wait_seconds``.
        """
        deadline = self.clock() + wait_seconds
        seen = ""
        rounds = 0
        while True:
            asked = self.clock()
            poll = min(LONG_POLL, max(0.0, deadline - asked))
            # the first look is at once: a server that waits for one state would wait past the others
            call = wire.wait_status_call(states[0], poll if seen and len(states) == 1 else 0.0)
            status = yield from self.perform(call)
            engine = status.engine
            doing = " ".join(filter(None, (engine.engine_status, status.boot_stage, engine.engine_status_detail)))
            if doing != seen:
                logger.info("swarm server %s: %s", self.server_url, doing)
                seen = doing
            if engine.engine_status in states:
                return status
            if engine.engine_status is EngineState.OFFLINE:
                raise EngineError("\n".join([f"the engine is offline: {doing}", *status.last_lines]))
            now = self.clock()
            if now >= deadline:
                message = f"the engine is not {' or '.join(states)} after {wait_seconds:g} s: {doing}"
                raise UnavailableError(message, code="not_ready")
            rounds = rounds + 1 if now - asked < poll / 2 else 0
            if rounds:
                yield Pause(self._breath(rounds, deadline - now))

    def start_engine(self, wait_seconds: float) -> Flow[int | None]:
        """Start the engine with the synced job and wait until it is ROLLING; returns its process id."""
        retries: list[None] = []
        try:
            answer = yield from self.perform(wire.START_ENGINE, on_retry=lambda: retries.append(None))
            pid = answer.pid
        except ConflictError:
            # of a start whose reply was lost, the repetition meets the engine that it started
            status = (yield from self.perform(wire.STATUS)) if retries else None
            if status is None or status.engine.engine_status is EngineState.OFFLINE:
                raise
            pid = status.engine_pid
        if wait_seconds > 0:
            yield from self.wait_for_state((EngineState.ROLLING,), wait_seconds)
        return pid

    def ensure_engine(self, job: TrainJob, force_restart: bool, wait_seconds: float) -> Flow[None]:
        """Make the engine run ``job``: nothing to do if it rolls with it, wait if it boots or syncs, else start it.

        Raises:
            ConflictError: it runs another job and ``force_restart`` is off; names the fields that differ.
        """
        deadline = self.clock() + wait_seconds
        status = yield from self.perform(wire.STATUS)
        if force_restart and status.engine.engine_status is not EngineState.OFFLINE:
            yield from self.perform(wire.STOP_ENGINE)
            status = yield from self.wait_for_state((EngineState.OFFLINE,), deadline - self.clock())
        if status.engine.engine_status is EngineState.OFFLINE:
            try:
                yield from self.perform(wire.sync_config_call(job))
                yield from self.perform(wire.START_ENGINE)
            except RequestError:
                # another client may have started it between our look and our command
                status = yield from self.perform(wire.STATUS)
                if status.engine.engine_status is EngineState.OFFLINE:
                    raise
        if status.engine.engine_status is not EngineState.OFFLINE:
            _refuse_other(job, status)
        # whose job it is that rolls in the end, only the end tells: others may command the engine as well
        status = yield from self.wait_for_state((EngineState.ROLLING,), deadline - self.clock())
        _refuse_other(job, status)


def _refuse_other(job: TrainJob, status: ServerStatus) -> None:
    differing = differences(job, status.job) if status.job is not None else []
    if differing:
        raise ConflictError(
            f"the engine runs another job (it differs in {', '.join(differing)}); pass force_restart=True to "
            "replace it, or use the running one as it is",
            code="other_job",
        )


def differences(job: TrainJob, running: TrainJob) -> list[str]:
    """Fields in which two jobs differ. Models are compared by served name: the server may know a resolved path."""
    ours, theirs = (
        {**one.model_dump(exclude={"model", "served_model_name"}), "model": one.model_name} for one in (job, running)
    )
    return [name for name in ours if ours[name] != theirs[name]]
