"""Which token each client's name belongs to: a name is what lets one act for its client.

Invariant: a name is used by the token that used it first and by admins, and by nobody else, as long as this server
lives and remembers it; callers without a token are one.
"""

from __future__ import annotations

from swarm.errors import ForbiddenError
from swarm.server.auth.scopes import Caller

#: names remembered; beyond that the oldest one is anybody's again
MAX_NAMES = 100_000


class ClientNames:
    """Names (``client_uuid``) by the token that may use them. A rotated token keeps its name, and so its clients."""

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
