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

    def on_response_complete(self) -> None: ...


class ShortRequest:
    """One POST, complete with its body, and the way to answer it.

    It stands where uvicorn keeps its cycle of request and answer, so that uvicorn queues a request that comes before
    the answer, and waits for the answer when it shuts down; the fields after ``body`` are what it looks at.

    Attributes:
        scope: as ASGI's, without the keys that come from a URL's query; a shortcut may add keys.
        body: at most :data:`BODY_BYTES`.
    """

    __slots__ = ("_connection", "body", "disconnected", "keep_alive", "message_event", "response_complete", "scope")

    def __init__(self, scope: dict[str, Any], connection: Connection, keep_alive: bool) -> None:
        self.scope = scope
        self.body = b""
        self.disconnected = False
        self.keep_alive = keep_alive
        self.message_event = self
        self.response_complete = False
        self._connection = connection

    def answer(self, status: int, headers: RawHeaders, body: bytes) -> None:
        """Send the answer, now or at any later time, but once; a caller that has left gets nothing.

        Args:
            headers: all but those that every answer of the server has; one of them is ``content-length``.
        """
        self.response_complete = True
        if self.disconnected:
            return
        connection = self._connection
        parts = [_STATUS_LINES[status]]
        for name, value in (*connection.server_state.default_headers, *headers):
            parts += (name, b": ", value, b"\r\n")
        parts += (b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n", body)
        connection.transport.send(b"".join(parts))
        if not self.keep_alive:
            connection.transport.close()
        connection.on_response_complete()

    def set(self) -> None:
        """The connection is lost: nobody waits for it here."""


#: answers the request, if not at once then later, and returns true; or returns false and has changed nothing
Shortcut = Callable[[ShortRequest], bool]
#: by path
Shortcuts = Mapping[str, Shortcut]
