"""Admission: a semaphore and a bounded queue per route, and a semaphore per key that has a bound of its own.

Invariant: a route serves at most ``max_in_flight`` requests at once and lets at most ``max_queued`` wait, as many for
each key's own place, each for at most ``queue_seconds``; no place is lost, however its holder leaves. A reload that
changes ``max_in_flight`` counts the requests of the old bound apart until they have ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.config.route import RouteSettings
from gateway.types import Caller
from swarm.errors import OverloadedError

#: Weight of each ended request in the average of how long requests are served.
_SMOOTHING = 0.1
_SHORTEST_RETRY, _LONGEST_RETRY = 1.0, 60.0


@dataclass(slots=True)
class Load:
    """How full a route is; ``refused`` counts requests turned away since the start, ``seconds`` is the average time of
    service."""

    in_flight: int = 0
    queued: int = 0
    refused: int = 0
    seconds: float | None = None

    def ended(self, seconds: float) -> None:
        """A request was served for ``seconds``."""
        known = seconds if self.seconds is None else self.seconds
        self.seconds = known + _SMOOTHING * (seconds - known)


@dataclass(slots=True)
class Admission:
    """All places of one gateway; of one event loop."""

    _loads: dict[str, Load] = field(default_factory=dict[str, Load])
    _places: dict[tuple[str, int], asyncio.Semaphore] = field(default_factory=dict[tuple[str, int], asyncio.Semaphore])
    #: by key, only for its queue
    _keys: dict[str, Load] = field(default_factory=dict[str, Load])

    def load(self, route: str) -> Load:
        """How full the route of that name is now."""
        return self._loads.setdefault(route, Load())

    async def enter(self, route: str, settings: RouteSettings, caller: Caller) -> Callable[[], None]:
        """Wait for a place on a route, and for one of the caller's own where its key is bounded.

        Returns:
            Releases the place; call it once.

        Raises:
            OverloadedError: too many wait already, or the wait took ``queue_seconds``; ``retry_after`` is an estimate.
        """
        load = self.load(route)
        deadline = asyncio.get_running_loop().time() + settings.queue_seconds
        held: list[asyncio.Semaphore] = []

        def free() -> None:
            for place in held:
                place.release()

        async def take(place: asyncio.Semaphore, queue: Load) -> None:
            if not place.locked():
                await place.acquire()
            elif queue.queued >= settings.max_queued:
                raise _overloaded(load, settings, f"{load.in_flight} requests are being served and {queue.queued} wait")
            else:
                queue.queued += 1
                try:
                    async with asyncio.timeout_at(deadline):
                        await place.acquire()
                except TimeoutError:
                    raise _overloaded(load, settings, f"no place within {settings.queue_seconds:g} s") from None
                finally:
                    queue.queued -= 1
            held.append(place)

        try:
            if caller.max_in_flight is not None:
                # first, so that a request that waits for its key takes no place of the route, nor of its queue
                key = self._semaphore(f"key {caller.key_id}", caller.max_in_flight)
                await take(key, self._keys.setdefault(caller.key_id, Load()))
            await take(self._semaphore(f"route {route}", settings.max_in_flight), load)
        except BaseException:
            free()
            raise
        load.in_flight += 1
        started = time.monotonic()

        def release() -> None:
            load.in_flight -= 1
            load.ended(time.monotonic() - started)
            free()

        return release

    def _semaphore(self, name: str, bound: int) -> asyncio.Semaphore:
        if (place := self._places.get((name, bound))) is None:
            place = self._places[name, bound] = asyncio.Semaphore(bound)
        return place


def _overloaded(load: Load, settings: RouteSettings, why: str) -> OverloadedError:
    load.refused += 1
    turn = (load.seconds or 0.0) / settings.max_in_flight
    estimate = min(max((load.queued + 1) * turn, _SHORTEST_RETRY), _LONGEST_RETRY)
    return OverloadedError(f"{why}: come back in a while", retry_after=estimate)
