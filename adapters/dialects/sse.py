"""Server-sent events, both ways.

Invariant: the byte stream may be cut anywhere; lines end at LF, CR or CRLF only (``str.splitlines`` would also cut at
U+2028 and the like, which JSON does not escape).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from adapters.dialects.jsons import encode

DONE = b"data: [DONE]\n\n"
#: A comment, which every client ignores.
COMMENT = b": keep-alive\n\n"


def encode_event(data: Any) -> bytes:
    """One ``data:`` event that carries ``data`` as JSON."""
    return b"data: " + encode(data) + b"\n\n"


def encode_named(events: Iterable[Mapping[str, Any]]) -> bytes:
    """Events as JSON, each named by its ``type``, a word in ASCII."""
    return b"".join([b"event: " + event["type"].encode() + b"\n" + encode_event(event) for event in events])


class SseDecoder:
    """Turns bytes into the ``data`` of events."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[str]:
        """The data of the events that ``chunk`` completes, without comments and other fields."""
        self._buffer += chunk
        events: list[str] = []
        if b"\r" in self._buffer:
            while (line := self._next_line()) is not None:
                self._take(line, events)
        else:
            # what vLLM sends: one split instead of two searches a line
            *lines, rest = bytes(self._buffer).split(b"\n")
            self._buffer[:] = rest
            for line in lines:
                self._take(line, events)
        return events

    def _take(self, line: bytes, events: list[str]) -> None:
        if line:
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
        elif self._data:
            events.append(b"\n".join(self._data).decode(errors="replace"))
            self._data.clear()

    def _next_line(self) -> bytes | None:
        ends = [i for i in (self._buffer.find(b"\n"), self._buffer.find(b"\r")) if i >= 0]
        if not ends:
            return None
        end = min(ends)
        after = end + 1
        if self._buffer[end] == ord("\r"):
            if after == len(self._buffer):
                return None  # its LF may be in the next chunk
            after += self._buffer[after] == ord("\n")
        line = bytes(self._buffer[:end])
        del self._buffer[:after]
        return line
