"""Bounded retries of user code.

Invariant: nothing is tried more often than its cap, nor at all again once its run is being stopped.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

from swarm.client.policy import RetryPolicy
from swarm.errors import AuthenticationError, ConfigError, UnavailableError

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: How often ``auto_retry=True`` tries one task.
DEFAULT_ATTEMPTS = 3
#: Repeating cannot help against these.
_FINAL = (ConfigError, AuthenticationError)


def attempts_of(auto_retry: bool | int) -> int:
    """How often a task is tried: ``True`` three times, a number that many times, ``False`` once."""
    return DEFAULT_ATTEMPTS if auto_retry is True else max(1, int(auto_retry))


def with_retries(
    func: Callable[[], T], attempts: int, policy: RetryPolicy, stopping: threading.Event, name: str = "a task"
) -> T:
    """What ``func`` returns in one of at most ``attempts`` tries, or the error of the last one."""
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
    """The same on an event loop."""
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
