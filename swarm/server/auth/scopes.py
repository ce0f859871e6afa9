"""Control routes, each with the scope that its callers need.

Invariant: the scope is stated on the route and nowhere else; a path without a control route, misspelt or new, needs
``admin``, so nothing is open by omission.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import BaseModel
from starlette.routing import BaseRoute

from swarm.credentials import TokenScope
from swarm.http.routes import JsonRoute, Security

#: Paths below which no token is checked: probes, and the addresses of episodes, which have keys of their own.
WITHOUT_TOKEN = ("/health", "/episodes/", "/groups/")


class ControlRoute(JsonRoute):
    """A route for callers whose token has ``scope``; the other arguments are those of :class:`JsonRoute`."""

    def __init__(
        self,
        method: str,
        path: str,
        endpoint: Callable[..., Any],
        scope: TokenScope,
        *,
        refusals: Mapping[Any, str] | None = None,
        refused: type[BaseModel] | None = None,
        extra: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.scope: TokenScope = scope
        super().__init__(
            path,
            endpoint,
            security=security(scope),
            refusals=refusals,
            refused=refused,
            extra=extra,
            methods=[method],
            **options,
        )


def security(scope: TokenScope) -> Security:
    """What opens a control route, for the OpenAPI document."""
    # the empty alternative: programs on this machine, where the operator allows it
    return [{"token": [scope]}, {}]


class Scopes:
    """The scopes that the control routes among ``routes`` need, by path."""

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        self._by_path: dict[str, TokenScope] = {}
        self._by_pattern: list[tuple[re.Pattern[str], TokenScope]] = []
        for route in routes:
            if isinstance(route, ControlRoute):
                if route.param_convertors:
                    self._by_pattern.append((route.path_regex, route.scope))
                else:
                    self._by_path[route.path] = route.scope

    def needed(self, path: str) -> TokenScope:
        """The scope that a request to ``path`` needs."""
        if (exact := self._by_path.get(path)) is not None:
            return exact
        for pattern, scope in self._by_pattern:
            if pattern.match(path):
                return scope
        return "admin"
