"""uvicorn's HTTP protocol over a transport that sends the head and the body of an answer in one system call, and with
shortcuts past the application.

Invariant: bytes leave in the order in which they were written, at the latest in the next turn of the event loop, and
no more than :data:`GATHERED_BYTES` wait, so that the flow control of large bodies works as without it. No connection
makes us keep more of a request's head than :data:`HEAD_BYTES` and one read, nor wait longer than its
:class:`~swarm.http.patience.Patience`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from swarm.http.asgi import header
from swarm.http.heads import Heads
from swarm.http.patience import Awaited, Patience, Watch
from swarm.http.shortcuts import BODY_BYTES, Head, ShortRequest

if TYPE_CHECKING:

    class _UvicornProtocol(asyncio.Protocol):
        transport: asyncio.Transport
        server_state: Any
        connections: set[Any]
        pipeline: Sequence[Any]
        cycle: Any
        flow: Any
        parser: Any
        server: tuple[str, int | None] | None
        client: tuple[str, int] | None
        scheme: Any
        root_path: str
        headers: list[tuple[bytes, bytes]]
        url: bytes
        expect_100_continue: bool

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        def connection_lost(self, exc: Exception | None) -> None: ...
        def data_received(self, data: bytes) -> None: ...
        def on_message_begin(self) -> None: ...
        def on_headers_complete(self) -> None: ...
        def on_body(self, body: bytes) -> None: ...
        def on_message_complete(self) -> None: ...
        def on_response_complete(self) -> None: ...
else:
    from uvicorn.protocols.http.auto import AutoHTTPProtocol as _UvicornProtocol

logger = logging.getLogger(__name__)

GATHERED_BYTES = 65536
#: of a request's line, headers or trailers; httptools has no bound of its own, and its time grows with their square
HEAD_BYTES = 65536

_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
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
            self._loop.call_soon(self.flush)
        self._pending.append(data)
        self._size += len(data)
        if self._size > GATHERED_BYTES:
            self.flush()

    def send(self, data: bytes) -> None:
        """Write what is complete, with what was written before it."""
        if self._pending:
            self.write(data)
        elif not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.flush()
        self._transport.set_protocol(protocol)

    def flush(self) -> None:
        """Send what is gathered now."""
        pending, self._pending = self._pending, []
        self._size = 0
        # to a connection that is lost nothing is written: the event loop would log a warning
        if pending and not self._transport.is_closing():
            self._transport.write(b"".join(pending))


def _gathering(transport: asyncio.BaseTransport) -> asyncio.Transport:
    # it is one as far as uvicorn looks
    return cast(asyncio.Transport, GatheringTransport(cast(asyncio.Transport, transport)))


class GatheringProtocol(_UvicornProtocol):
    """httptools where the platform has it, else h11, which bounds heads itself; see :class:`GatheringTransport`.

    Args:
        heads: their shortcuts are asked first, about POSTs of small bodies to their very path, without a query; not
            over h11. A request that comes in one piece and whose head is known is not parsed at all.
        patience: what callers get; over h11 only uvicorn's own for idle connections.
    """

    #: bytes since the parser last gave out a whole head or a part of a body
    _withheld = 0
    #: whether the parser is between two requests
    _between = True
    #: whether a shortcut has been asked already about what the parser is to find now
    _declined = False

    def __init__(self, *args: Any, heads: Heads | None = None, patience: Patience | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._patience = patience or Patience()
        self._heads = heads or Heads({})
        #: of the request that is being received, if it is one for a shortcut
        self._head: Head | None = None
        #: of the last request that a shortcut has taken from the parser
        self._taken: Head | None = None

    if not hasattr(_UvicornProtocol, "on_headers_complete"):

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(_gathering(transport))

    else:
        _watch: Watch

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(_gathering(transport))
            self._watch = Watch(self._patience, self._is_ours, self._too_late)

        def connection_lost(self, exc: Exception | None) -> None:
            self._watch.stop()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            cycle = self.cycle
            between = self._between and (cycle is None or cycle.response_complete)
            if between and (found := self._heads.find(data)) is not None and not self.flow.write_paused:
                self._withheld = 0
                if self._is_taken(ShortRequest(found[0], self, True, found[1])):
                    return
                self.cycle = None
                self._declined = True
            self._receive(data)
            self._declined = False
            if (taken := self._taken) is not None:
                self._taken = None
                if between:
                    self._heads.learn(data, taken)

        def _receive(self, data: bytes) -> None:
            """By the parser."""
            self._withheld += len(data)
            super().data_received(data)
            if self._withheld > HEAD_BYTES and not self.transport.is_closing():
                # an answer under way must not be cut by another one
                if self.cycle is None or self.cycle.response_complete:
                    self.transport.write(_HEAD_TOO_LARGE)
                self.transport.close()

        def on_message_begin(self) -> None:
            self._between = False
            self._watch.begin(Awaited.HEAD)
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._withheld = 0
            self._watch.begin(Awaited.BODY)
            found = self._heads.shortcuts.get(self.url)
            if found is None or self._declined or not (length := self._plain_length()):
                self._head = None
                super().on_headers_complete()
                return
            self._head = Head(*found, self.headers, length)
            self.cycle = ShortRequest(self._head, self, self.parser.should_keep_alive())

        def on_body(self, body: bytes) -> None:
            self._withheld = 0
            self._watch.hear()
            if self._head is None:
                super().on_body(body)
            else:
                self.cycle.body += body

        def on_message_complete(self) -> None:
            # after an upgrade it may be at anything
            self._between = not self.parser.should_upgrade()
            if self._head is None:
                self._watch.begin(Awaited.NOTHING if self._is_answering() else Awaited.REQUEST)
                super().on_message_complete()
                return
            head, self._head = self._head, None
            request: ShortRequest = self.cycle
            if self._is_taken(request):
                # what ends the connection is not sent again
                self._taken = head if request.keep_alive else None
            else:
                # the parser is still at this request: uvicorn is told of it now
                self.cycle = None
                super().on_headers_complete()
                super().on_body(request.body)
                super().on_message_complete()

        def _is_taken(self, request: ShortRequest) -> bool:
            """Ask the shortcut about a complete request."""
            self.cycle = request
            self._watch.awaited = Awaited.NOTHING
            try:
                return request.head.shortcut(request)
            except Exception:
                # out of here it would be taken for an error of the parser
                logger.exception("the shortcut to %s failed", request.head.path)
                return request.response_complete

        def on_response_complete(self) -> None:
            # what the application does behind its answer must not delay it
            cast(GatheringTransport, self.transport).flush()
            if self.pipeline:
                super().on_response_complete()
                return
            # as there, without a timer for each answer: the watch looks after idle connections too
            self.server_state.total_requests += 1
            if not self.transport.is_closing():
                if self.flow.read_paused:
                    self.flow.resume_reading()
                if self._watch.awaited is Awaited.NOTHING:
                    self._watch.begin(Awaited.REQUEST)

        def _is_ours(self) -> bool:
            """Whether the caller waits for us: for an answer, or for its body to be read."""
            if self._watch.awaited is Awaited.BODY:
                return self.flow.read_paused
            return self._is_answering()

        def _is_answering(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _too_late(self, awaited: Awaited) -> None:
            if self not in self.connections or self.transport.is_closing():
                return
            answer_began = self._is_answering() and getattr(self.cycle, "response_started", False)
            if awaited is not Awaited.REQUEST and not answer_began:
                self.transport.write(_TOO_SLOW)
            self.transport.close()

        def _plain_length(self) -> int:
            """The length of the body, if the request is one for shortcuts, by its head, and the connection free for an
            answer; else 0."""
            parser = self.parser
            length = header(self.headers, b"content-length")
            is_plain = (
                (self.cycle is None or self.cycle.response_complete)
                and length is not None
                and length.isdigit()
                and len(length) < 6
                and 0 < int(length) <= BODY_BYTES
                and parser.get_method() == b"POST"
                and parser.get_http_version() == "1.1"
                and not self.expect_100_continue
                and not parser.should_upgrade()
                and not self.flow.write_paused
            )
            return int(length) if is_plain and length is not None else 0
