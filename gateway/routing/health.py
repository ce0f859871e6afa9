"""Whether an upstream is well: what its calls told, and while they say it is not, a question now and then.

Invariant: no more than one question is under way, each with a deadline, and only while the breaker is not closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from gateway.routing.breaker import Breaker, BreakerState, Trial
from swarm.errors import UnavailableError

logger = logging.getLogger(__name__)

#: Where another call tries already, its end is looked for so often.
_LOOK_AGAIN_SECONDS = 1.0


class Health:
    """The breaker of one upstream, and who asks after it.

    Args:
        name: of the upstream, for people.
        ask: a cheap question to the upstream; whether it was answered in time.
        breaker: its state.
    """

    def __init__(self, name: str, ask: Callable[[], Awaitable[bool]], breaker: Breaker) -> None:
        self._name = name
        self._ask = ask
        self._breaker = breaker
        self._asking: asyncio.Task[None] | None = None

    @property
    def state(self) -> BreakerState:
        """The breaker's."""
        return self._breaker.state

    @property
    def available(self) -> bool:
        """Whether a call would be let through now."""
        return self._breaker.admits

    @asynccontextmanager
    async def call(self) -> AsyncGenerator[Trial]:
        """One call to the upstream: tell the trial how it ended, or leave by an error, which is taken as a failure.

        Raises:
            UnavailableError: the upstream is known to fail.
        """
        trial = self._breaker.enter()
        if trial is None:
            raise UnavailableError(
                f"{self._name} fails and is left alone for a while",
                code="upstream_unavailable",
                retry_after=max(self._breaker.retry_after, 1.0),
            )
        try:
            yield trial
        except Exception:
            trial.failed()
            raise
        finally:
            trial.abandoned()
            self._watch()

    def _watch(self) -> None:
        if self._breaker.state is not BreakerState.CLOSED and (self._asking is None or self._asking.done()):
            logger.warning("%s fails: no requests go there until it answers", self._name)
            self._asking = asyncio.create_task(self._ask_until_well(), name=f"asking after {self._name}")

    async def _ask_until_well(self) -> None:
        while self._breaker.state is not BreakerState.CLOSED:
            await asyncio.sleep(self._breaker.retry_after or _LOOK_AGAIN_SECONDS)
            if (trial := self._breaker.enter()) is None:
                continue
            if await self._ask():
                trial.succeeded()
            else:
                trial.failed()
        logger.warning("%s answers again", self._name)

    async def close(self) -> None:
        """Ask no more."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait({self._asking})
