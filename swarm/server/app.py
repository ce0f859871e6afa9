"""``create_app``: the swarm server as one ASGI application.

Invariant: there is no module state; everything a server owns lives from its lifespan's start to its end, and when the
lifespan has ended no engine process is left.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from swarm.http.asgi import EXCEPTION_HANDLERS, RequestIdMiddleware
from swarm.http.direct import DirectRoutes
from swarm.http.guard import JsonBodies
from swarm.server.auth import AuthMiddleware, TokenRing
from swarm.server.config import ServerConfig
from swarm.server.controller import Controller
from swarm.server.dataplane.routes import DataPlane
from swarm.server.dataplane.upstream import Upstream
from swarm.server.routes.code import CodeRoutes
from swarm.server.routes.engine import EngineRoutes
from swarm.server.routes.episodes import EpisodeRoutes
from swarm.server.snapshots import Snapshots
from swarm.server.supervisor import Supervisor


def create_app(config: ServerConfig, *, engine_command: Sequence[str] | None = None) -> Starlette:
    """The swarm server.

    Args:
        config: see :class:`ServerConfig`; ``host`` and ``port`` are for :func:`swarm.server.run.serve`.
        engine_command: starts the engine, the job's YAML path is appended; default: our verl adapter.

    Raises:
        ConfigError: the run folder's ``tokens.json`` is damaged.

    ``app.state.controller`` and ``app.state.supervisor`` are for the one who serves the app.
    """
    controller = Controller(config.post_rolling_timeout)
    supervisor = Supervisor(config, controller, engine_command)
    upstream = Upstream()
    ring = TokenRing(config.token, config.run_dir)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        idle = asyncio.create_task(controller.expire_idle(), name="expire-idle")
        try:
            yield
        finally:
            controller.close()
            idle.cancel()
            await supervisor.stop()
            await asyncio.gather(idle, return_exceptions=True)
            await upstream.close()

    control = [
        *EngineRoutes(config, controller, supervisor).routes(),
        *EpisodeRoutes(config, controller).routes(),
        *CodeRoutes(config, controller, Snapshots(config.run_dir)).routes(),
    ]
    guards = [
        Middleware(AuthMiddleware, ring=ring, anonymous=config.anonymous),
        Middleware(JsonBodies, other_types=CodeRoutes.BODY_TYPES),
    ]
    app = Starlette(
        routes=[
            DirectRoutes(control, guards),
            Route("/health", health, methods=["GET"]),
            *DataPlane(config, controller, upstream).routes(),
            # last: it answers for every path that is not above, so that nothing is told to callers without the token
            Mount("", routes=control, middleware=guards),
        ],
        middleware=[Middleware(RequestIdMiddleware)],
        exception_handlers=EXCEPTION_HANDLERS,
        lifespan=lifespan,
    )
    app.state.controller = controller
    app.state.supervisor = supervisor
    return app


async def health(request: Request) -> Response:
    """The server answers; the engine may be in any state."""
    return JSONResponse({"status": "ok"})
