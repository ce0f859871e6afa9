"""Who is served now, who waits, and who is told to come back.

Invariant: a route serves at most ``max_in_flight`` requests at once and lets at most ``max_queued`` wait; keys that wait
take turns, whatever each of them has sent; no place is lost, however its holder leaves.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

from gateway.config import RouteSettings
from gateway.forms import Caller, Outcome


class Guarded(Protocol):
    """What admission needs to know of a route."""

    @property
    def name(self) -> str: ...

    @property
    def settings(self) -> RouteSettings: ...


class Place:
    """One request's place; held until the block that took it ends, or longer by :meth:`keep`."""

    def keep(self, outcome: Outcome) -> Outcome:
        """Hold the place until ``outcome`` is closed, if it is one that streams; what is whole needs none any more."""
        raise NotImplementedError


class Admission:
    """All places of one gateway; of one event loop."""

    @asynccontextmanager
    async def place(self, route: Guarded, caller: Caller, size: int = 0) -> AsyncIterator[Place]:
        """Wait for a place on ``route`` and hold it while the block runs.

        Args:
            route: its settings bound the wait.
            caller: keys take turns; ``caller.max_in_flight`` bounds how many places this one has, on all routes.
            size: bytes of the request's body.

        Raises:
            OverloadedError: too many wait already, or the wait took ``queue_seconds``; ``retry_after`` is an estimate.
        """
        raise NotImplementedError
        yield
