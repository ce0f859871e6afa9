"""Who may use the control routes, and where the server may listen without a token.

Invariant: the scope of a control route is stated on the route and nowhere else; a path without one, misspelt or new,
needs ``admin``, so nothing is open by omission. Behind :class:`TokenCheck` ``scope["caller"]`` is set and has that
scope. A request without a token is judged by where it comes from, never by what it says.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from starlette.routing import BaseRoute
from starlette.types import Scope

from swarm.concurrency import Latest
from swarm.credentials import Ring, Token, TokenFile, TokenScope, digest, matching
from swarm.errors import AuthenticationError, ConfigError, ForbiddenError, NotFoundError
from swarm.http.asgi import basic_password, bearer_bytes
from swarm.http.client import is_loopback
from swarm.http.guard import check_loopback, check_type
from swarm.http.routes import JsonRoute, Security
from swarm.server.config import ServerConfig

#: Paths below which no token is checked: probes, and the addresses of episodes, which have keys of their own.
_WITHOUT_TOKEN = ("/health", "/episodes/", "/groups/")


class ControlRoute(JsonRoute):
    """A route for callers whose token has ``scope``; the other arguments are those of :class:`JsonRoute`."""

    def __init__(self, method: str, path: str, endpoint: Callable[..., Any], scope: TokenScope, **options: Any) -> None:
        self.scope: TokenScope = scope
        super().__init__(path, endpoint, security=security(scope), methods=[method], **options)


def security(scope: TokenScope) -> Security:
    """What opens a control route, for the OpenAPI document."""
    # the empty alternative: programs on this machine, where the operator allows it
    return [{"token": [scope]}, {}]


#: from the weakest to the strictest
_STRICTNESS: tuple[TokenScope, ...] = ("read", "claim", "admin")
# Starlette's routes end in `$`, which a line break at a path's end does not keep from matching
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f]")


class Scopes:
    """The scopes that the control routes among ``routes`` need, by path and method."""

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        self._by_path: dict[str, list[ControlRoute]] = {}
        self._by_pattern: list[ControlRoute] = []
        for route in routes:
            if isinstance(route, ControlRoute):
                if route.param_convertors:
                    self._by_pattern.append(route)
                else:
                    self._by_path.setdefault(route.path, []).append(route)

    def needed(self, method: str, path: str) -> TokenScope:
        """The scope that a request needs: the strictest of the routes that may serve it, or refuse its method."""
        routes = self._by_path.get(path) or [route for route in self._by_pattern if route.path_regex.match(path)]
        served = [route for route in routes if method in (route.methods or ())] or routes
        if not served or _CONTROL_CHARACTERS.search(path):
            return "admin"
        return max((route.scope for route in served), key=lambda scope: _STRICTNESS.index(scope))


#: the name of the caller whose token is the server's own (``ServerConfig.token``)
CONFIGURED = "SWARM_TOKEN"
#: the same for processes started together with the server (``ServerConfig.private_token``)
PRIVATE = "up"


@dataclass(frozen=True, slots=True)
class TokenHolder:
    """Who sent a request: the name of its token, for people and for the log, and what the token allows.

    :class:`TokenCheck` puts it in ``scope["caller"]``.
    """

    name: str
    scopes: frozenset[TokenScope]

    def may(self, needed: TokenScope) -> bool:
        """Whether a route that needs ``needed`` is open to this caller."""
        return "admin" in self.scopes or needed in self.scopes or (needed == "read" and bool(self.scopes))

    @property
    def sees_uuids(self) -> bool:
        """Whether it may see the ids of all episodes: whoever knows one, and has any token to claim, may end it."""
        return self.may("admin")


class TokenRing(Ring[Token]):
    """Checks the file before each answer, so tokens rotate without a restart.

    Args:
        token: opens everything; None: there is no such token.
        private: opens everything too; while it is the only token, callers without a token are served as before.
        run_dir: the folder of ``tokens.json``.

    Raises:
        ConfigError: the file exists and cannot be read.
    """

    def __init__(self, token: str | None, run_dir: Path, private: str | None = None) -> None:
        super().__init__(TokenFile(run_dir))
        self._configured = bool(token)
        self._own = {
            digest(own): TokenHolder(name, frozenset({"admin"}))
            for name, own in ((PRIVATE, private), (CONFIGURED, token))
            if own
        }

    @property
    def empty(self) -> bool:
        """Whether no token was ever made; revoked and expired tokens count as made, so the server stays closed."""
        self.refresh()
        return not (self._configured or self.credentials)

    def usable(self) -> bool:
        """Whether any token opens anything now."""
        self.refresh()
        now = datetime.now(UTC)
        return self._configured or any(token.state(now) == "active" for token in self.credentials)

    def authenticate(self, key: bytes) -> TokenHolder:
        """The caller whose token is ``key``.

        Raises:
            AuthenticationError: the token is unknown, expired or revoked.
        """
        key_digest = digest(key)
        self.refresh()
        token, own = self.find(key_digest), matching(key_digest, self._own)
        if own is not None:
            return own
        if token is None:
            raise AuthenticationError("unknown token: it is not one of this swarm server's")
        if (state := token.state(datetime.now(UTC))) != "active":
            # only the holder of the token learns this
            raise AuthenticationError(f"the token {token.name!r} is {state}: get a new one", code=f"token_{state}")
        return TokenHolder(token.name, frozenset(token.scopes))


#: client names remembered; the oldest is forgotten first, and then free again
MAX_NAMES = 100_000


class ClientNames:
    """The token that each client name (``client_uuid``) belongs to.

    Invariant: a name is used by the token that used it first and by admins only, as long as this server remembers it;
    all callers without a token count as one. A rotated token keeps its name, and so its clients.
    """

    def __init__(self, limit: int = MAX_NAMES) -> None:
        self._owners = Latest[str, str](limit)

    def check(self, caller: TokenHolder, client_uuid: str) -> None:
        """Let ``caller`` act for this client.

        Raises:
            ForbiddenError: the client is another token's (``client_of_another_token``).
        """
        if not self._may_act(caller, client_uuid):
            raise ForbiddenError(
                f"client_uuid {client_uuid[:100]!r} is used with another token than {caller.name!r}: choose another "
                "client_uuid, or use the token with which this client began",
                code="client_of_another_token",
            )
        self._owners.setdefault(client_uuid, caller.name)

    def allows(self, caller: TokenHolder, client_uuid: str) -> bool:
        """Whether ``caller`` may claim, and act for this client as in :meth:`check`; nothing is remembered."""
        return caller.may("claim") and self._may_act(caller, client_uuid)

    def _may_act(self, caller: TokenHolder, client_uuid: str) -> bool:
        # nobody owns a client yet that this server has not heard, such as one that ran on over a restart
        return "admin" in caller.scopes or self._owners.get(client_uuid, caller.name) == caller.name


logger = logging.getLogger(__name__)

ANONYMOUS = TokenHolder("anonymous", frozenset({"admin"}))
_NO_TOKEN = (
    "this route needs a token: send `Authorization: Bearer TOKEN` (`swarm-gateway swarm tokens create`), or give a "
    "client that takes only an address `http://x:TOKEN@HOST:PORT`. Where programs on the server's own machine need no "
    "token, `ssh -L PORT:127.0.0.1:PORT HOST` lets those of another machine in"
)
_REMEDY = "make a token (`swarm-gateway swarm tokens create`) and send it as `Authorization: Bearer TOKEN`"
#: headers that proxies add: the peer is then not the caller
_FORWARDED = frozenset({b"forwarded", b"x-forwarded-for", b"x-real-ip", b"via"})


class TokenCheck:
    """Refuses callers without a known token (401), those whose token lacks the scope (403), and bodies that are not
    JSON (415).

    Anonymous callers are also held to :func:`~swarm.http.guard.check_loopback`, because a web page can make a browser
    on this machine send requests.

    Args:
        other_types: path -> the type that its body has in the place of JSON.
    """

    def __init__(self, ring: TokenRing, anonymous: bool | None, scopes: Scopes, other_types: Mapping[str, str]) -> None:
        self._ring = ring
        self._anonymous = anonymous
        self._scopes = scopes
        self._other_types = other_types

    def __call__(self, scope: Scope) -> None:
        if scope["path"].startswith(_WITHOUT_TOKEN):
            if password := basic_password(scope["headers"]):
                # from an address with a token in it: HTTP clients send that in place of the episode's key
                with contextlib.suppress(AuthenticationError):
                    scope["caller"] = self._ring.authenticate(password)
            return
        scope["caller"] = self._admitted(scope)
        check_type(scope, self._other_types.get(scope["path"]))

    def _admitted(self, scope: Scope) -> TokenHolder:
        """The caller of a request; raises an error of ours if it may not come here."""
        path: str = scope["path"]
        caller = self._caller(scope)
        if not caller.may(needed := self._scopes.needed(scope["method"], path)):
            raise ForbiddenError(
                f"{path[:200]} needs a token with the scope {needed!r}; {caller.name!r} has "
                f"{', '.join(sorted(caller.scopes))}",
                code="scope_missing",
            )
        if _CONTROL_CHARACTERS.search(path):
            raise NotFoundError("the path has control characters", code="not_found")
        if needed == "admin" and scope["method"] not in ("GET", "HEAD"):
            logger.info("%s by %s", path[:200].encode("unicode_escape").decode(), caller.name)
        return caller

    def _caller(self, scope: Scope) -> TokenHolder:
        headers, peer = scope["headers"], scope.get("client")
        if key := bearer_bytes(headers):
            return self._ring.authenticate(key)
        forwarded = any(name in _FORWARDED for name, _ in headers)
        allowed = self._ring.empty if self._anonymous is None else self._anonymous
        if not (allowed and peer is not None and _is_loopback_address(peer[0]) and not forwarded):
            raise AuthenticationError(_NO_TOKEN)
        check_loopback(scope, _REMEDY)
        return ANONYMOUS


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
