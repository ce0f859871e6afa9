"""The optional bearer token of the control routes.

Invariant: beyond loopback no control route is reachable without the token; only its digest is kept and compared.
"""

from __future__ import annotations

import hashlib
import hmac

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from swarm.errors import AuthenticationError, ConfigError
from swarm.http.asgi import bearer, error_response
from swarm.http.guard import is_loopback


def digest(secret: str) -> bytes:
    """SHA-256 of a secret of full entropy: all that is kept of it."""
    return hashlib.sha256(secret.encode()).digest()


def check_exposure(host: str, token: str | None) -> None:
    """Refuse to listen beyond loopback without a token.

    Raises:
        ConfigError: ``host`` is reachable from elsewhere and there is no token.
    """
    if token or is_loopback(host):
        return
    raise ConfigError(
        f"listening on {host} without a token would let anyone on the network run training here: "
        "set a token (SWARM_TOKEN), or listen on 127.0.0.1",
        code="token_required",
    )


class TokenMiddleware:
    """Answer 401 unless the request carries the token; without a token configured, let everything through."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self.app = app
        self._digest = digest(token) if token else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._digest is not None:
            given = digest(bearer(Request(scope)))
            if not hmac.compare_digest(given, self._digest):
                error = AuthenticationError(
                    "wrong or missing token: send `Authorization: Bearer TOKEN` with the swarm server's token"
                )
                await error_response(error)(scope, receive, send)
                return
        await self.app(scope, receive, send)
