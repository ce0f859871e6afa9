"""Lets a request through to the control routes if its caller may use the route.

Invariant: behind :class:`AuthMiddleware` ``scope["caller"]`` is always set and has the scope that the route needs. A
request without a token is judged by where it comes from, never by what it says.
"""

from __future__ import annotations

import functools
import ipaddress
import logging

from starlette.types import ASGIApp, Receive, Scope, Send

from swarm.errors import AuthenticationError, ConfigError, ForbiddenError, SwarmGatewayError
from swarm.http.asgi import RawHeaders, bearer_bytes, error_response
from swarm.http.guard import foreign, is_loopback
from swarm.server.auth.ring import Caller, TokenRing
from swarm.server.auth.scopes import WITHOUT_TOKEN, Scopes
from swarm.server.config import ServerConfig

logger = logging.getLogger(__name__)

ANONYMOUS = Caller("anonymous", frozenset({"admin"}))
#: headers that proxies add: the peer is then not the caller
_FORWARDED = frozenset({b"forwarded", b"x-forwarded-for", b"x-real-ip", b"via"})


class AuthMiddleware:
    """Answer 401 to callers without a known token, 403 to those whose token lacks the scope.

    Args:
        ring: the tokens.
        anonymous: see :class:`~swarm.server.config.ServerConfig`. Anonymous callers are also held to what
            :class:`~swarm.http.guard.LoopbackGuard` lets through, because a web page can make a browser on this
            machine send requests.
        scopes: of the control routes.
    """

    def __init__(self, app: ASGIApp, ring: TokenRing, anonymous: bool | None, scopes: Scopes) -> None:
        self.app = app
        self._ring = ring
        self._anonymous = anonymous
        self._scopes = scopes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not scope["path"].startswith(WITHOUT_TOKEN):
            try:
                scope["caller"] = self._admit(scope)
            except SwarmGatewayError as exc:
                response = error_response(exc)
                if exc.status == 401:
                    response.headers["www-authenticate"] = "Bearer"
                await response(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _admit(self, scope: Scope) -> Caller:
        """The caller of a request.

        Raises:
            AuthenticationError: no known token.
            ForbiddenError: the token lacks the route's scope.
            RequestError: a foreign page's request without a token.
        """
        path: str = scope["path"]
        caller = self._caller(scope["headers"], scope.get("client"))
        if not caller.may(needed := self._scopes.needed(path)):
            raise ForbiddenError(
                f"{path[:200]} needs a token with the scope {needed!r}; {caller.name!r} has "
                f"{', '.join(sorted(caller.scopes))}",
                code="scope_missing",
            )
        if needed == "admin" and scope["method"] not in ("GET", "HEAD"):
            logger.info("%s by %s", path[:200].encode("unicode_escape").decode(), caller.name)
        return caller

    def _caller(self, headers: RawHeaders, peer: tuple[str, int] | None) -> Caller:
        if key := bearer_bytes(headers):
            return self._ring.authenticate(key)
        if not self._anonymous_may(headers, peer):
            raise AuthenticationError(
                "this route needs a token: send `Authorization: Bearer TOKEN` (`swarm-gateway swarm tokens create`)"
            )
        if (error := foreign(headers)) is not None:
            raise error
        return ANONYMOUS

    def _anonymous_may(self, headers: RawHeaders, peer: tuple[str, int] | None) -> bool:
        if self._anonymous is False or (self._anonymous is None and not self._ring.empty):
            return False
        return peer is not None and _is_loopback_address(peer[0]) and not any(name in _FORWARDED for name, _ in headers)


def check_exposure(config: ServerConfig) -> None:
    """Refuse to listen beyond loopback while no token opens anything.

    Raises:
        ConfigError: ``config.host`` is reachable from elsewhere and there is no usable token, or ``tokens.json`` is
            damaged.
    """
    if not TokenRing(config.token, config.run_dir).usable() and not is_loopback(config.host):
        raise ConfigError(
            f"listening on {config.host} without a token would let anyone on the network run training here: make one "
            f"(`swarm-gateway swarm tokens create NAME --scope admin --run-dir {config.run_dir}`), set SWARM_TOKEN, or "
            "listen on 127.0.0.1",
            code="token_required",
        )


@functools.lru_cache(maxsize=256)
def _is_loopback_address(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    # a socket for both families gives IPv4 peers as ::ffff:127.0.0.1
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
