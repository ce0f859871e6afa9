"""Answers to plain requests without ASGI: no task, no chain of middleware, one system call.

Invariant: a shortcut answers as the application behind it would, or leaves the request to it as if nobody had looked.
Per connection answers leave in the order of their requests.
"""

from __future__ import annotations

import http
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from swarm.http.asgi import RawHeaders

#: bytes of a request's body that a shortcut may be given; larger ones are the application's
BODY_BYTES = 65536

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in http.HTTPStatus}


class Connection(Protocol):
    """What a request needs of uvicorn's protocol."""

    transport: Any
    server_state: Any
    #: as in ASGI's scope
    scheme: Any
    server: tuple[str, int | None] | None
    client: tuple[str, int] | None
    root_path: str

    def on_response_complete(self) -> None: ...


class Head:
    """The head of a POST for a shortcut; requests with the very same head may share it, of whatever connection.

    Attributes:
        headers: as ASGI's.
        length: bytes of the body.
        notes: what the shortcut has found out from the headers, so that it need not look again; ``None`` at first.
    """

    __slots__ = ("headers", "length", "notes", "path", "shortcut")

    def __init__(self, path: str, shortcut: Shortcut, headers: RawHeaders, length: int) -> None:
        self.path = path
        self.shortcut = shortcut
        self.headers = headers
        self.length = length
        self.notes: Any = None


class ShortRequest:
    """One POST, complete with its body, and the way to answer it.

    It stands where uvicorn keeps its cycle of request and answer, so that uvicorn queues a request that comes before
    the answer, and waits for the answer when it shuts down; the fields after ``body`` are what it looks at.

    Attributes:
        head: also of other requests.
        connection: the one that it came by.
        body: at most :data:`BODY_BYTES`.
    """

    __slots__ = ("body", "connection", "disconnected", "head", "keep_alive", "message_event", "response_complete")

    def __init__(self, head: Head, connection: Connection, keep_alive: bool, body: bytes = b"") -> None:
        self.head = head
        self.connection = connection
        self.body = body
        self.disconnected = False
        self.keep_alive = keep_alive
        self.message_event = _NOBODY_WAITS
        self.response_complete = False

    def answer(self, status: int, headers: bytes, body: bytes) -> None:
        """Send the answer, now or at any later time, but once; a caller that has left gets nothing.

        Args:
            headers: the lines, each with its end, of all but those that every answer of the server has; one of them is
                ``content-length``.
        """
        self.response_complete = True
        if self.disconnected:
            return
        connection = self.connection
        own = b"".join([b"%b: %b\r\n" % header for header in connection.server_state.default_headers])
        end = b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n"
        connection.transport.send(b"".join((_STATUS_LINES[status], own, headers, end, body)))
        if not self.keep_alive:
            connection.transport.close()
        connection.on_response_complete()


class _NobodyWaits:
    """For uvicorn's event that wakes an application when the connection is lost: here nobody waits for it."""

    def set(self) -> None: ...


_NOBODY_WAITS = _NobodyWaits()

#: answers the request, if not at once then later, and returns true; or returns false and has changed nothing
Shortcut = Callable[[ShortRequest], bool]
#: by path
Shortcuts = Mapping[str, Shortcut]
