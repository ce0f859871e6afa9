"""Who is served now, who waits, and who is told to come back.

Invariant: a route serves at most ``max_in_flight`` requests at once and lets at most ``max_queued`` wait; keys that
wait take turns, whatever each of them has sent; no place is lost, however its holder leaves.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from gateway.config import RouteSettings
from gateway.types import Caller, Outcome, kept
from swarm.errors import OverloadedError

#: Of each request that ends, the share in the average of how long requests are served.
_SMOOTHING = 0.1
_SHORTEST_RETRY, _LONGEST_RETRY = 1.0, 60.0


class Guarded(Protocol):
    """What admission needs to know of a route."""

    @property
    def name(self) -> str: ...

    @property
    def settings(self) -> RouteSettings: ...


@dataclass(frozen=True, slots=True)
class Load:
    """How full a route is; ``held_bytes`` are the bodies of those served and of those waiting, ``refused`` counts those
    who were sent away since the start."""

    in_flight: int
    queued: int
    held_bytes: int
    refused: int = 0


@dataclass(slots=True, eq=False)
class _Waiter:
    caller: Caller
    granted: asyncio.Future[None]


@dataclass(slots=True)
class _Gate:
    """The places of one route. Queues stand in the order in which their keys are next."""

    settings: RouteSettings
    in_flight: int = 0
    queued: int = 0
    held_bytes: int = 0
    refused: int = 0
    seconds: float | None = None
    queues: OrderedDict[str, deque[_Waiter]] = field(default_factory=OrderedDict[str, deque[_Waiter]])

    def ended(self, seconds: float) -> None:
        known = seconds if self.seconds is None else self.seconds
        self.seconds = known + _SMOOTHING * (seconds - known)

    def estimate(self) -> float:
        """Seconds until those who wait now are served, as fast as others were."""
        turn = (self.seconds or 0.0) / self.settings.max_in_flight
        return min(max((self.queued + 1) * turn, _SHORTEST_RETRY), _LONGEST_RETRY)


class Place:
    """One request's place; held until the block that took it ends, or longer by :meth:`keep`."""

    def __init__(self, admission: Admission, gate: _Gate, caller: Caller, size: int) -> None:
        self._admission = admission
        self._gate = gate
        self._caller = caller
        self._size = size
        self._since = time.monotonic()
        self._held = True
        self.kept = False

    def keep(self, outcome: Outcome) -> Outcome:
        """Hold the place until ``outcome`` is closed."""
        self.kept = True
        return kept(outcome, self.release)

    def release(self) -> None:
        """Give the place to who is next; once."""
        if self._held:
            self._held = False
            self._gate.ended(time.monotonic() - self._since)
            self._admission.left(self._gate, self._caller, self._size)


class Admission:
    """All places of one gateway; of one event loop."""

    def __init__(self) -> None:
        self._gates: dict[str, _Gate] = {}
        self._keys: Counter[str] = Counter()

    def load(self, route_name: str) -> Load:
        """How full a route is now."""
        gate = self._gates.get(route_name)
        if gate is None:
            return Load(0, 0, 0, 0)
        return Load(gate.in_flight, gate.queued, gate.held_bytes, gate.refused)

    @asynccontextmanager
    async def place(self, route: Guarded, caller: Caller, size: int = 0) -> AsyncGenerator[Place]:
        """Wait for a place on ``route`` and hold it while the block runs; as of :meth:`enter`."""
        place = await self.enter(route, caller, size)
        try:
            yield place
        except BaseException:
            place.release()
            raise
        else:
            if not place.kept:
                place.release()

    async def enter(self, route: Guarded, caller: Caller, size: int) -> Place:
        """Wait for a place on ``route``, to be released by whoever asked.

        Args:
            route: its settings bound the wait.
            caller: keys take turns; ``caller.max_in_flight`` bounds how many places this one has, on all routes.
            size: bytes of the request's body.

        Raises:
            OverloadedError: too many wait already, or the wait took ``queue_seconds``; ``retry_after`` is an estimate.
        """
        settings = route.settings
        gate = self._gates.setdefault(route.name, _Gate(settings))
        gate.settings = settings
        if gate.held_bytes and gate.held_bytes + size > settings.max_held_bytes:
            raise _overloaded(gate, f"{gate.held_bytes} bytes of requests are being served or wait")
        gate.held_bytes += size
        try:
            if gate.in_flight < settings.max_in_flight and not self._at_limit(caller):
                self._take(gate, caller)
            else:
                await self._wait(gate, caller)
        except BaseException:
            gate.held_bytes -= size
            raise
        return Place(self, gate, caller, size)

    async def _wait(self, gate: _Gate, caller: Caller) -> None:
        if gate.queued >= gate.settings.max_queued:
            self._make_room(gate, caller)
        waiter = _Waiter(caller, asyncio.get_running_loop().create_future())
        gate.queues.setdefault(caller.key_id, deque()).append(waiter)
        gate.queued += 1
        try:
            async with asyncio.timeout(gate.settings.queue_seconds):
                await waiter.granted
        except TimeoutError:
            if not _is_granted(waiter):
                self._withdraw(gate, waiter)
                raise _overloaded(gate, f"no place within {gate.settings.queue_seconds:g} s") from None
        except asyncio.CancelledError:
            if _is_granted(waiter):
                self._give_back(gate, caller)
            else:
                self._withdraw(gate, waiter)
            raise

    def _make_room(self, gate: _Gate, caller: Caller) -> None:
        """Send away the last of the key that waits most, where that has two more than ``caller``'s; else raise."""
        own = len(gate.queues.get(caller.key_id, ()))
        longest = max(gate.queues.values(), key=len, default=None)
        if longest is None or len(longest) < own + 2:
            raise _overloaded(gate, f"{gate.in_flight} requests are being served and {gate.queued} wait")
        waiter = longest[-1]
        self._withdraw(gate, waiter)
        waiter.granted.set_exception(_overloaded(gate, "others wait who have sent less"))

    def _withdraw(self, gate: _Gate, waiter: _Waiter) -> None:
        key = waiter.caller.key_id
        queue = gate.queues.get(key)
        if queue is not None and waiter in queue:
            queue.remove(waiter)
            gate.queued -= 1
            if not queue:
                del gate.queues[key]

    def _at_limit(self, caller: Caller) -> bool:
        return caller.max_in_flight is not None and self._keys[caller.key_id] >= caller.max_in_flight

    def _take(self, gate: _Gate, caller: Caller) -> None:
        gate.in_flight += 1
        self._keys[caller.key_id] += 1

    def left(self, gate: _Gate, caller: Caller, size: int) -> None:
        """A place of ``gate`` is free again."""
        gate.held_bytes -= size
        self._give_back(gate, caller)

    def _give_back(self, gate: _Gate, caller: Caller) -> None:
        gate.in_flight -= 1
        self._keys[caller.key_id] -= 1
        if not self._keys[caller.key_id]:
            del self._keys[caller.key_id]
        # a key that was at its limit may wait on other routes
        for waiting in self._gates.values():
            if waiting.queued:
                self._admit(waiting)

    def _admit(self, gate: _Gate) -> None:
        """Give free places away, to each key in turn."""
        while gate.in_flight < gate.settings.max_in_flight:
            key = next((key for key, queue in gate.queues.items() if not self._at_limit(queue[0].caller)), None)
            if key is None:
                return
            queue = gate.queues[key]
            waiter = queue.popleft()
            gate.queued -= 1
            if queue:
                gate.queues.move_to_end(key)
            else:
                del gate.queues[key]
            if not waiter.granted.done():
                self._take(gate, waiter.caller)
                waiter.granted.set_result(None)


def _is_granted(waiter: _Waiter) -> bool:
    granted = waiter.granted
    return granted.done() and not granted.cancelled() and granted.exception() is None


def _overloaded(gate: _Gate, why: str) -> OverloadedError:
    """The error of one who is sent away, which is counted here."""
    gate.refused += 1
    return OverloadedError(f"{why}: come back in a while", retry_after=gate.estimate())
