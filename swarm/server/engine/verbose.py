"""Lines that a trainer or an operator pushes for the monitor.

Invariant: a line is gone after :data:`KEPT_SECONDS`, and there are at most :data:`MAX_LINES`, however many are pushed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from swarm.protocol import LogEntry

KEPT_SECONDS = 30.0
MAX_LINES = 200
#: characters of a line and of its tag
MAX_MESSAGE, MAX_TAG = 2000, 100


class VerboseLog:
    """The latest lines, oldest first.

    Args:
        wall: Unix seconds.
    """

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._lines: deque[LogEntry] = deque(maxlen=MAX_LINES)

    def push(self, tag: str, message: str) -> None:
        """Keep a line for a while, cut where it is too long."""
        self._lines.append(LogEntry(timestamp=self._wall(), tag=tag[:MAX_TAG], message=message[:MAX_MESSAGE]))

    def entries(self) -> list[LogEntry]:
        """The lines that are young enough."""
        oldest = self._wall() - KEPT_SECONDS
        while self._lines and self._lines[0].timestamp < oldest:
            self._lines.popleft()
        return list(self._lines)
