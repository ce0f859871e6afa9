"""API keys of applications: only their SHA-256 digests are held, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from pydantic import SecretStr
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.config import DIGEST_PREFIX
from swarm.errors import AuthenticationError
from swarm.http.asgi import bearer, error_response


class KeyRing:
    """The accepted keys; an empty ring accepts everyone."""

    def __init__(self, keys: Iterable[SecretStr]) -> None:
        self._digests = [_digest(key.get_secret_value()) for key in keys]

    def accepts(self, key: bytes) -> bool:
        """Whether ``key`` opens this gateway."""
        given = hashlib.sha256(key).digest()
        return not self._digests or any([hmac.compare_digest(given, digest) for digest in self._digests])


class ApiKeyMiddleware:
    """Answer 401 to requests without an accepted key; ``/health`` stays open for probes."""

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self.app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # a header's value is text by its bytes in latin-1; a key is compared by the bytes that were sent
        if (
            scope["type"] == "http"
            and scope["path"] != "/health"
            and not self._keys.accepts(bearer(Request(scope)).encode("latin-1"))
        ):
            refusal = AuthenticationError("wrong or missing API key: send one of the gateway's keys as Bearer token")
            await error_response(refusal)(scope, receive, send)
            return
        await self.app(scope, receive, send)


def _digest(key: str) -> bytes:
    if key.startswith(DIGEST_PREFIX):
        return bytes.fromhex(key.removeprefix(DIGEST_PREFIX))
    return hashlib.sha256(key.encode()).digest()
