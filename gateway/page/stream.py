"""One stream of events for each open page: server-sent events that go on where a page lost them.

Invariant: the rows that are kept are bounded. A page that missed more than these gets an event that has the page read
everything anew. Every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from itertools import takewhile
from typing import Any

from adapters.dialects.jsons import encode
from gateway.types import Caller
from swarm.concurrency import Latest, Signal
from swarm.errors import SwarmGatewayError

#: Longest silence, so that a dead connection is noticed.
_SILENCE = 15.0
#: Time in which changes are collected, so that a busy gateway does not redraw pages all the time.
_COLLECTING = 0.3
#: How often a stream looks whether its page may still look, and whether the server is being stopped.
_GLANCE = 2.0
_MOST_ROWS = 2000


class Events:
    """The last row of each group, by the number of its event. Numbers grow from one start of the gateway to the
    next."""

    def __init__(self) -> None:
        #: of the last event, and of the last that a page may have missed for good
        self._number = self._lost = time.time_ns()
        self._rows = Latest[str, tuple[int, str, dict[str, Any]]](_MOST_ROWS)
        self._changed = Signal()

    def add(self, group_id: str, route: str, row: dict[str, Any]) -> None:
        """Pass a row on to all pages."""
        if len(self._rows) == _MOST_ROWS and group_id not in self._rows:
            self._lost, _, _ = next(iter(self._rows.values()))
        self._number += 1
        self._rows[group_id] = self._number, route, row
        self._changed.notify()

    def forget(self) -> None:
        """Drop all rows; all pages read everything anew."""
        self._rows.clear()
        self._number += 1
        self._lost = self._number
        self._changed.notify()

    @property
    def latest(self) -> str:
        """The id of the last event."""
        return str(self._number)

    async def follow(self, look: Callable[[], Caller], last_id: str) -> AsyncIterator[bytes]:
        """The bytes of a stream.

        Args:
            look: the caller, whose routes the stream may show now; raises an error that says why the stream ends.
            last_id: of the last event that the page got; empty: it begins with the present.
        """
        loop = asyncio.get_running_loop()
        spoke = loop.time()
        last_id = last_id or self.latest
        number = int(last_id) if last_id.isascii() and last_id.isdigit() and len(last_id) < 30 else 0
        yield b"retry: 2000\n\n" + _event(number, "hello", {})
        while True:
            try:
                caller = look()
            except SwarmGatewayError as exc:
                yield _event(0, "bye", {"why": exc.message})
                return
            if not self._lost <= number <= self._number:
                number = self._number
                yield _event(number, "reset", {})
            if number != self._number:
                rows = self._since(number, caller)
                number = self._number
                if rows:
                    # each its own id: the connection may be cut between two
                    yield b"".join(_event(event, "group", row) for event, row in rows)
                    spoke = loop.time()
                await asyncio.sleep(_COLLECTING)
                continue
            if loop.time() - spoke > _SILENCE:
                yield b": still here\n\n"
                spoke = loop.time()
            with suppress(TimeoutError):
                async with asyncio.timeout(_GLANCE):
                    await self._changed.wait()

    def _since(self, number: int, caller: Caller) -> list[tuple[int, dict[str, Any]]]:
        newer = takewhile(lambda kept: kept[0] > number, reversed(self._rows.values()))
        return [(event, row) for event, route, row in newer if caller.opens(route)][::-1]


def _event(event_id: int, kind: str, data: dict[str, Any]) -> bytes:
    head = f"id: {event_id}\n" if event_id else ""
    return f"{head}event: {kind}\n".encode() + b"data: " + encode(data) + b"\n\n"
