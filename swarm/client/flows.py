"""What the clients do, as generators without I/O: each yields requests and pauses, and a driver carries them out.

Invariant: sync and async clients run the very same flows, and every flow ends by its deadline.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel

from swarm.client import wire
from swarm.client.pending_releases import Owed, ReleaseCall
from swarm.client.policy import Outcome, RetryPolicy, is_broken_connection, may_retry, retry_after
from swarm.errors import SwarmGatewayError, UnavailableError

logger = logging.getLogger(__name__)

T = TypeVar("T")
AnswerT = TypeVar("AnswerT", bound=BaseModel)

#: Cleanup must not hold anyone up: what is not heard is said again before the next claim.
ABORT_POLICY = RetryPolicy(attempts=4, total=5.0)
_ONCE = RetryPolicy(attempts=1)
#: So many owed calls go before one claim, each answered within so many seconds: the claim must not wait long for them.
_OWED_AT_ONCE, _OWED_SECONDS = 16, 2.0


class UnheardError(UnavailableError):
    """No server was there to hear any of the tries: nothing came of the call."""


@dataclass(frozen=True)
class Send:
    """Carry out this request and send the flow its outcome."""

    method: str
    url: str
    headers: dict[str, str] = field(repr=False)  # with the token
    content: bytes | None
    timeout: httpx.Timeout
    seconds: float  # from the first byte sent to the last one read


@dataclass(frozen=True)
class Pause:
    """Wait this many seconds."""

    seconds: float


Flow = Generator[Send | Pause, Outcome | None, T]


@dataclass(frozen=True)
class Flows:
    """The flows of one client; ``clock`` is monotonic seconds, ``owed`` what no server was there to hear."""

    server_url: httpx.URL
    token: str
    client_uuid: str
    request_timeout: float
    policy: RetryPolicy
    clock: Callable[[], float] = field(default=time.monotonic)
    owed: Owed = field(default_factory=Owed)

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
            token=wire.parse_token(token if token is not None else os.environ.get("SWARM_TOKEN", "")),
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
        """Send ``call`` until it is answered; ``on_retry`` is called before each repetition. The first repetition after
        a broken connection is at once.

        Raises:
            UnavailableError: ``server_unreachable`` after the policy's bound or ``deadline`` (on the clock).
            SwarmGatewayError: the answer was an error.
        """
        policy = policy or self.policy
        seconds = call.timeout or self.request_timeout
        headers = {"authorization": f"Bearer {self.token}"} if self.token else {}
        if call.content_type is not None:
            headers["content-type"] = call.content_type
        send = Send(
            call.method,
            wire.at_server(self.server_url, call.path) + (f"?{httpx.QueryParams(call.query)}" if call.query else ""),
            headers,
            call.content,
            httpx.Timeout(seconds, connect=min(5.0, seconds)),
            seconds,
        )
        started = self.clock()
        deadline = min(deadline, started + policy.total)
        failures = 0
        heard = False
        while True:
            outcome = yield send
            assert outcome is not None
            heard = heard or not isinstance(outcome, httpx.ConnectError | httpx.ConnectTimeout)
            if not isinstance(outcome, httpx.RequestError) and not may_retry(outcome):
                return wire.read_answer(call, outcome)
            failures += 1
            stale = failures == 1 and is_broken_connection(outcome)
            pause = 0.0 if stale else policy.delay(failures, retry_after(outcome))
            tries = max(policy.attempts, 2) if stale else policy.attempts
            if not may_retry(outcome) or failures >= tries or self.clock() + pause > deadline:
                raise self._gave_up(call, outcome, failures, self.clock() - started, heard)
            if pause:
                yield Pause(pause)
            on_retry()

    def release(self, call: ReleaseCall, deadline: float = float("inf")) -> Flow[None]:
        """Tell the server to let go of what it holds for us. Never raises: without a server it is told before the next
        claim, and where it refuses there is nothing to let go of (logged)."""
        try:
            yield from self.perform(call, policy=ABORT_POLICY, deadline=deadline)
        except SwarmGatewayError as exc:
            self._not_released(call, exc)

    def settle(self, deadline: float) -> Flow[None]:
        """Tell some of what is owed, until there is no server again or ``deadline`` has passed. Never raises."""
        for _ in range(min(len(self.owed), _OWED_AT_ONCE)):
            if (call := self.owed.take()) is None:
                return
            seconds = min(_OWED_SECONDS, max(deadline - self.clock(), 0.1))
            try:
                yield from self.perform(replace(call, timeout=seconds), policy=_ONCE)
            except SwarmGatewayError as exc:
                self._not_released(call, exc)
                if _is_away(exc):
                    return
            except BaseException:
                self.owed.add(call)
                raise
            if self.clock() >= deadline:
                return

    def _not_released(self, call: ReleaseCall, error: SwarmGatewayError) -> None:
        if _is_away(error):
            self.owed.add(call)
            logger.info("%s is said again before the next claim: %s", call.path, error)
        else:
            logger.warning("%s was refused; what it names falls to its idle timeout: %s", call.path, error)

    def _gave_up(
        self, call: wire.Call[Any], outcome: Outcome, tries: int, seconds: float, heard: bool
    ) -> SwarmGatewayError:
        if not isinstance(outcome, httpx.RequestError):
            return wire.error_of(call, outcome)
        why = str(outcome) or type(outcome).__name__
        return (UnavailableError if heard else UnheardError)(
            f"no swarm server answers at {self.server_url} ({tries} tries in {seconds:.1f} s, last: {why}); start one "
            "with `swarm-gateway swarm start` or check the address",
            code="server_unreachable",
        )

    def breath(self, rounds: int, remaining: float) -> float:
        """Seconds to wait after so many polls in a row that came back before their time."""
        return max(0.0, min(self.policy.delay(min(rounds, 4)), remaining))


def _is_away(error: SwarmGatewayError) -> bool:
    return isinstance(error, UnavailableError) and error.code == "server_unreachable"
