"""Who uses the page: a gateway key, given once, becomes a cookie.

Invariant: the cookie holds no key, and scripts cannot read it. Each request looks the key up again, so a key that is
revoked, has expired, or lost a scope ends what it opened. What a foreign site makes a browser send is refused. Keys are
24 random bytes, which nobody guesses: a wrong one costs what it costs on every other route, and makes nobody wait.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response

from gateway.keys.ring import Holder, KeyRing
from gateway.keys.store import PageScope
from swarm.concurrency import Latest
from swarm.credentials import digest
from swarm.errors import AuthenticationError, ForbiddenError
from swarm.http.guard import is_json

COOKIE = "swarm_page"
SECONDS = 12 * 3600.0
#: Logins that are remembered; the oldest leave.
_MOST_LOGINS = 1000
_LADDER: tuple[PageScope, ...] = ("look", "judge", "decide")
#: Refused: another site's page sent it.
_FOREIGN = ("cross-site", "same-site")


@dataclass(frozen=True, slots=True)
class Visitor:
    """Who looks: ``name`` stands in judgements."""

    holder: Holder
    scope: PageScope

    @property
    def name(self) -> str:
        """Whose key it is."""
        caller = self.holder.caller
        return caller.label or caller.key_id or "somebody on this machine"


class Logins:
    """The logins of one gateway, in memory: a restart ends them.

    Args:
        keys: of the gateway.
        secure: keep the cookie off plain HTTP.
    """

    def __init__(self, keys: KeyRing, *, secure: bool) -> None:
        self._keys = keys
        self._secure = secure
        #: digest of the cookie -> digest of the key, and when it ends on the monotonic clock
        self._logins = Latest[bytes, tuple[bytes, float]](_MOST_LOGINS)

    def log_in(self, key: str, request: Request, response: Response) -> None:
        """Set the cookie for the owner of ``key``, who sent ``request``.

        Raises:
            AuthenticationError: it is none of the gateway's keys.
            ForbiddenError: it opens nothing of the page.
        """
        key_digest = digest(key.strip())
        self._visitor(key_digest)
        cookie = secrets.token_urlsafe(32)
        self._logins[digest(cookie)] = key_digest, time.monotonic() + SECONDS
        # a proxy on this machine says that it was asked over HTTPS
        secure = self._secure or request.url.scheme == "https"
        response.set_cookie(
            COOKIE, cookie, max_age=int(SECONDS), path="/ui", secure=secure, httponly=True, samesite="strict"
        )

    def log_out(self, request: Request, response: Response) -> None:
        """Forget the login."""
        self._logins.pop(digest(request.cookies.get(COOKIE, "")), None)
        response.delete_cookie(COOKIE, path="/ui", secure=self._secure, httponly=True, samesite="strict")

    def visitor(self, request: Request, scope: PageScope = "look") -> Visitor:
        """Who sent this.

        Raises:
            AuthenticationError: nobody whose login is known and whose key still opens something.
            ForbiddenError: another site's page sent it, or the key does not open ``scope``.
        """
        refuse_foreign(request)
        key_digest = b""
        if not self._keys.open:
            # one that is over is kept: all that the page asks at once hears the same
            key_digest, until = self._logins.get(digest(request.cookies.get(COOKIE, "")), (b"", 0.0))
            if not key_digest:
                raise AuthenticationError("log in: the page needs a key of the gateway", code="login_needed")
            if until < time.monotonic():
                raise AuthenticationError("your login has expired: log in again", code="login_expired")
        visitor = self._visitor(key_digest)
        if _LADDER.index(visitor.scope) < _LADDER.index(scope):
            raise ForbiddenError(f"your key may {visitor.scope}; this needs a key that may {scope}", code="page_scope")
        return visitor

    def _visitor(self, key_digest: bytes) -> Visitor:
        holder = self._keys.holder(key_digest)
        scope = "decide" if holder.admin else holder.virtual and holder.virtual.page
        if not scope:
            raise ForbiddenError(
                "this key does not open the page: make one with `swarm-gateway keys create NAME --page judge`",
                code="page_scope",
            )
        return Visitor(holder, scope)


def refuse_foreign(request: Request) -> None:
    """
    Raises:
        ForbiddenError: a page of another site made the browser send this, or a form did.
    """
    headers = request.headers
    origin = headers.get("origin")
    site = headers.get("sec-fetch-site")
    foreign = site in _FOREIGN
    # what the browser itself compared holds behind a proxy that changes the host; over plain HTTP it says nothing
    if origin is not None and site != "same-origin":
        foreign = foreign or urlsplit(origin).netloc != headers.get("host", "")
    if foreign:
        raise ForbiddenError("another site's page sent this", code="foreign_origin")
    # a form cannot send JSON, and its sender needs no permission of ours
    if request.method not in ("GET", "HEAD") and not is_json(headers.get("content-type", "").encode("latin-1")):
        raise ForbiddenError("send JSON with `content-type: application/json`", code="foreign_origin")
