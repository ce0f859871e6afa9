"""Calls that let go of what a server holds for us, kept while there is none to hear them.

Invariant: no more than :data:`MAX_OWED` are kept, and however many threads and tasks ask, one of them gets a call.
"""

from __future__ import annotations

from collections import deque

from swarm.client import wire
from swarm.protocol import SuccessResponse

#: The oldest are forgotten beyond that: the idle timeout of their episodes does the same job later.
MAX_OWED = 10_000

ReleaseCall = wire.Call[SuccessResponse]


class Owed:
    """Oldest first; safe to use from any thread, also from a destructor: a deque's own steps are atomic."""

    def __init__(self) -> None:
        self._calls: deque[ReleaseCall] = deque(maxlen=MAX_OWED)

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: ReleaseCall) -> None:
        """There was no server to hear ``call``."""
        self._calls.append(call)

    def take(self) -> ReleaseCall | None:
        """The oldest, the caller's from now on; ``None`` if nothing is owed."""
        try:
            return self._calls.popleft()
        except IndexError:
            return None
