"""What a gateway reports about itself: ``GET /v1/models``, ``/version``, ``/ping``; for the operator ``GET /health``,
``GET /status`` and ``POST /admin/reload``.

Invariant: health and status do not wait for a slow swarm server. On loopback without keys everybody on the machine is
the operator.
"""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.api.endpoint import caller_of
from gateway.observability.scrubbing import without_credentials
from gateway.rollout.server import ServerReport
from gateway.routing.table import Route, RouteTable
from gateway.runtime import Gateway
from gateway.stats import GatewayStatus, RouteLoad, RouteStatus, Stats
from swarm import __version__
from swarm.cards import model_list
from swarm.http.routes import OpenAIBody


class Reloaded(BaseModel):
    """The configuration and the hooks were read again. ``changed`` names the settings that differ; those that are in
    ``needs_restart`` too keep their old value until a restart."""

    routes: list[str]
    changed: list[str]
    needs_restart: list[str]


class Version(BaseModel):
    """As vLLM tells its own."""

    version: str


async def health(request: Request) -> Response:
    """Whether the gateway answers, and the engine's last known state."""
    gateway: Gateway = request.state.gateway
    with gateway.routes.table.held() as table:
        return JSONResponse({"status": "ok", **await _engine(table)})


async def ping(request: Request) -> Response:
    """Whether the gateway answers; without a body, as vLLM's."""
    return Response()


async def version(request: Request) -> Version:
    """The gateway's version."""
    return Version(version=__version__)


async def status(request: Request) -> GatewayStatus:
    """Counts since the start: in all, by route and by swarm server."""
    gateway: Gateway = request.state.gateway
    with gateway.routes.table.held() as table:
        engine = await _engine(table)
        total = sum(gateway.routes.stats.values(), start=Stats())
        # only the door counts requests that came to no route
        total.requests, total.in_flight = gateway.door.requests, gateway.door.in_flight
        total.errors = gateway.door.errors
        swarms = gateway.routes.swarms
        return GatewayStatus(
            **dict(total),
            **engine,
            background=sum(len(swarm.background) for swarm in swarms),
            control=gateway.config.control,
            joined=gateway.retries.joined,
            routes={route.name: _route(gateway, route) for route in table.routes},
            reload_failures=gateway.reload_failures,
            reload_error=gateway.reload_error,
            sessions=gateway.sessions.status(),
            swarms=[swarm.status() for swarm in swarms],
        )


async def reload(request: Request) -> Reloaded:
    """Read the configuration file again; a wrong one changes nothing."""
    gateway: Gateway = request.state.gateway
    changed, needs_restart = await gateway.reload()
    routes = [route.name for route in gateway.routes.plan.routes]
    return Reloaded(routes=routes, changed=changed, needs_restart=needs_restart)


async def list_models(request: Request) -> OpenAIBody:
    """The models that the key may ask for."""
    gateway: Gateway = request.state.gateway
    with gateway.routes.table.held() as table:
        return OpenAIBody.model_validate(model_list(await table.models(caller_of(request.scope))))


async def get_model(request: Request, name: str) -> OpenAIBody:
    """One model."""
    if not name:
        # a slash at the end of the path of all
        return await list_models(request)
    gateway: Gateway = request.state.gateway
    with gateway.routes.table.held() as table:
        return OpenAIBody.model_validate(await table.model(name, caller_of(request.scope)))


def _route(gateway: Gateway, route: Route) -> RouteStatus:
    settings, load = route.settings, gateway.admission.load(route.name)
    verdicts = route.swarm.report.comparisons if route.swarm is not None and settings.serve is not None else ()
    stage = route.shadow and route.shadow.sides.stage
    return RouteStatus(
        **dict(route.stats),
        models=route.all_names,
        # the password of an address is a token, and a key of an application reads this
        swarm_url=settings.swarm_url and without_credentials(settings.swarm_url),
        upstream=route.upstream_key and without_credentials(route.upstream_key[0].base_url),
        policy=settings.policy,
        train_fraction=settings.train_fraction,
        control=settings.control,
        load=RouteLoad(running=load.in_flight, waiting=load.queued, refused=load.refused),
        breaker=route.upstream and route.upstream.breaker.state,
        stage=stage and stage.label,
        stage_conflict=route.shadow.conflict if route.shadow is not None else "",
        verdicts=[verdict for verdict in verdicts if verdict.route == route.name],
    )


async def _engine(table: RouteTable) -> dict[str, Any]:
    """The engine of the first route that has a swarm; all swarms are asked, so that their state is fresh."""
    swarms = dict.fromkeys(route.swarm for route in table.routes if route.swarm is not None)
    reports: list[ServerReport] = await asyncio.gather(*(swarm.last_known() for swarm in swarms))
    if not reports:
        return {}
    serving = reports[0]
    return {
        "engine": serving.engine or next(iter(swarms)).status().engine,
        "engine_failure": serving.failure and serving.failure.model_dump(),
        "model": serving.model,
        "num_repeat": serving.num_repeat,
        "policy_version": serving.policy_version,
    }
