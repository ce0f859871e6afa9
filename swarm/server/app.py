"""``create_app``: the swarm server as one ASGI application.

Invariant: there is no module state; everything a server owns lives from its lifespan's start to its end; nothing is
served before the journal is open, and when the lifespan has ended all of it is written and no engine process is left.
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

from swarm.errors import ConfigError
from swarm.http.asgi import EXCEPTION_HANDLERS, RequestIdMiddleware
from swarm.http.direct import DirectRoutes
from swarm.http.guard import JsonBodies
from swarm.server.api.agentjet import AgentJetRoutes, StateShown
from swarm.server.api.code import CodeRoutes
from swarm.server.api.engine import EngineRoutes
from swarm.server.api.episodes import EpisodeRoutes
from swarm.server.api.metrics import MetricsRoutes
from swarm.server.api.openapi import OpenApiRoutes
from swarm.server.api.serving import ServingRoutes
from swarm.server.api.shortcuts import EpisodeShortcuts
from swarm.server.api.status import StatusRoutes
from swarm.server.auth import Admission, AuthMiddleware, ClientNames, TokenRing
from swarm.server.config import ServerConfig
from swarm.server.dataplane.routes import DataPlane, NotFound
from swarm.server.engine.controller import Controller
from swarm.server.engine.snapshots import Snapshots
from swarm.server.engine.supervisor import Supervisor
from swarm.server.engine.verbose import VerboseLog
from swarm.server.journal.journal import Journal
from swarm.server.metering import MeteredJournal, RequestMeter
from swarm.server.meters import Meters
from swarm.server.monitor import Monitor

#: in the run folder
JOURNAL_NAME = "journal.db"


def create_app(config: ServerConfig, *, engine_command: Sequence[str] | None = None) -> Starlette:
    """The swarm server.

    Args:
        config: see :class:`ServerConfig`; ``host`` and ``port`` are for :func:`swarm.server.run.serve`.
        engine_command: starts the engine, the job's YAML path is appended; default: our verl adapter.

    Raises:
        ConfigError: the run folder's ``tokens.json`` is damaged.

    ``app.state.controller`` and ``app.state.supervisor`` are for the one who serves the app, and
    ``app.state.startup_error`` is why its lifespan did not start. ``app.state.shortcuts`` is for
    :func:`~swarm.http.serve.uvicorn_config`.
    """
    controller = Controller(config)
    supervisor = Supervisor(config, controller, engine_command)
    data_plane = DataPlane(config, controller)
    meters, log = Meters(), VerboseLog()
    monitor = Monitor(controller, meters, log, data_plane.replicas)
    # a look at the file for each request would cost a busy server a tenth of its time
    ring = TokenRing(config.token, config.run_dir, look_every=0.05, private=config.private_token)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        async with contextlib.AsyncExitStack() as stack:
            try:
                journal = _open_journal(config)
                # last: what happens while the rest goes down is written as well
                stack.push_async_callback(journal.close)
                controller.open(MeteredJournal(journal, meters))
                monitor.journal = journal.stats
            except ConfigError as exc:
                app.state.startup_error = exc
                raise
            expiry = asyncio.create_task(controller.expire(), name="expire")
            try:
                yield
            finally:
                controller.close()
                expiry.cancel()
                await supervisor.stop()
                await asyncio.gather(expiry, return_exceptions=True)
                await data_plane.close()

    names = ClientNames()
    control = [
        *EngineRoutes(config, controller, supervisor, StateShown(controller)).routes(),
        *EpisodeRoutes(config, controller, meters, names).routes(),
        *AgentJetRoutes(config, controller, log).routes(),
        *StatusRoutes(controller, monitor).routes(),
        *MetricsRoutes(monitor).routes(),
        *OpenApiRoutes().routes(),
        *CodeRoutes(config, controller, Snapshots(config.run_dir)).routes(),
        *ServingRoutes(data_plane).routes(),
    ]
    not_found = NotFound(data_plane.routes())
    admission = Admission(ring, config.anonymous)
    guards = [
        Middleware(AuthMiddleware, admission=admission),
        Middleware(JsonBodies, other_types=CodeRoutes.BODY_TYPES),
    ]
    app = Starlette(
        routes=[
            DirectRoutes(control, guards),
            DirectRoutes(data_plane.routes()),
            Route("/health", health, methods=["GET"]),
            *data_plane.routes(),
            Mount("/episodes", app=not_found),
            Mount("/groups", app=not_found),
            # last: it answers for every path that is not above, so that nothing is told to callers without the token
            Mount("", routes=control, middleware=guards),
        ],
        middleware=[Middleware(RequestMeter, meters=meters), Middleware(RequestIdMiddleware)],
        exception_handlers=EXCEPTION_HANDLERS,
        lifespan=lifespan,
    )
    app.state.startup_error = None
    app.state.shortcuts = EpisodeShortcuts(config, controller, meters, admission, names).table()
    app.state.controller = controller
    app.state.supervisor = supervisor
    app.state.data_plane = data_plane
    return app


def _open_journal(config: ServerConfig) -> Journal:
    try:
        config.run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"cannot make the run folder {config.run_dir}: {exc.strerror}", param="run_dir") from exc
    return Journal.open(config.run_dir / JOURNAL_NAME)


async def health(request: Request) -> Response:
    """The server answers; the engine may be in any state."""
    return JSONResponse({"status": "ok"})
