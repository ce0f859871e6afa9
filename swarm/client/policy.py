"""Retries: of requests to the swarm server, and of user code that runs episodes.

Invariant: retries are bounded in number and time, and delayed with jitter. One exception: a connection that broke is
replaced at once, once per call. Every call may be repeated: reads and commands by nature, claims and ends because they
carry the same idempotency key each time.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from swarm.errors import AuthenticationError, ConfigError, UnavailableError
from swarm.http.client import Answer, ConnectionBrokenError

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: What sending a request leads to; a timeout is the caller's own.
Outcome = Answer | ConnectionBrokenError | TimeoutError

#: The server, or a proxy in front of it, did not act on the request.
_NOT_NOW = frozenset({502, 503, 504})
#: How often ``auto_retry=True`` tries one task.
_DEFAULT_ATTEMPTS = 3
#: A retry cannot help against these.
_FINAL = (ConfigError, AuthenticationError)


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential backoff with jitter.

    The k-th delay is uniform in [d/2, d] with d = min(``cap``, ``base`` * 2**k) seconds, or what ``retry-after`` asks
    for if that is longer. It ends after ``attempts`` tries or ``total`` seconds, whichever comes first.
    """

    attempts: int = 10
    base: float = 0.2
    cap: float = 5.0
    total: float = 60.0

    def delay(self, failures: int, retry_after: float = 0.0) -> float:
        """Seconds to wait after the ``failures``-th failure in a row (1 for the first)."""
        ceiling = min(self.cap, self.base * 2 ** (failures - 1))
        return max(ceiling * random.uniform(0.5, 1.0), retry_after)


def may_retry(outcome: Outcome) -> bool:
    """Whether repeating the request unchanged can lead to another outcome.

    ``x-should-retry`` decides where the server sends it; then ``retry-after``; then the status.
    """
    if not isinstance(outcome, Answer):
        return True
    if outcome.status < 400:
        return False
    should = outcome.headers.get("x-should-retry")
    if should in ("true", "false"):
        return should == "true"
    return "retry-after" in outcome.headers or outcome.status in _NOT_NOW


def retry_after(outcome: Outcome) -> float:
    """Seconds that the answer asks to wait; 0 if it does not, or gives a date."""
    if not isinstance(outcome, Answer):
        return 0.0
    try:
        seconds = float(outcome.headers.get("retry-after", 0))
    except ValueError:
        return 0.0
    return seconds if 0 <= seconds < float("inf") else 0.0


def attempts_of(auto_retry: bool | int) -> int:
    """How often a task is tried: ``True`` three times, a number that many times, ``False`` once."""
    return _DEFAULT_ATTEMPTS if auto_retry is True else max(1, int(auto_retry))


def with_retries(
    func: Callable[[], T], attempts: int, policy: RetryPolicy, stopping: threading.Event, name: str = "a task"
) -> T:
    """Return what ``func`` returns in one of ``attempts`` tries, or raise its last error; no more once ``stopping`` is
    set."""
    for attempt in range(1, attempts + 1):
        try:
            return func()
        except Exception as exc:
            if is_stop(exc) or _is_last(exc, attempt, attempts, name) or stopping.wait(policy.delay(attempt)):
                raise
    raise AssertionError("attempts is at least 1")


async def with_retries_async(
    func: Callable[[], Awaitable[T]], attempts: int, policy: RetryPolicy, name: str = "a task"
) -> T:
    """:func:`with_retries` on an event loop."""
    for attempt in range(1, attempts + 1):
        try:
            return await func()
        except Exception as exc:
            if _is_last(exc, attempt, attempts, name):
                raise
            await asyncio.sleep(policy.delay(attempt))
    raise AssertionError("attempts is at least 1")


def is_stop(exc: Exception) -> bool:
    """Whether something failed only because its run is being stopped."""
    return isinstance(exc, UnavailableError) and exc.code == "run_stopped"


def _is_last(exc: Exception, attempt: int, attempts: int, name: str) -> bool:
    if attempt >= attempts or isinstance(exc, _FINAL):
        logger.error("%s failed for good after %d tries", name, attempt, exc_info=exc)
        return True
    logger.warning("%s failed (try %d of %d): %s", name, attempt, attempts, exc)
    return False
