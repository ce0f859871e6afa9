"""A circuit breaker: a state machine on a clock, without I/O.

Invariant: while it is open no call passes; half open, one at a time does; a call that began before the last change of
state changes nothing any more.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from enum import StrEnum

#: Of so many last calls, none older than :data:`_WINDOW_SECONDS`, the share of failures is taken.
_WINDOW_CALLS = 20
_WINDOW_SECONDS = 30.0
#: Fewer failures than this say nothing.
_FEWEST_FAILURES = 5
_PAUSE_FIRST, _PAUSE_MOST = 1.0, 30.0


class BreakerState(StrEnum):
    """``closed``: calls pass. ``open``: none does. ``half_open``: one may try."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Trial:
    """One call that was let through; exactly one of its methods is called when it ends."""

    def __init__(self, breaker: Breaker, era: int) -> None:
        self._breaker = breaker
        self._era = era
        self._ended = False

    def succeeded(self) -> None:
        """The upstream answered, be it with an error of the caller's."""
        self._end(True)

    def failed(self) -> None:
        """The upstream did not answer, or that it cannot."""
        self._end(False)

    def abandoned(self) -> None:
        """The caller left before it was known."""
        self._end(None)

    def _end(self, well: bool | None) -> None:
        if not self._ended:
            self._ended = True
            self._breaker.told(self._era, well)


class Breaker:
    """Opens when half of the recent calls failed, at least five; tries again after a pause that doubles up to 30 s.

    Args:
        clock: seconds, monotonic.
        jitter: a factor of each pause, so that gateways do not try at one time.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = lambda: random.uniform(0.75, 1.0),
    ) -> None:
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
        """A call that may go out, to be told how it ended; ``None`` where none may."""
        if not self.admits:
            return None
        if self._opened_until is not None:
            self._trying = True
        return Trial(self, self._era)

    def told(self, era: int, well: bool | None) -> None:
        """How a call of ``era`` ended; calls from before the last change of state are not heard."""
        if era != self._era:
            return
        if self._opened_until is not None:
            self._trying = False
            if well:
                self._close()
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

    def _close(self) -> None:
        self._era += 1
        self._opened_until = None
        self._pause = _PAUSE_FIRST
        self._recent.clear()
