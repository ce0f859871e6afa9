"""Checks every request's key, its rate, and what it opens.

Invariant: behind it, ``scope["state"]["caller"]`` is the owner of the request; only ``/health`` is open to everyone.
"""

from __future__ import annotations

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from adapters.dialects import MessagesDialect
from gateway.keys.ring import Holder, KeyRing
from swarm.errors import ForbiddenError, SwarmGatewayError
from swarm.http.asgi import bearer_bytes, error_response

_ADMIN = "/admin"
#: Figures of all routes.
_OPERATORS = ("/status", "/metrics")
#: Paths whose errors have Anthropic's form.
_ANTHROPIC = "/v1/messages"


class KeyMiddleware:
    """Refuses with 401, 403 or 429, in the dialect of the path."""

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self.app = app
        self._keys = keys
        self._messages = MessagesDialect()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == "/health":
            await self.app(scope, receive, send)
            return
        try:
            # keys are compared as bytes
            holder = self._keys.holder(bearer_bytes(scope["headers"]))
            _check(scope["path"], holder)
            if scope["method"] == "POST":
                self._keys.count(holder)
        except SwarmGatewayError as exc:
            await self._refusal(scope["path"], exc)(scope, receive, send)
            return
        scope.setdefault("state", {})["caller"] = holder.caller
        await self.app(scope, receive, send)

    def _refusal(self, path: str, exc: SwarmGatewayError) -> Response:
        response = error_response(exc)
        if path.startswith(_ANTHROPIC):
            kept = ((name, response.headers.get(name)) for name in ("x-should-retry", "retry-after"))
            headers = {name: value for name, value in kept if value is not None}
            return JSONResponse(self._messages.error(exc), exc.status, headers=headers)
        return response


def _check(path: str, holder: Holder) -> None:
    if path.startswith(_ADMIN) and not holder.admin:
        raise ForbiddenError(
            "only a key that was made with `swarm-gateway keys create --admin` opens /admin", code="admin_key_required"
        )
    if path.startswith(_OPERATORS) and holder.caller.routes is not None and not holder.admin:
        raise ForbiddenError(f"a key for some routes does not open {path}", code="forbidden")
