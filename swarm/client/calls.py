"""Calls of one client: each is retried until it is answered, and a claim is polled until it is granted.

Invariant: every call ends by its deadline, and none begins once the client is being closed, except for releases: calls
that let go of what the server holds for this client. All polls and retries of a claim carry one idempotency key, so a
claim whose answer was lost gets the episodes that were granted to it, and no others. A claim that nobody waits for any
more is withdrawn, with what it was granted.
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from time import monotonic
from typing import Any, TypeVar, cast
from urllib.parse import urlencode

from pydantic import BaseModel

from swarm.client import wire
from swarm.client.throttling import Throttle, ThrottleSchedule, as_policy
from swarm.client.wire import Outcome, RetryPolicy, may_retry
from swarm.concurrency import Background, Interruptible, Signal, end_tasks
from swarm.errors import StateError, SwarmGatewayError, UnavailableError
from swarm.evidence.pairs import Pair
from swarm.http.client import Answer, ConnectionBrokenError, HttpClient, retry_after
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
    EndedResponse,
    EndGroupRequest,
    SuccessResponse,
    SwarmThrottlePolicy,
    WithdrawClaimRequest,
)
from swarm.states import EngineState
from swarm.status import ServerStatus
from swarm.types import Task, WorkflowOutput

logger = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT", bound=BaseModel)

ClaimAnswer = ClaimEpisodeResponse | ClaimGroupResponse
#: Lets go of what the server holds for this client.
ReleaseCall = wire.Call[SuccessResponse]

#: Nobody waits for a release; after as long as this, the idle timeout of an episode has done the same.
RELEASE_POLICY = RetryPolicy(attempts=1000, total=300.0)
#: Seconds that a close waits for releases under way.
CLOSE_GRACE = 5.0
#: Releases under way at once: of a server that does not answer, others wait for their turn.
MOST_RELEASES = 16
#: Failures of one call, some seconds after the first, upon which the log says that it is repeated.
_SILENT_AFTER = 5
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


_CLOSED = "this client is closed"


class UnsentError(UnavailableError):
    """No try reached a server: the call had no effect."""


class RefusedAtOnceError(UnavailableError):
    """The server's answer to a claim that does not wait: it has no episodes now."""


class OpenClaims:
    """Claims that wait, until somebody ends them; those that begin later end at once."""

    def __init__(self) -> None:
        self._waiting: set[Interruptible] = set()
        self._left = Signal()
        self._error: Callable[[], Exception] | None = None

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

    def end(self, error: Callable[[], Exception]) -> None:
        """End all, each with an ``error`` of its own."""
        self._error = error
        for claim in tuple(self._waiting):
            claim.interrupt(error())

    async def over(self) -> None:
        """Return once none waits."""
        await self._left.until(lambda: not self._waiting)


class Calls:
    """Sends the calls of one client; the arguments are those of :class:`swarm.client.AsyncSwarmClient`."""

    def __init__(
        self,
        server_url: str,
        token: str | None,
        client_uuid: str | None,
        request_timeout: float,
        policy: RetryPolicy | None,
        http: HttpClient | None,
    ) -> None:
        self.server_url = wire.parse_server_url(server_url)
        self._query = wire.parse_server_query(server_url)
        # of a gateway, before its swarm server
        self._gateway_url = self.server_url.removesuffix("/admin") if self.server_url.endswith("/admin") else None
        self.client_uuid = client_uuid or uuid.uuid4().hex
        self.policy = policy or RetryPolicy()
        if token is None:
            token = wire.parse_server_token(server_url)
        self.token = wire.parse_token(token if token is not None else os.environ.get("SWARM_TOKEN", ""))
        self._request_timeout = request_timeout
        self._http = http or HttpClient()
        self._closing = asyncio.Event()
        self._closed = False
        self._background = Background(CLOSE_GRACE, quiet=True)
        self._releasing = asyncio.Semaphore(MOST_RELEASES)
        self._claims = OpenClaims()
        #: why the server's last answer to a claim granted nothing; empty: it granted episodes
        self._waits_for = ""
        #: whether the log says that no server answers, since one did
        self._is_silent = False

    async def close(self, watches: Iterable[asyncio.Task[None]]) -> None:
        """End the claims that wait, the pauses between tries, both with :class:`StateError`, and ``watches``; finish
        releases, up to a deadline, and close the connections."""
        async with self._background:
            self._closing.set()
            self._claims.end(lambda: StateError(_CLOSED))
            # their withdrawals begin before the connections are closed
            await self._claims.over()
            await end_tasks(*watches)
        self._closed = True
        await self._http.close()

    async def perform(
        self,
        call: wire.Call[AnswerT],
        *,
        policy: RetryPolicy | None = None,
        deadline: float = float("inf"),
        on_retry: Callable[[], None] = lambda: None,
        while_closing: bool = False,
    ) -> AnswerT:
        """Send ``call`` until it is answered; ``on_retry`` is called before each repetition.

        Raises:
            UnavailableError: ``server_unreachable`` after the policy's bound (where a connection broke, the call's
                timeout if that is longer), at the latest after ``deadline`` (monotonic seconds).
            SwarmGatewayError: the answer was an error.
            StateError: the client is closed.
        """
        policy = policy or self.policy
        started = monotonic()
        failures = 0
        reached = False
        while True:
            if self._closed or (self._closing.is_set() and not while_closing):
                raise StateError(_CLOSED)
            outcome = await self._send(call)
            if isinstance(outcome, Answer) and not may_retry(outcome):
                self._is_silent = False
                return wire.read_answer(call, outcome)
            failures += 1
            unsent = isinstance(outcome, ConnectionBrokenError) and outcome.unsent
            reached = reached or not unsent
            # a connection kept alive breaks when its server was restarted: a new one is made at once
            stale = failures == 1 and isinstance(outcome, ConnectionBrokenError) and not unsent
            asked = retry_after(outcome.headers) if isinstance(outcome, Answer) else 0.0
            pause = 0.0 if stale else policy.delay(failures, asked)
            tries = max(policy.attempts, 2) if stale else policy.attempts
            # a connection that breaks in the second minute of an upload is as good a reason to try again
            broken_seconds = call.timeout or 0.0 if isinstance(outcome, ConnectionBrokenError) else 0.0
            until = min(deadline, started + max(policy.total, broken_seconds))
            if failures >= tries or monotonic() + pause > until:
                raise self._gave_up(call, outcome, failures, monotonic() - started, reached)
            if failures == _SILENT_AFTER and not (self._is_silent or while_closing):
                # of many calls, one line
                self._is_silent = True
                why = f"HTTP {outcome.status}" if isinstance(outcome, Answer) else outcome
                left = until - monotonic()
                logger.warning("waiting for %s, at most %.0f s more: %s", self.server_url, left, why)
            if pause:
                await (asyncio.sleep if while_closing else self.pause)(pause)
            on_retry()

    async def status(self, *, episodes: int = 100, steps: int = 1000) -> ServerStatus:
        """Everything that the server reports about itself, with at most so many of the running ``episodes`` and of the
        latest ``steps``; without steps there are no evaluations.

        Raises:
            UnavailableError: no server within the policy's bound.
        """
        query = {"episodes": episodes, "steps": steps}
        return await self.perform(wire.Call("GET", "/status", ServerStatus, query=query))

    async def claim(
        self,
        wanted: ClaimEpisodeRequest,
        wait_seconds: float,
        throttle: Throttle | None,
        left: Callable[[str], float] = lambda _: float("inf"),
    ) -> wire.EpisodeGroup:
        """Claim what is ``wanted`` within ``wait_seconds``. With the key of an earlier claim it gets the episodes of
        that one. ``left`` is called after each poll that got nothing, with the code of what the claim waits for, and
        gives the seconds that it may still wait.

        Raises:
            UnavailableError: none in time; ``code`` says why.
            RequestError: the server refuses the request itself.
            StateError: the client is closed.
        """
        life = wanted.max_episode_seconds or min(MAX_SECONDS, LIFE * wanted.discard_episode_timeout)
        key = wanted.idempotency_key or uuid.uuid4().hex
        throttle = None if throttle is None else as_policy(throttle)
        body = wanted.model_copy(update={"idempotency_key": key, "max_episode_seconds": life})
        try:
            return await self._claim(body, wait_seconds, throttle, left)
        except (UnsentError, RefusedAtOnceError):
            # for those who poll in this way a withdrawal of each claim would be as many requests again
            raise
        except (asyncio.CancelledError, StateError, UnavailableError):
            # the server may be granting just now, and a repetition of a poll may arrive late; its caller may repeat a
            # key of its own
            if wanted.idempotency_key is None:
                request = WithdrawClaimRequest(client_uuid=body.client_uuid, idempotency_key=key)
                self.release(wire.Call("POST", "/withdraw_claim", SuccessResponse, request))
            raise

    async def _claim(
        self,
        wanted: ClaimEpisodeRequest,
        wait_seconds: float,
        throttle: SwarmThrottlePolicy | ThrottleSchedule | None,
        left: Callable[[str], float],
    ) -> wire.EpisodeGroup:
        started = monotonic()
        latest = deadline = started + wait_seconds
        offline_since: float | None = None
        early = 0
        while True:
            policy = throttle
            if isinstance(policy, ThrottleSchedule):
                policy = policy.at((await self.perform(wire.ENGINE_STATUS, deadline=deadline)).global_step)
            began = monotonic()
            poll = min(LONG_POLL, max(0.0, deadline - began))
            body = wanted.model_copy(update={"throttle_policy": policy, "wait_seconds": poll})
            answer = await self._poll(body, deadline)
            if answer.success:
                self._waits_for = ""
                return wire.episodes_of(answer, self.server_url)
            code = await self._code_of(answer.fail_cause, deadline)
            if code != self._waits_for:
                # of many claims that wait for one thing, one line
                logger.info("waiting for episodes of %s: %s", self.server_url, answer.fail_cause or code)
                self._waits_for = code
            now = monotonic()
            deadline = min(latest, now + left(code))
            offline_since = (offline_since or began) if code == "engine_offline" else None
            offline = now - offline_since if offline_since is not None else -1.0
            refused = wait_seconds <= 0 or (wanted.unless_batch_waits and code in NO_EPISODE_NEEDED)
            if now >= deadline or offline >= OFFLINE_GRACE or refused:
                what = f"{wanted.count} episodes" if isinstance(wanted, ClaimGroupRequest) else "an episode"
                within = f"and gave up after {now - started:.0f} s" if now < latest else f"within {wait_seconds:g} s"
                kind = RefusedAtOnceError if refused else UnavailableError
                raise kind(f"could not claim {what} {within}: {answer.fail_cause or code}", code=code)
            early = early + 1 if now - began < poll / 2 else 0
            await self.pause_between_polls(early, deadline - now)

    async def end_group(
        self, task: Task | str, outputs: Mapping[str, WorkflowOutput], code: str = "", pair: Pair | None = None
    ) -> EndedResponse:
        """End all episodes of one task, as :meth:`swarm.client.AsyncSwarmClient.end_group` does, and take ``pair``
        along.

        Args:
            code: noted with each result that has none.

        Returns:
            Also what became of each episode's tokens.
        """
        ends = [
            {"episode_uuid": uuid, "workflow_output": wire.with_code(output, code)} for uuid, output in outputs.items()
        ]
        return await self.end("/end_group", EndGroupRequest, task, outputs, {"ends": ends, "pair": pair})

    async def end(
        self,
        path: str,
        request: type[BaseModel],
        task: Task | str,
        outputs: Mapping[str, WorkflowOutput],
        fields: Mapping[str, Any],
    ) -> EndedResponse:
        """End the episodes of ``outputs`` by a ``request`` with these ``fields``."""
        # what is neither a task nor a name is refused by the body
        task_id = cast("str", getattr(task, "task_id", task))
        key = wire.end_key(task_id, outputs)
        ids = {"client_uuid": self.client_uuid, "task_id": task_id, "idempotency_key": key}
        body = wire.checked(request, {**ids, **fields})
        for output in outputs.values():
            wire.warn_of_left_out(output.log_metrics)
        return await self.perform(wire.Call("POST", path, EndedResponse, body))

    def release(self, call: ReleaseCall) -> asyncio.Task[None]:
        """Release what the server holds for this client, in the background; repeated until a server answers. The task
        never fails: a server that refuses holds nothing (logged)."""
        return self._background.start(self._release(call))

    async def pause(self, seconds: float) -> None:
        """Wait.

        Raises:
            StateError: the client is closed meanwhile.
        """
        try:
            async with asyncio.timeout(seconds):
                await self._closing.wait()
        except TimeoutError:
            return
        raise StateError(_CLOSED)

    async def pause_between_polls(self, early: int, remaining: float) -> None:
        """Wait after ``early`` long polls in a row that were answered before their time, at most ``remaining`` seconds.

        Without it, a server or proxy that does not long-poll would be asked without a pause.
        """
        if early:
            await self.pause(max(0.0, min(self.policy.delay(min(early, 4)), remaining)))

    async def _poll(self, body: ClaimEpisodeRequest, deadline: float) -> ClaimAnswer:
        timeout = body.wait_seconds + wire.WAIT_GRACE
        call: wire.Call[ClaimAnswer] = wire.Call("POST", "/claim_episode", ClaimEpisodeResponse, body, timeout)
        if isinstance(body, ClaimGroupRequest):
            call = wire.Call("POST", "/claim_group", ClaimGroupResponse, body, timeout)
        with self._claims.waiting():
            return await self.perform(call, deadline=deadline)

    async def _code_of(self, cause: str, deadline: float) -> str:
        for phrase, code in _PHRASE_CODES.items():
            if phrase in cause:
                return code
        status = await self.perform(wire.ENGINE_STATUS, deadline=deadline)
        return _STATE_CODES.get(status.engine_status, "not_ready")

    async def _release(self, call: ReleaseCall) -> None:
        try:
            async with asyncio.timeout(RELEASE_POLICY.total), self._releasing:
                await self.perform(call, policy=RELEASE_POLICY, while_closing=True)
        except StateError:
            pass
        except (SwarmGatewayError, TimeoutError) as exc:
            why = exc if isinstance(exc, SwarmGatewayError) else f"no answer within {RELEASE_POLICY.total:.0f} s"
            logger.warning("%s failed; what it names falls to its idle timeout: %s", call.path, why)

    async def _send(self, call: wire.Call[Any]) -> Outcome:
        headers = {"authorization": f"Bearer {self.token}"} if self.token else {}
        if call.content_type is not None:
            headers["content-type"] = call.content_type
        query = {**self._query, **call.query}
        url = self.server_url + call.path + (f"?{urlencode(query)}" if query else "")
        seconds = call.timeout or self._request_timeout
        try:
            return await self._http.request(call.method, url, call.content, headers, seconds)
        except ConnectionBrokenError as exc:
            return exc
        except TimeoutError:
            return TimeoutError(f"the answer took longer than {seconds:g} s")

    def _gave_up(
        self, call: wire.Call[Any], outcome: Outcome, tries: int, seconds: float, reached: bool
    ) -> SwarmGatewayError:
        if isinstance(outcome, Answer):
            return wire.error_of(call, outcome)
        kind, start = ("gateway", "serve") if self._gateway_url else ("swarm server", "swarm start")
        return (UnavailableError if reached else UnsentError)(
            f"no {kind} answers at {self._gateway_url or self.server_url} ({tries} tries in {seconds:.1f} s, last: "
            f"{outcome}); start one with `swarm-gateway {start}` or check the address",
            code="server_unreachable",
        )
