"""Calls of one client: each is retried until it is answered, and releases that no server received are kept.

Invariant: every call ends by its deadline, and none begins once the client is being closed, except for releases: calls
that let go of what the server holds for this client.
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from time import monotonic
from typing import Any, TypeVar
from urllib.parse import urlencode

from pydantic import BaseModel

from swarm.client import wire
from swarm.client.wire import Outcome, RetryPolicy, may_retry
from swarm.errors import StateError, SwarmGatewayError, UnavailableError
from swarm.http.client import Answer, ConnectionBrokenError, HttpClient, retry_after
from swarm.protocol import SuccessResponse

logger = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT", bound=BaseModel)

#: Lets go of what the server holds for this client.
ReleaseCall = wire.Call[SuccessResponse]

#: A release must not hold anyone up: if no server receives it, it is sent again before the next claim.
RELEASE_POLICY = RetryPolicy(attempts=4, total=5.0)
_ONCE = RetryPolicy(attempts=1)
#: Releases kept while no server answers. Older ones are dropped: the idle timeout of their episodes does the same.
MAX_PENDING = 10_000
#: Pending releases sent before one claim, and the seconds each may take: a claim must not wait long for them.
_PENDING_AT_ONCE, _PENDING_SECONDS = 16, 2.0


class UnsentError(UnavailableError):
    """No try reached a server: the call had no effect."""


class Calls:
    """Sends the calls of one client; the arguments are those of :class:`swarm.client.AsyncSwarmClient`.

    Attributes:
        pending: releases that no server has received, oldest first.
    """

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
        self.client_uuid = client_uuid or uuid.uuid4().hex
        self.policy = policy or RetryPolicy()
        self.pending: deque[ReleaseCall] = deque(maxlen=MAX_PENDING)
        self._token = wire.parse_token(token if token is not None else os.environ.get("SWARM_TOKEN", ""))
        self._request_timeout = request_timeout
        self._http = http or HttpClient()
        self._closing = asyncio.Event()
        self._closed = False

    @property
    def closing(self) -> bool:
        """Whether the client is being closed, or is closed."""
        return self._closing.is_set()

    def begin_close(self) -> None:
        """Begin no more calls but releases, and end the pauses between tries with :class:`StateError`."""
        self._closing.set()

    async def close(self) -> None:
        """Close the connections."""
        self._closing.set()
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
            UnavailableError: ``server_unreachable`` after the policy's bound or ``deadline`` (monotonic seconds).
            SwarmGatewayError: the answer was an error.
            StateError: the client is closed.
        """
        policy = policy or self.policy
        started = monotonic()
        deadline = min(deadline, started + policy.total)
        failures = 0
        reached = False
        while True:
            if self._closed or (self.closing and not while_closing):
                raise StateError("this client is closed")
            outcome = await self._send(call)
            if isinstance(outcome, Answer) and not may_retry(outcome):
                return wire.read_answer(call, outcome)
            failures += 1
            unsent = isinstance(outcome, ConnectionBrokenError) and outcome.unsent
            reached = reached or not unsent
            # a connection kept alive breaks when its server was restarted: a new one is made at once
            stale = failures == 1 and isinstance(outcome, ConnectionBrokenError) and not unsent
            asked = retry_after(outcome.headers) if isinstance(outcome, Answer) else 0.0
            pause = 0.0 if stale else policy.delay(failures, asked)
            tries = max(policy.attempts, 2) if stale else policy.attempts
            if failures >= tries or monotonic() + pause > deadline:
                raise self._gave_up(call, outcome, failures, monotonic() - started, reached)
            if pause:
                await (asyncio.sleep if while_closing else self.pause)(pause)
            on_retry()

    async def release(self, call: ReleaseCall) -> None:
        """Let go of what the server holds. Never raises: if no server answers, the call is kept and sent before the
        next claim; if the server refuses, there is nothing to let go of (logged)."""
        try:
            await self.perform(call, policy=RELEASE_POLICY, while_closing=True)
        except StateError:
            pass
        except SwarmGatewayError as exc:
            self._not_released(call, exc)

    async def send_pending(self, deadline: float) -> None:
        """Send some of the pending releases, until no server answers or ``deadline`` has passed.

        Raises:
            StateError: the client is closed.
        """
        for _ in range(min(len(self.pending), _PENDING_AT_ONCE)):
            if not self.pending:
                return
            call = self.pending.popleft()
            seconds = min(_PENDING_SECONDS, max(deadline - monotonic(), 0.1))
            try:
                await self.perform(replace(call, timeout=seconds), policy=_ONCE)
            except StateError:
                raise
            except SwarmGatewayError as exc:
                self._not_released(call, exc)
                if _is_unreachable(exc):
                    return
            except BaseException:
                self.pending.append(call)
                raise
            if monotonic() >= deadline:
                return

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
        raise StateError("this client is closed")

    async def pause_between_polls(self, early: int, remaining: float) -> None:
        """Wait after ``early`` long polls in a row that were answered before their time, at most ``remaining`` seconds.

        Without it, a server or proxy that does not long-poll would be asked without a pause.
        """
        if early:
            await self.pause(max(0.0, min(self.policy.delay(min(early, 4)), remaining)))

    async def _send(self, call: wire.Call[Any]) -> Outcome:
        headers = {"authorization": f"Bearer {self._token}"} if self._token else {}
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

    def _not_released(self, call: ReleaseCall, error: SwarmGatewayError) -> None:
        if _is_unreachable(error):
            self.pending.append(call)
            logger.info("%s will be sent again before the next claim: %s", call.path, error)
        else:
            logger.warning("%s was refused; what it names falls to its idle timeout: %s", call.path, error)

    def _gave_up(
        self, call: wire.Call[Any], outcome: Outcome, tries: int, seconds: float, reached: bool
    ) -> SwarmGatewayError:
        if isinstance(outcome, Answer):
            return wire.error_of(call, outcome)
        return (UnavailableError if reached else UnsentError)(
            f"no swarm server answers at {self.server_url} ({tries} tries in {seconds:.1f} s, last: {outcome}); start "
            "one with `swarm-gateway swarm start` or check the address",
            code="server_unreachable",
        )


def _is_unreachable(error: SwarmGatewayError) -> bool:
    return isinstance(error, UnavailableError) and error.code == "server_unreachable"
