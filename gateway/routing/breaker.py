"""A circuit breaker with a cool-down: leaves a failing upstream alone until it answers a probe or a trial request.

Invariant: while it is not closed, at most one request passes per failed probe, and one probe at a time is due or under
way; a request that began before an outage changes nothing after it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from enum import StrEnum

from swarm.errors import UnavailableError

logger = logging.getLogger(__name__)

#: The share of failures is taken over so many last calls, none older than :data:`_WINDOW_SECONDS`.
_WINDOW_CALLS = 20
_WINDOW_SECONDS = 30.0
#: Fewer failures than this are no evidence.
_FEWEST_FAILURES = 5
_PAUSE_FIRST, _PAUSE_MOST = 1.0, 30.0


class BreakerState(StrEnum):
    """``closed``: requests pass. ``open``: none passes until a probe ends. ``half_open``: the probe failed, and one
    request may try."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Call:
    """One request that was let through; ``failed`` counts against the upstream."""

    failed = False


class Breaker:
    """Opens when half of the recent calls failed, at least five; probes after a pause that doubles up to 30 s.

    Args:
        name: of the upstream, for people.
        probe: a cheap call to the upstream with a deadline; whether it was answered.
        pause: seconds before the first probe.
    """

    def __init__(self, name: str, probe: Callable[[], Awaitable[bool]], pause: float = _PAUSE_FIRST) -> None:
        self._name = name
        self._probe = probe
        self._pause = pause
        self._recent: deque[tuple[float, bool]] = deque(maxlen=_WINDOW_CALLS)
        self._probing: asyncio.Task[None] | None = None
        self._probe_at = 0.0
        self.state = BreakerState.CLOSED

    @property
    def admits(self) -> bool:
        """Whether a request would be let through now."""
        return self.state is not BreakerState.OPEN

    @contextmanager
    def call(self) -> Generator[Call]:
        """One request to the upstream; an exception counts as a failure, a cancellation as nothing.

        Raises:
            UnavailableError: the breaker is open.
        """
        if not self.admits:
            raise UnavailableError(
                f"{self._name} fails and is left alone for a while",
                code="upstream_unavailable",
                retry_after=max(self._probe_at - asyncio.get_running_loop().time(), 1.0),
            )
        period, call, trial = self._probing, Call(), self.state is BreakerState.HALF_OPEN
        if trial:
            self.state = BreakerState.OPEN
        try:
            yield call
        except Exception:
            self._ended(period, trial, failed=True)
            raise
        else:
            self._ended(period, trial, failed=call.failed)

    async def close(self) -> None:
        """Stop probing."""
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.wait({self._probing})

    def _ended(self, period: asyncio.Task[None] | None, trial: bool, *, failed: bool) -> None:
        """A request ended that began in ``period``: between two outages, or as a ``trial`` in one."""
        if period is not self._probing:
            return
        if trial and not failed and period is not None and self.state is not BreakerState.CLOSED:
            period.cancel()
            self._close()
        if trial or self.state is not BreakerState.CLOSED:
            return
        now = asyncio.get_running_loop().time()
        self._recent.append((now, failed))
        while self._recent[0][0] < now - _WINDOW_SECONDS:
            self._recent.popleft()
        failures = sum(failed for _, failed in self._recent)
        if failures >= _FEWEST_FAILURES and failures * 2 >= len(self._recent):
            logger.warning("%s fails: no requests go there until it answers", self._name)
            self.state = BreakerState.OPEN
            self._probing = asyncio.create_task(self._probe_until_answered(), name=f"probing {self._name}")

    async def _probe_until_answered(self) -> None:
        pause, answered = self._pause, False
        while not answered:
            # jitter, so that gateways do not probe at the same time
            seconds = pause * random.uniform(0.75, 1.0)
            self._probe_at = asyncio.get_running_loop().time() + seconds
            await asyncio.sleep(seconds)
            pause = min(pause * 2, _PAUSE_MOST)
            self.state = BreakerState.OPEN
            try:
                answered = await self._probe()
            except Exception:
                # whatever it was, the next probe must come
                logger.exception("probing %s failed", self._name)
            self.state = BreakerState.HALF_OPEN
        self._close()

    def _close(self) -> None:
        self.state = BreakerState.CLOSED
        self._recent.clear()
        logger.warning("%s answers again", self._name)
