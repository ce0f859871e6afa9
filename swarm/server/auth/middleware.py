"""Lets a request through to the control routes if its caller may use the route it names.

Invariant: behind :class:`Admission` ``scope["caller"]`` is always there, and holds the scope that
:mod:`swarm.server.auth.scopes` asks for; of a request without a token that is decided by where it comes from, never by
what it says.
"""

from __future__ import annotations

import functools
import ipaddress
import logging

from starlette.types import ASGIApp, Receive, Scope, Send

from swarm.errors import ConfigError, ForbiddenError, SwarmGatewayError
from swarm.http.asgi import bearer_bytes, error_response
from swarm.http.guard import foreign, is_loopback
from swarm.server.auth.ring import TokenRing
from swarm.server.auth.scopes import needed_scope
from swarm.server.auth.token import Caller
from swarm.server.config import ServerConfig

logger = logging.getLogger(__name__)

ANONYMOUS = Caller("anonymous", frozenset({"admin"}))
#: what a proxy adds: the peer is then not the caller
_FORWARDED = frozenset({b"forwarded", b"x-forwarded-for", b"x-real-ip", b"via"})


class Admission:
    """Decides who may use which control route.

    Args:
        ring: the tokens.
        anonymous: see :class:`~swarm.server.config.ServerConfig`. Anonymous callers are held to what
            :class:`~swarm.http.guard.LoopbackGuard` lets through, for a web page can make a browser on this machine
            send requests.
    """

    def __init__(self, ring: TokenRing, anonymous: bool | None) -> None:
        self._ring = ring
        self._anonymous = anonymous

    def admit(self, scope: Scope) -> None:
        """Put the caller of a request into its ``scope["caller"]``.

        Raises:
            AuthenticationError: no known token.
            ForbiddenError: the token lacks the route's scope.
            RequestError: a foreign page's request without a token.
        """
        key = bearer_bytes(scope["headers"])
        if not key and self._anonymous_may(scope):
            caller = ANONYMOUS
            if (error := foreign(scope["headers"])) is not None:
                raise error
        else:
            caller = self._ring.authenticate(key)
        self._check_scope(caller, scope)
        scope["caller"] = caller

    def _anonymous_may(self, scope: Scope) -> bool:
        if self._anonymous is False or (self._anonymous is None and not self._ring.empty):
            return False
        return _is_here(scope) and _FORWARDED.isdisjoint(dict(scope["headers"]))

    @staticmethod
    def _check_scope(caller: Caller, scope: Scope) -> None:
        needed = needed_scope(path := scope["path"])
        if not caller.may(needed):
            raise ForbiddenError(
                f"{path[:200]} needs a token with the scope {needed!r}; {caller.name!r} has "
                f"{', '.join(sorted(caller.scopes))}",
                code="scope_missing",
            )
        if needed == "admin" and scope["method"] not in ("GET", "HEAD"):
            logger.info("%s by %s", path[:200].encode("unicode_escape").decode(), caller.name)


class AuthMiddleware:
    """Answer 401 to callers without a known token, and otherwise as :class:`Admission` says."""

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self.app = app
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._admission.admit(scope)
            except SwarmGatewayError as exc:
                answer = error_response(exc)
                if exc.status == 401:
                    answer.headers["www-authenticate"] = "Bearer"
                await answer(scope, receive, send)
                return
        await self.app(scope, receive, send)


def check_exposure(config: ServerConfig) -> None:
    """Refuse to listen beyond loopback while there is no token that opens anything.

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


def _is_here(scope: Scope) -> bool:
    """Whether the connection's other end is on this machine."""
    peer = scope.get("client")
    return peer is not None and _is_loopback_address(peer[0])


@functools.lru_cache(maxsize=256)
def _is_loopback_address(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    # a socket that listens for both families tells IPv4 peers as ::ffff:127.0.0.1
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
