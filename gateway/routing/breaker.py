"""The health of an upstream: a circuit breaker with a cool-down, and a probe that ends it.

Invariant: while the breaker is open no call passes; half open, one at a time does; a call that began before the last
change of state changes nothing. At most one probe is under way, with a deadline, and only while it is not closed.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from enum import StrEnum

from swarm.errors import UnavailableError

logger = logging.getLogger(__name__)

#: The share of failures is taken over so many last calls, none older than :data:`_WINDOW_SECONDS`.
_WINDOW_CALLS = 20
_WINDOW_SECONDS = 30.0
#: Fewer failures than this are no evidence.
_FEWEST_FAILURES = 5
_PAUSE_FIRST, _PAUSE_MOST = 1.0, 30.0
#: Seconds between looks while a request itself is the trial.
_LOOK_AGAIN_SECONDS = 1.0


class BreakerState(StrEnum):
    """``closed``: calls pass. ``open``: none does. ``half_open``: one may try."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Trial:
    """One call that was let through; call :meth:`end` when it ends, once."""

    def __init__(self, breaker: Breaker, era: int) -> None:
        self._breaker = breaker
        self._era = era
        self._ended = False

    def end(self, well: bool | None) -> None:
        """``True``: the upstream answered, even with an error of the caller's. ``False``: it failed. ``None``: the
        caller left before that was known."""
        if not self._ended:
            self._ended = True
            self._breaker.ended(self._era, well)


class Breaker:
    """Opens when half of the recent calls failed, at least five; tries again after a pause that doubles up to 30 s.

    Args:
        name: of the upstream, for people.
        probe: a cheap call to the upstream with a deadline; whether it was answered.
        clock: seconds, monotonic.
        jitter: a factor of each pause, so that gateways do not try at the same time.
    """

    def __init__(
        self,
        name: str,
        probe: Callable[[], Awaitable[bool]],
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = lambda: random.uniform(0.75, 1.0),
    ) -> None:
        self._name = name
        self._probe = probe
        self._probing: asyncio.Task[None] | None = None
        self._clock = clock
        self._jitter = jitter
        self._era = 0
        self._recent: deque[tuple[float, bool]] = deque(maxlen=_WINDOW_CALLS)
        self._opened_until: float | None = None
        self._trying = False
        self._pause = _PAUSE_FIRST

    @property
    def state(self) -> BreakerState:
        """The state now."""
        if self._opened_until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self._clock() < self._opened_until else BreakerState.HALF_OPEN

    @property
    def admits(self) -> bool:
        """Whether :meth:`enter` would let a call through now."""
        state = self.state
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and not self._trying)

    @property
    def retry_after(self) -> float:
        """Seconds until a call may be tried; 0 while one may."""
        return 0.0 if self._opened_until is None else max(0.0, self._opened_until - self._clock())

    def enter(self) -> Trial | None:
        """A call that may go out; ``None`` where none may."""
        if not self.admits:
            return None
        if self._opened_until is not None:
            self._trying = True
        return Trial(self, self._era)

    @asynccontextmanager
    async def call(self) -> AsyncGenerator[Trial]:
        """One call to the upstream: end the trial, or leave by an error, which counts as a failure.

        Raises:
            UnavailableError: the upstream is known to fail.
        """
        trial = self.enter()
        if trial is None:
            raise UnavailableError(
                f"{self._name} fails and is left alone for a while",
                code="upstream_unavailable",
                retry_after=max(self.retry_after, 1.0),
            )
        try:
            yield trial
        except Exception:
            trial.end(False)
            raise
        finally:
            trial.end(None)
            if self.state is not BreakerState.CLOSED and (self._probing is None or self._probing.done()):
                logger.warning("%s fails: no requests go there until it answers", self._name)
                self._probing = asyncio.create_task(self._probe_until_closed(), name=f"probing {self._name}")

    async def close(self) -> None:
        """Stop probing."""
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.wait({self._probing})

    async def _probe_until_closed(self) -> None:
        while self.state is not BreakerState.CLOSED:
            await asyncio.sleep(self.retry_after or _LOOK_AGAIN_SECONDS)
            if (trial := self.enter()) is not None:
                trial.end(await self._probe())
        logger.warning("%s answers again", self._name)

    def ended(self, era: int, well: bool | None) -> None:
        """A call of ``era`` ended; see :meth:`Trial.end`."""
        if era != self._era:
            return
        if self._opened_until is not None:
            self._trying = False
            if well:
                self._era += 1
                self._opened_until = None
                self._pause = _PAUSE_FIRST
                self._recent.clear()
            elif well is False:
                self._open()
        elif well is not None:
            now = self._clock()
            self._recent.append((now, well))
            while self._recent[0][0] < now - _WINDOW_SECONDS:
                self._recent.popleft()
            failures = sum(not well for _, well in self._recent)
            if failures >= _FEWEST_FAILURES and failures * 2 >= len(self._recent):
                self._open()

    def _open(self) -> None:
        self._era += 1
        self._opened_until = self._clock() + self._pause * self._jitter()
        self._pause = min(self._pause * 2, _PAUSE_MOST)
