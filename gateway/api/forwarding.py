"""Forwards a request to the upstream of its route, as it came.

Invariant: method, body and answer go through untouched, multipart bodies included; the request takes a place on its
route like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

from gateway.observability.request import answered_by, phase
from gateway.routing.route import Route
from gateway.routing.table import RouteTable
from gateway.runtime import Gateway
from gateway.types import Caller, Relayed
from swarm.errors import NotFoundError, SwarmGatewayError


@dataclass(frozen=True, slots=True)
class AnyRequest:
    """A request as it came; ``path`` begins with ``/v1``, ``query`` has no question mark."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    body: bytes
    model: str | None
    caller: Caller


async def forward(gateway: Gateway, request: AnyRequest) -> Relayed:
    """The upstream's answer; its ``close`` must be called.

    Raises:
        NotFoundError: no route with an upstream takes the request.
        OverloadedError: too many requests at once.
        UnavailableError, UpstreamError: the upstream cannot answer.
    """
    async with AsyncExitStack() as held:
        table = held.enter_context(gateway.routes.table.held())
        route = await _route(table, request)
        assert route.upstream is not None
        answered_by(route.name, "upstream")
        with phase("queue"):
            await held.enter_async_context(gateway.admission.place(route.name, route.settings, request.caller))
        with phase("upstream"):
            relayed = await route.upstream.forward(
                request.method, request.path, request.headers, request.body, query=request.query
            )
        if relayed.close is not None:
            held.push_async_callback(relayed.close)
        return replace(relayed, close=held.pop_all().aclose)


def model_of(data: Mapping[str, Any]) -> str | None:
    """The model that a body names; ``None`` for anything but a text."""
    model = data.get("model")
    return model if isinstance(model, str) else None


async def is_plain(gateway: Gateway, model: str | None, caller: Caller) -> bool:
    """Whether only an upstream answers the requests for ``model``."""
    try:
        with gateway.routes.table.held() as table:
            route = await table.find(model, caller)
    except SwarmGatewayError:
        return False
    return route.training is None


async def _route(table: RouteTable, request: AnyRequest) -> Route:
    """The route of the model; for a model of no route (such as one for embeddings), the only one with an upstream."""
    route: Route | None = None
    unknown: NotFoundError | None = None
    try:
        route = await table.find(request.model, request.caller)
    except NotFoundError as exc:
        unknown = exc
    if route is None:
        opened = request.caller.routes
        able = [one for one in table.routes if one.upstream is not None and (opened is None or one.name in opened)]
        route = able[0] if len(able) == 1 else None
        if route is None and len(able) > 1 and unknown is not None:
            raise unknown
    if route is None or route.upstream is None:
        where = "this gateway" if route is None else f"the route {route.name!r}"
        raise NotFoundError(
            f"{request.method} {request.path}: {where} does not answer this itself and has no upstream to pass it on "
            "to (`upstream` in its configuration)",
            code="route_not_found",
        )
    return route
