"""Requests per minute, counted exactly: a state machine on a clock.

Invariant: in no window of sixty seconds are there more requests than allowed, and a refused one does not count.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

_WINDOW = 60.0


class RequestRate:
    """The last minute of one key.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._moments: deque[float] = deque()

    def take(self, limit: int) -> float:
        """Count one more request if there may be ``limit`` a minute.

        Returns:
            0 when it was counted, else the seconds until there is room for it.
        """
        now = self._clock()
        while self._moments and self._moments[0] <= now - _WINDOW:
            self._moments.popleft()
        if len(self._moments) < limit:
            self._moments.append(now)
            return 0.0
        # a limit that was lowered leaves more behind than it allows: as many must go as make room for one
        return self._moments[len(self._moments) - limit] + _WINDOW - now
