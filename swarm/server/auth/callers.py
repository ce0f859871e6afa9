"""The caller of a control route, and the clients that it may act for."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.credentials import TokenScope
from swarm.errors import ForbiddenError

#: client names remembered; the oldest is forgotten first, and then free again
MAX_NAMES = 100_000


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request: the name of its token, for people and for the log, and what the token allows.

    :class:`~swarm.server.auth.middleware.AuthMiddleware` puts it in ``scope["caller"]``.
    """

    name: str
    scopes: frozenset[TokenScope]

    def may(self, needed: TokenScope) -> bool:
        """Whether a route that needs ``needed`` is open to this caller."""
        return "admin" in self.scopes or needed in self.scopes or (needed == "read" and bool(self.scopes))


class ClientNames:
    """The token that each client name (``client_uuid``) belongs to.

    Invariant: a name is used by the token that used it first and by admins only, as long as this server remembers it;
    all callers without a token count as one. A rotated token keeps its name, and so its clients.
    """

    def __init__(self, limit: int = MAX_NAMES) -> None:
        self._limit = limit
        self._owners: dict[str, str] = {}

    def check(self, caller: Caller, client_uuid: str) -> None:
        """Let ``caller`` act for this client.

        Raises:
            ForbiddenError: the client is another token's (``client_of_another_token``).
        """
        owner = self._owners.get(client_uuid)
        if owner is None:
            self._owners[client_uuid] = caller.name
            if len(self._owners) > self._limit:
                del self._owners[next(iter(self._owners))]
        elif owner != caller.name and "admin" not in caller.scopes:
            raise ForbiddenError(
                f"client_uuid {client_uuid[:100]!r} is used with another token than {caller.name!r}: choose another "
                "client_uuid, or use the token with which this client began",
                code="client_of_another_token",
            )
