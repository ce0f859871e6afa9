"""``GET /health`` and ``GET /status``: how this gateway is, and what it has done since it started.

Invariant: neither waits for a swarm server that is slow to say how it is.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.limits.admission import Load
from gateway.rollout.claims import Serving
from gateway.routing.table import RouteTable
from gateway.runtime import Gateway
from gateway.stats import Stats


async def health(request: Request) -> Response:
    """200 as long as this process answers; the engine's last known state is said beside it."""
    gateway: Gateway = request.state.gateway
    with gateway.routes.table.held() as table:
        return JSONResponse({"status": "ok", **await _engine(table)})


async def status(request: Request) -> Response:
    """Counts since the start: of all, of each route and of each swarm server."""
    gateway: Gateway = request.state.gateway
    with gateway.routes.table.held() as table:
        engine = await _engine(table)
        total = sum(gateway.routes.stats.values(), start=Stats())
        # what came to no route is known to the door alone
        total.requests, total.in_flight = gateway.door.requests, gateway.door.in_flight
        total.errors = gateway.door.errors
        swarms = gateway.routes.swarms
        return JSONResponse(
            {
                **total.as_dict(),
                "background": sum(len(swarm.background) for swarm in swarms),
                "control": gateway.config.control,
                "joined": gateway.retries.joined,
                **engine,
                "routes": {
                    route.name: {
                        "models": route.all_names,
                        "swarm_url": route.settings.swarm_url,
                        "upstream": route.settings.upstream and route.settings.upstream.base_url,
                        "policy": route.settings.policy,
                        "train_fraction": route.settings.train_fraction,
                        "control": route.settings.control,
                        **route.stats.as_dict(),
                        "load": _load(gateway.admission.load(route.name)),
                        "breaker": route.upstream and route.upstream.state,
                    }
                    for route in table.routes
                },
                "sessions": gateway.sessions.as_dict(),
                "swarms": [swarm.status() for swarm in swarms],
            }
        )


def _load(load: Load) -> dict[str, int]:
    return {
        "running": load.in_flight,
        "waiting": load.queued,
        "refused": load.refused,
    }


async def _engine(table: RouteTable) -> dict[str, Any]:
    """The engine of the first route that has a swarm; all are heard, so that what is known is new."""
    swarms = dict.fromkeys(route.swarm for route in table.routes if route.swarm is not None)
    heard: list[Serving] = await asyncio.gather(*(swarm.episodes.last_known() for swarm in swarms))
    if not heard:
        return {}
    serving = heard[0]
    return {
        "engine": serving.engine or "unreachable",
        "engine_failure": serving.failure and serving.failure.model_dump(include={"reason", "count"}),
        "model": serving.model,
        "num_repeat": serving.num_repeat,
        "policy_version": serving.policy_version,
    }
