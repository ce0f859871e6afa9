"""The bodies of requests while they are read, before anybody knows whose they are.

Invariant: all together hold no more than ``most`` bytes, except that a body which alone is on its way is always let in;
whoever leaves, or is sent away, holds nothing any more.
"""

from __future__ import annotations

from starlette.types import Message, Receive, Scope

from swarm.errors import OverloadedError
from swarm.http.asgi import read_body

_RETRY_SECONDS = 1.0


class Intake:
    """Of one gateway, and one event loop.

    Attributes:
        held: bytes that have come of bodies which are not whole yet.
    """

    def __init__(self) -> None:
        self.held = 0

    async def body(self, scope: Scope, receive: Receive, *, limit: int, most: int) -> bytes:
        """The whole body of a request.

        Args:
            limit: of its own bytes.
            most: of the bytes of all that are read at a time.

        Raises:
            PayloadTooLargeError, ClientDisconnect: see :func:`swarm.http.asgi.read_body`.
            OverloadedError: others are sending so much that there is no room for the next part of it.
        """
        own = 0

        async def counted() -> Message:
            nonlocal own
            message = await receive()
            size = len(message.get("body", b""))
            if size and self.held > own and self.held + size > most:
                raise OverloadedError(
                    f"{self.held} bytes of requests are on their way in: come back in a while",
                    retry_after=_RETRY_SECONDS,
                )
            own += size
            self.held += size
            return message

        try:
            return bytes(await read_body(scope, counted, limit))
        finally:
            self.held -= own
