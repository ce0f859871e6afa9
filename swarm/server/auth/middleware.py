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

from swarm.credentials import digest
from swarm.errors import ConfigError, ForbiddenError, SwarmGatewayError
from swarm.http.asgi import RawHeaders, bearer_bytes, error_response
from swarm.http.guard import foreign, is_loopback
from swarm.server.auth.ring import TokenRing
from swarm.server.auth.scopes import Caller, needed_scope
from swarm.server.config import ServerConfig

logger = logging.getLogger(__name__)

ANONYMOUS = Caller("anonymous", frozenset({"admin"}))
#: what a proxy adds: the peer is then not the caller
_FORWARDED = frozenset({b"forwarded", b"x-forwarded-for", b"x-real-ip", b"via"})


class Credentials:
    """What of a request's headers decides who its caller is; one for all requests with these headers."""

    __slots__ = ("foreign", "forwarded", "key_digest")

    def __init__(self, headers: RawHeaders) -> None:
        key = bearer_bytes(headers)
        #: of the token; ``None``: there is none
        self.key_digest = digest(key) if key else None
        self.forwarded = any(name in _FORWARDED for name, _ in headers)
        # only asked of those without a token
        self.foreign = None if key else foreign(headers)


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
        caller = self.caller(Credentials(scope["headers"]), scope.get("client"), scope["path"])
        if scope["method"] not in ("GET", "HEAD") and needed_scope(path := scope["path"]) == "admin":
            logger.info("%s by %s", path[:200].encode("unicode_escape").decode(), caller.name)
        scope["caller"] = caller

    def caller(self, given: Credentials, peer: tuple[str, int] | None, path: str) -> Caller:
        """Who sends a request with these credentials, from ``peer``, to ``path``; raises like :meth:`admit`."""
        if given.key_digest is not None:
            caller = self._ring.holder(given.key_digest)
        elif self._anonymous_may(given, peer):
            caller = ANONYMOUS
            if given.foreign is not None:
                raise given.foreign
        else:
            caller = self._ring.authenticate(b"")
        if not caller.may(needed := needed_scope(path)):
            raise ForbiddenError(
                f"{path[:200]} needs a token with the scope {needed!r}; {caller.name!r} has "
                f"{', '.join(sorted(caller.scopes))}",
                code="scope_missing",
            )
        return caller

    def _anonymous_may(self, given: Credentials, peer: tuple[str, int] | None) -> bool:
        if self._anonymous is False or (self._anonymous is None and not self._ring.empty):
            return False
        return peer is not None and _is_loopback_address(peer[0]) and not given.forwarded


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


@functools.lru_cache(maxsize=256)
def _is_loopback_address(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    # a socket that listens for both families tells IPv4 peers as ::ffff:127.0.0.1
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
