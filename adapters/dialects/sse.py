"""Server-sent events, both ways.

Invariant: the byte stream may be cut anywhere; lines end at LF, CR or CRLF only (``str.splitlines`` would also cut at
U+2028 and the like, which JSON does not escape).
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from typing import Any

from adapters.dialects.jsons import encode
from swarm.errors import UpstreamError

EVENTS = "text/event-stream"
#: Of an answer in events that no proxy should hold back.
HEADERS = {"content-type": f"{EVENTS}; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
DONE = b"data: [DONE]\n\n"
#: A comment, which every client ignores.
COMMENT = b": keep-alive\n\n"
_LINE_END = re.compile(rb"\r\n|\n|\r")
#: ``\n\r\n`` ends what ``\r\n\r\n`` ends, too.
_EVENT_ENDS = (b"\n\n", b"\n\r\n", b"\r\r")
#: No event is longer: one with an image in it has some MiB.
_MAX_EVENT_MIB = 64


def encode_event(data: Any) -> bytes:
    """One ``data:`` event that carries ``data`` as JSON."""
    return b"data: " + encode(data) + b"\n\n"


def encode_named(events: Iterable[Mapping[str, Any]]) -> bytes:
    """Events as JSON, each named by its ``type``, a word in ASCII."""
    return b"".join([b"event: " + event["type"].encode() + b"\n" + encode_event(event) for event in events])


class SseDecoder:
    """Turns bytes into the ``data`` of events."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._data: list[bytes] = []
        #: bytes of their lines
        self._size = 0

    def feed(self, chunk: bytes) -> list[str]:
        """The data of the events that ``chunk`` completes, without comments and other fields.

        Raises:
            UpstreamError: an event has no end within 64 MiB.
        """
        events: list[str] = []
        for line in self._lines(chunk):
            if line:
                name, _, value = line.partition(b":")
                if name == b"data":
                    self._data.append(value.removeprefix(b" "))
                    self._size += len(line) + 1
            elif self._data:
                events.append(b"\n".join(self._data).decode(errors="replace"))
                self._data.clear()
                self._size = 0
        _check_size(len(self._rest) + self._size)
        return events

    def _lines(self, chunk: bytes) -> list[bytes]:
        if b"\n" not in chunk and b"\r" not in chunk and not self._rest.endswith(b"\r"):
            # a line that comes in many parts is not copied with each
            self._rest += chunk
            return []
        data = bytes(self._rest) + chunk if self._rest else chunk
        if b"\r" in data:
            held = b"\r" if data.endswith(b"\r") else b""  # its LF may be in the next chunk
            *lines, rest = _LINE_END.split(data.removesuffix(held))
            rest += held
        else:
            *lines, rest = data.split(b"\n")
        self._rest[:] = rest
        return lines


def _check_size(held: int) -> None:
    if held > _MAX_EVENT_MIB * 2**20:
        raise UpstreamError(
            f"what came as a stream of events has none within {_MAX_EVENT_MIB} MiB", code="malformed_answer"
        )


async def whole_events(parts: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    """The bytes of ``parts``, cut where events end; what is behind the last of them comes too, unless ``parts`` break
    off.

    Raises:
        UpstreamError: an event has no end within 64 MiB.
    """
    held = bytearray()
    async for part in parts:
        # an end may come in two parts
        begin = max(0, len(held) - 2)
        held += part
        ends = [at + len(end) for end in _EVENT_ENDS if (at := held.rfind(end, begin)) >= 0]
        if ends:
            yield bytes(held[: max(ends)])
            del held[: max(ends)]
        _check_size(len(held))
    if held:
        yield bytes(held)


async def data_in(parts: AsyncIterator[bytes], *, ends: bool = True) -> AsyncGenerator[str]:
    """The ``data`` of the events in ``parts``, up to ``[DONE]``.

    Raises:
        UpstreamError: the stream ends without it, although it ``ends`` with it, or an event has no end within 64 MiB.
    """
    decoder = SseDecoder()
    async for part in parts:
        for event in decoder.feed(part):
            if event == "[DONE]":
                return
            yield event
    if ends:
        raise UpstreamError("the stream of the answer broke off", code="stream_cut")
