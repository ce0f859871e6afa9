"""API keys of applications: only their SHA-256 digests are held, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from pydantic import SecretStr
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from swarm.errors import AuthenticationError
from swarm.http.asgi import bearer, error_response

_DIGEST_PREFIX = "sha256:"


class KeyRing:
    """The accepted keys; an empty ring accepts everyone."""

    def __init__(self, keys: Iterable[SecretStr]) -> None:
        self._digests = [_digest(key.get_secret_value()) for key in keys]

    def accepts(self, key: str) -> bool:
        """Whether ``key`` opens this gateway."""
        given = hashlib.sha256(key.encode()).hexdigest()
        return not self._digests or any([hmac.compare_digest(given, digest) for digest in self._digests])


class ApiKeyMiddleware:
    """Answer 401 to requests without an accepted key; ``/health`` stays open for probes."""

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self.app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health" and not self._keys.accepts(bearer(Request(scope))):
            refusal = AuthenticationError("wrong or missing API key: send one of the gateway's keys as Bearer token")
            await error_response(refusal)(scope, receive, send)
            return
        await self.app(scope, receive, send)


def _digest(key: str) -> str:
    if key.startswith(_DIGEST_PREFIX):
        return key.removeprefix(_DIGEST_PREFIX).lower()
    return hashlib.sha256(key.encode()).hexdigest()
