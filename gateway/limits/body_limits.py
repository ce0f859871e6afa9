"""The bodies of requests while they are read, before anybody knows what they ask for.

Invariant: the large ones hold no more than ``most`` bytes together, and several of one key half of it, except that
one which alone is on its way is always let in; the small ones, whose room no large one takes, hold no more than
:data:`SMALL_HELD_BYTES`. Whoever leaves, or is sent away, holds nothing any more.
"""

from __future__ import annotations

from collections import Counter

from starlette.types import Message, Receive, Scope

from swarm.errors import OverloadedError
from swarm.http.asgi import read_body

#: a body is small until more of it has come
SMALL_BYTES = 64 * 1024
#: of all small bodies that are read at a time
SMALL_HELD_BYTES = 64 * 1024 * 1024

_RETRY_SECONDS = 1.0


class Intake:
    """Of one gateway, and one event loop.

    Args:
        small: bytes of a small body at most.
        small_held: bytes of all of them at most.
    """

    def __init__(self, *, small: int = SMALL_BYTES, small_held: int = SMALL_HELD_BYTES) -> None:
        self._small_bytes = small
        self._small_most = small_held
        self._small, self._large = _Room(), _Room()

    @property
    def held(self) -> int:
        """Bytes that have come of bodies which are not whole yet."""
        return self._small.held + self._large.held

    async def body(self, scope: Scope, receive: Receive, *, sender: str, limit: int, most: int) -> bytes:
        """The whole body of a request.

        Args:
            sender: the id of the key that it came with; nobody is known without one, and held to a share.
            limit: of its own bytes.
            most: of the bytes of all large bodies that are read at a time.

        Raises:
            PayloadTooLargeError, ClientDisconnect: see :func:`swarm.http.asgi.read_body`.
            OverloadedError: others are sending so much that there is no room for the next part of it.
        """
        own = 0
        room = self._small

        async def counted() -> Message:
            nonlocal own, room
            message = await receive()
            size = own + len(message.get("body", b""))
            if size > own:
                small = size <= self._small_bytes
                wanted, bound = (self._small, self._small_most) if small else (self._large, most)
                others, same = wanted.held, wanted.by[sender]
                if wanted is room:
                    others, same = others - own, same - own
                if others and (others + size > bound or (sender and same and same + size > bound // 2)):
                    raise OverloadedError(
                        f"{others} bytes of requests are on their way in: come back in a while",
                        retry_after=_RETRY_SECONDS,
                    )
                room.give(sender, own)
                wanted.take(sender, size)
                own, room = size, wanted
            return message

        try:
            return bytes(await read_body(scope, counted, limit))
        finally:
            room.give(sender, own)


class _Room:
    """``held`` bytes are taken of it, ``by`` sender."""

    def __init__(self) -> None:
        self.held = 0
        self.by: Counter[str] = Counter()

    def take(self, sender: str, size: int) -> None:
        self.held += size
        self.by[sender] += size

    def give(self, sender: str, size: int) -> None:
        self.held -= size
        self.by[sender] -= size
        if not self.by[sender]:
            del self.by[sender]
