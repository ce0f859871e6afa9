"""A straight way to routes whose path is fixed but for its second part: one look-up instead of a regular expression per
route.

Invariant: it serves exactly what a ``Mount`` of the same routes with the same middleware would; every request that is
not for one of these paths with one of its methods is left to the routes behind it.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Sequence

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

Endpoint = Callable[[Request], Awaitable[Response]]

_NAMED = re.compile(r"/([^/{}]+)/{(\w+)}/([^{}]+)")
#: in the scope
_ENDPOINT = "swarm.endpoint"


class DirectRoutes(BaseRoute):
    """Put it first among the routes, and the same ``routes`` (in a ``Mount`` if they have ``middleware``) last: those
    answer for other methods, and for paths that nobody knows.

    Args:
        routes: their endpoints are coroutine functions from request to response; ``/a`` and ``/a/{name}/b/c`` are
            served, other ones with parameters are ignored.
    """

    def __init__(self, routes: Iterable[Route], middleware: Sequence[Middleware] = ()) -> None:
        self._endpoints: dict[tuple[str, str], Endpoint] = {}
        #: by method, what is before and what is behind the parameter; with its name
        self._named: dict[tuple[str, str, str], tuple[Endpoint, str]] = {}
        for route in routes:
            for method in route.methods or ():
                if not route.param_convertors:
                    self._endpoints[method, route.path] = route.endpoint
                elif found := _NAMED.fullmatch(route.path):
                    self._named[method, found[1], found[3]] = route.endpoint, found[2]
        app: ASGIApp = self._call
        for wrapper, args, kwargs in reversed(middleware):
            app = wrapper(app, *args, **kwargs)
        self._app = app

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope["type"] != "http":
            return Match.NONE, {}
        method, path = scope["method"], scope["path"]
        if (endpoint := self._endpoints.get((method, path))) is not None:
            return Match.FULL, {_ENDPOINT: endpoint}
        if self._named:
            parts = path.split("/", 3)
            if len(parts) == 4 and parts[2] and (found := self._named.get((method, parts[1], parts[3]))) is not None:
                return Match.FULL, {_ENDPOINT: found[0], "path_params": {found[1]: parts[2]}}
        return Match.NONE, {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await scope[_ENDPOINT](Request(scope, receive, send))
        await response(scope, receive, send)
