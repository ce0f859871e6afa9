"""One stream of events for each open page: server-sent events that go on where a page lost them.

Invariant: the buffer is bounded. A page that missed more events than the buffer holds gets an event that has the page
read everything anew. Every wait has a deadline, and a stream ends after :data:`STREAM_SECONDS`, and says so: the page
then opens the next.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from adapters.dialects.jsons import encode
from gateway.types import Caller
from swarm.concurrency import Signal
from swarm.errors import SwarmGatewayError

STREAM_SECONDS = 300.0
#: Longest silence, so that a dead connection is noticed.
_SILENCE = 15.0
#: Time in which changes are collected, so that a busy gateway does not redraw pages all the time.
_COLLECTING = 0.3
#: How often a stream looks whether its page may still look, and whether the server is being stopped.
_GLANCE = 2.0
_MOST_EVENTS = 2000
RETRY = b"retry: 2000\n\n"


class Events:
    """What happened lately: numbered rows, each of one group; of one group the last counts."""

    def __init__(self) -> None:
        self._epoch = secrets.token_hex(4)
        self._number = 0
        self._events: deque[tuple[int, str, str, dict[str, Any]]] = deque(maxlen=_MOST_EVENTS)
        self._changed = Signal()

    def add(self, group_id: str, route: str, row: dict[str, Any]) -> None:
        """Pass a row on to all pages."""
        self._number += 1
        self._events.append((self._number, group_id, route, row))
        self._changed.notify()

    def forget(self, gone: Callable[[str], bool]) -> None:
        """Drop the rows of the groups that are ``gone``, by their id; all pages read everything anew."""
        kept = [event for event in self._events if not gone(event[1])]
        self._events = deque(kept, maxlen=_MOST_EVENTS)
        self._epoch = secrets.token_hex(4)
        self._changed.notify()

    @property
    def latest(self) -> str:
        """The id of the last event."""
        return f"{self._epoch}-{self._number}"

    async def follow(
        self, look: Callable[[], Caller], last_id: str, seconds: float = STREAM_SECONDS
    ) -> AsyncIterator[bytes]:
        """The bytes of a stream.

        Args:
            look: the caller, whose routes the stream may show now; raises an error that says why the stream ends.
            last_id: of the last event that the page got; empty: it begins with the present.
        """
        loop = asyncio.get_running_loop()
        until, spoke = loop.time() + seconds, loop.time()
        yield RETRY
        number, epoch = self._resumed(last_id), self._epoch
        if number is None:
            number = self._number
            yield _event(self.latest, "reset", {})
        else:
            yield _event(f"{epoch}-{number}", "hello", {})
        while loop.time() < until:
            try:
                caller = look()
            except SwarmGatewayError as exc:
                yield _event("", "bye", {"why": exc.message})
                return
            if epoch != self._epoch:
                number, epoch = self._number, self._epoch
                yield _event(self.latest, "reset", {})
            rows = self._since(number, caller)
            if number != self._number:
                number = self._number
                if rows:
                    # each its own id: the connection may be cut between two
                    yield b"".join(_event(f"{epoch}-{event}", "group", row) for event, row in rows)
                    spoke = loop.time()
                await asyncio.sleep(_COLLECTING)
                continue
            if loop.time() - spoke > _SILENCE:
                yield b": still here\n\n"
                spoke = loop.time()
            with suppress(TimeoutError):
                async with asyncio.timeout(_GLANCE):
                    await self._changed.wait()
        yield _event("", "over", {})

    def _resumed(self, last_id: str) -> int | None:
        """The number from which to go on; ``None``: events in between are gone."""
        if not last_id:
            return self._number
        epoch, _, text = last_id.partition("-")
        if epoch != self._epoch or not (text.isascii() and text.isdigit()) or len(text) > 18:
            return None
        number = int(text)
        first = self._events[0][0] if self._events else self._number + 1
        return number if first - 1 <= number <= self._number else None

    def _since(self, number: int, caller: Caller) -> list[tuple[int, dict[str, Any]]]:
        rows: dict[str, tuple[int, dict[str, Any]]] = {}
        for event, group_id, route, row in reversed(self._events):
            if event <= number:
                break
            if caller.opens(route):
                rows.setdefault(group_id, (event, row))
        return list(reversed(rows.values()))


def _event(event_id: str, kind: str, data: dict[str, Any]) -> bytes:
    head = f"id: {event_id}\n" if event_id else ""
    return f"{head}event: {kind}\n".encode() + b"data: " + encode(data) + b"\n\n"
