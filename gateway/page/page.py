"""``/ui``: the files of the page, the routes that its scripts read, and what each needs.

Invariant: beside the files and the login, each route below ``/ui`` answers only to a visitor whose key has the scope of
the route. By the headers of every response, a browser runs only the page's own scripts and styles, and no other site
can frame the page.
"""

from __future__ import annotations

import gzip
import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from adapters.dialects.jsons import encode
from gateway.config.gateway import PageConfig
from gateway.keys.ring import KeyRing
from gateway.keys.store import PageScope
from gateway.page.deciding import GivenMove, GivenRefusal, ask_data, move, opt_out
from gateway.page.judging import GivenJudgement, Judgements
from gateway.page.kept_groups import KeptGroups
from gateway.page.learning import Servers
from gateway.page.login import Logins, Visitor, refuse_foreign
from gateway.page.selection import VIEWS, GroupQuery, select
from gateway.page.stream import Events
from gateway.types import Caller
from swarm.errors import ForbiddenError, NotFoundError, RequestError, UnavailableError
from swarm.http.asgi import read_body
from swarm.validation import describe_validation

_STATIC = Path(__file__).parent / "static"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}
#: Rows of one answer.
_MOST_ROWS = 500
ModelT = TypeVar("ModelT", bound=BaseModel)
Answer = Callable[[Request, Visitor], Awaitable[Any]]


class GivenKey(BaseModel):
    """The body of a login."""

    key: str = ""


class WebPage:
    """The page of one gateway.

    Args:
        config: its settings.
        keys: of the gateway.
        beyond_loopback: whether other machines reach the gateway: then the cookie needs HTTPS.

    Attributes:
        path: of all routes.
        body_bytes: that a request may have.
        watcher: is shown the groups.
    """

    path = "/ui"
    #: 10,000 characters of a comment and 64 Ki of a correction, in UTF-8
    body_bytes = 256 * 1024

    def __init__(self, config: PageConfig, keys: KeyRing, *, beyond_loopback: bool) -> None:
        self._logins = Logins(keys, secure=beyond_loopback)
        self._keys = keys
        self._events = Events()
        self._judgements = Judgements(config.judgements)
        self.watcher = KeptGroups(config.max_bytes, self._events, self._judgements.erase)
        self._servers = Servers()
        self.routes: Sequence[BaseRoute] = [
            *(
                Route(path, _file(_STATIC / name), include_in_schema=False)
                for path, name in (
                    ("/ui", "index.html"),
                    ("/ui/", "index.html"),
                    *((f"/ui/{file.name}", file.name) for file in sorted(_STATIC.iterdir())),
                )
            ),
            Route("/ui/api/login", self._log_in, methods=["POST"], include_in_schema=False),
            Route("/ui/api/logout", self._log_out, methods=["POST"], include_in_schema=False),
            self._route("/events", "GET", "look", self._stream),
            self._route("/me", "GET", "look", self._me),
            self._route("/groups", "GET", "look", self._list),
            self._route("/groups/{id}", "GET", "look", self._show),
            self._route("/groups/{id}/judgement", "POST", "judge", self._judge),
            self._route("/groups/{id}/judgement", "DELETE", "judge", self._undo),
            self._route("/learning", "GET", "look", self._learning),
            self._route("/move", "POST", "decide", self._move),
            self._route("/data/opt-out", "POST", "decide", self._opt_out),
            self._route("/data", "GET", "look", self._data),
            self._route("/data/delete", "POST", "look", self._data),
            Route("/ui/{path:path}", _nothing, include_in_schema=False),
        ]

    def _route(self, path: str, method: str, scope: PageScope, answer: Answer) -> Route:
        async def endpoint(request: Request) -> Response:
            visitor = self._logins.visitor(request, scope)
            if scope == "decide" and self._keys.open:
                # whoever reaches it may be anybody on this machine
                raise ForbiddenError("a gateway without keys does not know who decides", code="keyless")
            content = await answer(request, visitor)
            if not isinstance(content, Response):
                content = Response(encode(content), media_type="application/json")
            content.headers.update({**_HEADERS, "cache-control": "no-store"})
            return content

        return Route(f"/ui/api{path}", endpoint, methods=[method], include_in_schema=False)

    async def _log_in(self, request: Request) -> Response:
        refuse_foreign(request)
        wanted = await _body(request, GivenKey)
        response = Response(status_code=204, headers=_HEADERS)
        self._logins.log_in(wanted.key, request, response)
        return response

    async def _log_out(self, request: Request) -> Response:
        refuse_foreign(request)
        response = Response(status_code=204, headers=_HEADERS)
        self._logins.log_out(request, response)
        return response

    async def _me(self, request: Request, visitor: Visitor) -> Any:
        opens, planned = visitor.holder.caller.opens, request.state.gateway.routes.plan.routes
        me = {"name": visitor.name, "scope": visitor.scope, "admin": visitor.holder.admin}
        return {**me, "keyless": self._keys.open, "routes": [route.name for route in planned if opens(route.name)]}

    async def _list(self, request: Request, visitor: Visitor) -> Any:
        wanted = {name: value for name, value in request.query_params.items() if value}
        query = _validated(GroupQuery.model_validate, wanted, "the query")
        if query.view not in VIEWS:
            raise RequestError(f"there is no view {query.view[:40]!r}; use one of {', '.join(VIEWS)}", param="view")
        await self._keys.audit_read(visitor.name, "groups read")
        at, last = time.time(), self._events.latest
        everything = self.watcher.opened(visitor.holder.caller)
        groups = await select(everything, query)
        return {
            "at": at,
            "last": last,
            "groups": [group.row() for group in groups[: min(query.limit, _MOST_ROWS)]],
            "fitting": len(groups),
            "all": len(everything),
            "keys": sorted({group.key for group in everything if group.key}),
            "policies": sorted({group.policy for group in everything if group.policy is not None}, reverse=True),
            "agreement": self._judgements.agreement(visitor.holder.caller.opens),
        }

    async def _show(self, request: Request, visitor: Visitor) -> Any:
        group = self.watcher.group(request.path_params["id"], visitor.holder.caller)
        await self._keys.audit_read(visitor.name, f"group {group.id} read")
        return {"last": self._events.latest, **group.whole()}

    async def _judge(self, request: Request, visitor: Visitor) -> Any:
        group = self.watcher.group(request.path_params["id"], visitor.holder.caller)
        judgement = await _body(request, GivenJudgement)
        kept = await self._judgements.judge(group, visitor.name, judgement)
        request.state.gateway.sessions.counts.feedback["counts" if kept["trains"] else "late"] += 1
        self.watcher.touched(group)
        return kept

    async def _undo(self, request: Request, visitor: Visitor) -> Any:
        group = self.watcher.group(request.path_params["id"], visitor.holder.caller)
        await self._judgements.undo(group, visitor.name)
        self.watcher.touched(group)
        return {}

    async def _learning(self, request: Request, visitor: Visitor) -> Any:
        answer = await self._servers.learning(request.state.gateway, visitor.holder.caller)
        return {**answer, "agreement": self._judgements.agreement(visitor.holder.caller.opens)}

    async def _move(self, request: Request, visitor: Visitor) -> Any:
        done = await move(request.state.gateway, visitor, await _body(request, GivenMove))
        self._servers.forget()
        return done.model_dump(mode="json")

    async def _opt_out(self, request: Request, visitor: Visitor) -> Any:
        return await opt_out(request, visitor, await _body(request, GivenRefusal), self._keys)

    async def _data(self, request: Request, visitor: Visitor) -> Any:
        deletes = request.method == "POST"
        answer = await ask_data(request, visitor, "/data/delete" if deletes else "/data/report")
        if deletes:
            # before an upstream alone, no swarm server notes it
            await self._keys.audit(
                {"who": visitor.name, "what": "POST /ui/api/data/delete", "result": answer.status_code}
            )
        return answer

    async def _stream(self, request: Request, visitor: Visitor) -> Any:
        await self._keys.audit_read(visitor.name, "groups read")
        last_id = request.headers.get("last-event-id") or request.query_params.get("last", "")

        def look() -> Caller:
            if getattr(request.app, "leaving", False):
                raise UnavailableError("the gateway is being stopped")
            return self._logins.visitor(request).holder.caller

        events = self._events.follow(look, last_id)
        return StreamingResponse(events, headers={"x-accel-buffering": "no"}, media_type="text/event-stream")


async def _body(request: Request, model: type[ModelT]) -> ModelT:
    return _validated(model.model_validate_json, bytes(await read_body(request.receive)) or b"{}", "the body")


def _validated(validate: Callable[[Any], ModelT], data: Any, where: str) -> ModelT:
    try:
        return validate(data)
    except ValidationError as exc:
        raise RequestError(describe_validation(exc, where).message) from exc


def _file(path: Path) -> Callable[[Request], Awaitable[Response]]:
    """Serves a file of the page, which is read once."""
    content = path.read_bytes()
    packed = gzip.compress(content, mtime=0)
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    kind = f"{_TYPES[path.suffix]}; charset=utf-8"
    headers = {**_HEADERS, "etag": tag, "cache-control": "no-cache", "vary": "accept-encoding", "content-type": kind}

    async def endpoint(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(packed, headers={**headers, "content-encoding": "gzip"})
        return Response(content, headers=headers)

    return endpoint


async def _nothing(request: Request) -> Response:
    raise NotFoundError(f"there is no {request.url.path[:200]}")
