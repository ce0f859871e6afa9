"""Heads that clients send again and again, byte by byte the same, so that each is parsed once.

Invariant: a head that is known here was found by the parser to be a keep-alive POST for a shortcut with a body of the
length that it declares, and the bytes kept are all of it. So a request that begins with them, after another one's end,
is what the parser would find it to be.
"""

from __future__ import annotations

from collections.abc import Mapping

from swarm.http.asgi import header
from swarm.http.shortcuts import Head, Shortcut, Shortcuts

#: of one head, and how many are kept: of those that callers may send, who are let in, so they are no more than that
MAX_BYTES = 2048
MAX_HEADS = 4096

_END = b"\r\n\r\n"


class Heads:
    """The heads of requests that shortcuts have taken; one for all connections of a server.

    Args:
        shortcuts: by the path that they are asked about.
    """

    def __init__(self, shortcuts: Shortcuts, limit: int = MAX_HEADS) -> None:
        #: by the path as it is sent
        self.shortcuts: Mapping[bytes, tuple[str, Shortcut]] = {
            path.encode(): (path, shortcut) for path, shortcut in shortcuts.items()
        }
        self._limit = limit
        self._known: dict[bytes, Head] = {}

    def find(self, data: bytes) -> tuple[Head, bytes] | None:
        """Head and body, if ``data`` is exactly one request, and its head known."""
        end = data.find(_END, 0, MAX_BYTES) + 4
        head = self._known.get(data[:end])
        return None if head is None or len(data) != end + head.length else (head, data[end:])

    def learn(self, data: bytes, head: Head) -> None:
        """A shortcut has taken the request that the parser found, with this head, to end where ``data`` does; the
        parser was between two requests before it."""
        end = data.find(_END, 0, MAX_BYTES) + 4
        # else there is more in it than one request, or its head ends elsewhere than they mostly do
        if end > 4 and len(data) == end + head.length and header(head.headers, b"transfer-encoding") is None:
            if len(self._known) >= self._limit:
                self._known.clear()
            self._known[data[:end]] = head
