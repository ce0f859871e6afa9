"""A circuit breaker with a cool-down: leaves a failing upstream alone, and then lets one request try it.

Invariant: while it is not closed, one request passes for each pause, whatever becomes of it, and the pauses double; a
request that began before an outage changes nothing after it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from enum import StrEnum

from swarm.concurrency import backoff
from swarm.errors import UnavailableError

logger = logging.getLogger(__name__)

#: The share of failures is taken over so many last calls, none older than :data:`_WINDOW_SECONDS`.
_WINDOW_CALLS = 20
_WINDOW_SECONDS = 30.0
#: Fewer failures than this are no evidence.
_FEWEST_FAILURES = 5
#: Seconds before a request may try; jittered, so that gateways do not try at the same time.
_PAUSE_FIRST, _PAUSE_MOST = 1.0, 30.0


class BreakerState(StrEnum):
    """``closed``: requests pass. ``open``: none passes. ``half_open``: the pause is over, and one request may try."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Passage:
    """One request that was let through; ``failed`` counts against the upstream."""

    failed = False


class Breaker:
    """Opens when half of the recent calls failed, at least five; closes when a request that tries is answered.

    Args:
        name: of the upstream, for people.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        #: pauses of this outage so far
        self._pauses = 0
        self._recent: deque[tuple[float, bool]] = deque(maxlen=_WINDOW_CALLS)
        #: counts times between two changes from or to closed
        self._period = 0
        self._closed = True
        self._retry_at = 0.0

    @property
    def state(self) -> BreakerState:
        """What becomes of a request now."""
        if self._closed:
            return BreakerState.CLOSED
        return BreakerState.OPEN if time.monotonic() < self._retry_at else BreakerState.HALF_OPEN

    @contextmanager
    def call(self) -> Generator[Passage]:
        """One request to the upstream; an exception counts as a failure, a cancellation as nothing.

        Raises:
            UnavailableError: the breaker is open.
        """
        state = self.state
        if state is BreakerState.OPEN:
            raise UnavailableError(
                f"{self._name} fails and is left alone for a while",
                code="upstream_unavailable",
                retry_after=max(self._retry_at - time.monotonic(), 1.0),
            )
        if state is BreakerState.HALF_OPEN:
            # at its start: it may take long, and the next one must not wait for it
            self._wait()
        period, call = self._period, Passage()
        try:
            yield call
        except Exception:
            call.failed = True
            self._ended(period, call)
            raise
        else:
            self._ended(period, call)

    def _ended(self, period: int, call: Passage) -> None:
        """A request that began in ``period`` has ended."""
        if period != self._period:
            return
        if not self._closed:
            if not call.failed:
                logger.warning("%s answers again", self._name)
                self._closed, self._period = True, period + 1
                self._recent.clear()
            return
        now = time.monotonic()
        self._recent.append((now, call.failed))
        while self._recent[0][0] < now - _WINDOW_SECONDS:
            self._recent.popleft()
        failures = sum(failed for _, failed in self._recent)
        if failures >= _FEWEST_FAILURES and failures * 2 >= len(self._recent):
            logger.warning("%s fails: no requests go there for a while", self._name)
            self._closed, self._period, self._pauses = False, period + 1, 0
            self._wait()

    def _wait(self) -> None:
        self._pauses += 1
        self._retry_at = time.monotonic() + backoff(self._pauses, _PAUSE_FIRST, _PAUSE_MOST)
