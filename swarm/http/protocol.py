"""uvicorn's HTTP protocol over a transport that sends the head and the body of an answer in one system call.

Invariant: bytes leave in the order in which they were written, at the latest in the next turn of the event loop, and
no more than :data:`GATHERED_BYTES` wait, so that the flow control of large bodies works as without it. No connection
makes us keep more of a request's head than :data:`HEAD_BYTES` and one read.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:

    class _UvicornProtocol(asyncio.Protocol):
        transport: asyncio.Transport
        cycle: Any

        def on_headers_complete(self) -> None: ...
        def on_body(self, body: bytes) -> None: ...
else:
    from uvicorn.protocols.http.auto import AutoHTTPProtocol as _UvicornProtocol

GATHERED_BYTES = 65536
#: of a request's line, headers or trailers; httptools has no bound of its own, and its time grows with their square
HEAD_BYTES = 65536

_HEAD_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class GatheringTransport:
    """Gathers what one turn of the event loop writes: uvicorn writes head and body apart, uvloop sends each at once."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._pending: list[bytes] = []
        self._size = 0
        self.get_extra_info = transport.get_extra_info
        self.is_closing = transport.is_closing
        self.pause_reading = transport.pause_reading
        self.resume_reading = transport.resume_reading

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._pending:
            self._loop.call_soon(self._flush)
        self._pending.append(data)
        self._size += len(data)
        if self._size > GATHERED_BYTES:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._flush()
        self._transport.set_protocol(protocol)

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        self._size = 0
        # to a connection that is lost nothing is written: the event loop would log a warning
        if pending and not self._transport.is_closing():
            self._transport.write(b"".join(pending))


class GatheringProtocol(_UvicornProtocol):
    """httptools where the platform has it, else h11, which bounds heads itself; see :class:`GatheringTransport`."""

    #: bytes since the parser last gave out a whole head or a part of a body
    _withheld = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        gathering = GatheringTransport(cast(asyncio.Transport, transport))
        super().connection_made(cast(asyncio.Transport, gathering))

    if hasattr(_UvicornProtocol, "on_headers_complete"):

        def data_received(self, data: bytes) -> None:
            self._withheld += len(data)
            super().data_received(data)
            if self._withheld > HEAD_BYTES and not self.transport.is_closing():
                # an answer under way must not be cut by another one
                if self.cycle is None or self.cycle.response_complete:
                    self.transport.write(_HEAD_TOO_LARGE)
                self.transport.close()

        def on_headers_complete(self) -> None:
            self._withheld = 0
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._withheld = 0
            super().on_body(body)
