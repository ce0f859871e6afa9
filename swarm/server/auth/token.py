"""A bearer token: its scopes, its digest, and the caller it makes of a request.

Invariant: a token is shown once, when it is made; what is kept and compared is its digest.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from typing import Literal

#: ``claim``: run episodes. ``admin``: everything. ``read``: status and metrics, which every token may.
TokenScope = Literal["claim", "admin", "read"]


def digest(secret: str | bytes) -> bytes:
    """SHA-256 of a secret of full entropy: all that is kept of it."""
    return hashlib.sha256(secret.encode() if isinstance(secret, str) else secret).digest()


def new_token() -> str:
    """A random token of 256 bits."""
    return f"swt_{secrets.token_urlsafe(32)}"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request: the name of its token, for people and for the log, and what the token allows.

    :class:`~swarm.server.auth.middleware.Admission` puts it in ``scope["caller"]``.
    """

    name: str
    scopes: frozenset[TokenScope]

    def may(self, needed: TokenScope) -> bool:
        """Whether a route that needs ``needed`` is open to this caller."""
        return "admin" in self.scopes or needed in self.scopes or (needed == "read" and bool(self.scopes))
