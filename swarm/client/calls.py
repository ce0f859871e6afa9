"""Calls of one client: each is retried until it is answered.

Invariant: every call ends by its deadline, and none begins once the client is being closed, except for releases: calls
that let go of what the server holds for this client.
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Callable
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

#: Nobody waits for a release; after as long as this, the idle timeout of an episode has done the same.
RELEASE_POLICY = RetryPolicy(attempts=1000, total=300.0)
#: Releases under way at once: of a server that does not answer, others wait for their turn.
MOST_RELEASES = 16
#: Failures of one call, some seconds after the first, upon which the log says that it is repeated.
_SILENT_AFTER = 5


class UnsentError(UnavailableError):
    """No try reached a server: the call had no effect."""


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
        self._releasing = asyncio.Semaphore(MOST_RELEASES)
        #: whether the log says that no server answers, since one did
        self._is_silent = False

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
            if self._closed or (self.closing and not while_closing):
                raise StateError("this client is closed")
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

    async def release(self, call: ReleaseCall) -> None:
        """Release what the server holds for this client; repeated until a server answers. Never raises: a server that
        refuses holds nothing (logged)."""
        try:
            async with asyncio.timeout(RELEASE_POLICY.total), self._releasing:
                await self.perform(call, policy=RELEASE_POLICY, while_closing=True)
        except StateError:
            pass
        except (SwarmGatewayError, TimeoutError) as exc:
            why = exc if isinstance(exc, SwarmGatewayError) else f"no answer within {RELEASE_POLICY.total:.0f} s"
            logger.warning("%s failed; what it names falls to its idle timeout: %s", call.path, why)

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
