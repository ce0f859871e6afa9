"""How a call to vLLM fails, told apart by what helps, and how often it is tried.

Invariant: every retry is counted and paused for.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

from swarm.errors import UpstreamError

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0


class UpstreamRefusalError(UpstreamError):
    """vLLM refused the request (a context too long, a bad field): its status and body go to the caller."""

    def __init__(self, status: int, payload: dict[str, Any]) -> None:
        super().__init__(f"vLLM answered {status}")
        self.status = status
        self._payload = payload

    def body(self) -> dict[str, Any]:
        return self._payload


class TransientError(UpstreamError):
    """vLLM aborted, failed or could not be reached; the same request may succeed in a moment."""


class AbortedError(TransientError):
    """vLLM aborted the call: it is replacing its weights."""

    def __init__(self) -> None:
        super().__init__("vLLM aborted the call")


class UnreachableError(TransientError):
    """No connection to this replica could be made; nothing was sent."""


class Retries:
    """The tries of one call: a cap, and pauses that double up to two seconds, with jitter."""

    def __init__(self, attempts: int) -> None:
        self._left = attempts
        self._pause = _FIRST_PAUSE

    async def after(self, error: TransientError) -> None:
        """Pause before the next try.

        Raises:
            UpstreamError: that was the last one.
        """
        self._left -= 1
        if self._left <= 0:
            raise UpstreamError(f"the engine could not complete the call: {error.message}") from error
        await asyncio.sleep(self._pause * random.uniform(0.5, 1.0))
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
