"""``create_app``: the swarm server as one ASGI application, and ``run``, which serves it with uvicorn.

Invariant: there is no module state; everything a server owns lives from the start to the end of its lifespan. It
serves nothing before the journal is open; when the lifespan has ended, everything is written and no engine process is
left. The port is bound first, so a port in use is one clear error and port 0 works.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Sequence

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import Scope

from swarm.checkpoints import checkpoint_folder, kept_steps
from swarm.errors import ConfigError
from swarm.http.asgi import App, ErrorMiddleware, RequestMiddleware
from swarm.http.routes import OpenApi, Security
from swarm.http.serve import (
    AppServer,
    allow_connections,
    bind,
    run_server,
    spare_collections,
    url_of,
    uvicorn_config,
)
from swarm.packs import added, required
from swarm.server.api.code_sync import CODE_PATH, CODE_TYPE, CodeRoutes
from swarm.server.api.engine import ConfigRoutes, EngineRoutes
from swarm.server.api.episodes import EpisodeRoutes
from swarm.server.api.metrics import GroupRoutes, MetricsRoutes
from swarm.server.api.policies import PolicyRoutes
from swarm.server.api.subjects import DataRoutes
from swarm.server.api.unrecorded import UnrecordedRoutes
from swarm.server.audit import AuditLog
from swarm.server.auth import ClientNames, ControlRoute, Scopes, TokenCheck, TokenRing, check_exposure
from swarm.server.config import ServerConfig
from swarm.server.dataplane.routes import DataPlane, NotFound
from swarm.server.engine.changes import Changes
from swarm.server.engine.controller import Controller
from swarm.server.engine.history import History
from swarm.server.engine.resolving import Resolver
from swarm.server.engine.snapshots import Snapshots
from swarm.server.engine.supervisor import Supervisor
from swarm.server.foreign import ForeignClients
from swarm.server.kept import HeldPolicies
from swarm.server.monitor import MeteredJournal, Meters, Monitor, VerboseLog

logger = logging.getLogger(__name__)

#: in the run folder
JOURNAL_NAME = "journal.db"
#: how long requests in flight may take once the server stops
_DRAIN_SECONDS = 5

_DESCRIPTION = """\
Control plane and data plane of a swarm server. Control routes need `Authorization: Bearer TOKEN` (or `x-api-key`) with
a token of the scope that is listed; `admin` includes all, and every token may read. Programs on the server's own
machine need none where the operator allows it. The routes below `/episodes/` and `/groups/` take the key that came with
the claim.

Errors have OpenAI's shape and carry `x-should-retry`, and `retry-after` where a retry helps; every response carries
`x-request-id`."""

_SCHEMES = {
    "token": {"type": "http", "scheme": "bearer", "description": "a token of the server"},
    "episode": {"type": "http", "scheme": "bearer", "description": "the key of an episode or a group"},
}


def create_app(config: ServerConfig, *, engine_command: Sequence[str] | None = None) -> App:
    """The swarm server.

    Args:
        config: see :class:`ServerConfig`; ``host`` and ``port`` are for :func:`run`.
        engine_command: starts the engine, the job's YAML path is appended; default: our verl adapter.

    Raises:
        ConfigError: the run folder's ``tokens.json`` is damaged, or a pack that is asked for is not installed.

    ``app.state.controller`` and ``app.state.supervisor`` are for the process that serves the app;
    ``app.state.startup_error`` is the reason if its lifespan did not start.
    """
    controller = Controller(config)
    supervisor = Supervisor(config, controller, engine_command)
    names = ClientNames()
    audit = AuditLog(config.run_dir)
    policies = PolicyRoutes(controller.episodes, audit, config.run_dir)
    data_plane = DataPlane(config, controller, names)
    meters, log = Meters(), VerboseLog()
    make_webhook = None if config.webhook is None else required("webhook", "webhook")
    monitor = Monitor(controller, meters, log, data_plane.replicas.rows, config.run_dir.resolve())
    # checking the file for each request would cost a busy server a tenth of its time
    ring = TokenRing(config.token, config.run_dir, private=config.private_token)

    @contextlib.asynccontextmanager
    async def lifespan(app: App) -> AsyncGenerator[None]:
        async with contextlib.AsyncExitStack() as stack:
            try:
                journal = _open_journal(config)
                journal.meters = meters
                # closed last: what happens during the shutdown is written too
                stack.push_async_callback(journal.close)
                controller.open(journal)
                checkpoints = checkpoint_folder(None, config.run_dir)
                if not controller.run.has_job and kept_steps(checkpoints):
                    # the file is new, or a kill or a full disk emptied it
                    logger.warning(
                        "%s holds checkpoints, and %s does not say of which job: the next one begins anew. If the "
                        "journal was lost, stop this server and restore it from a copy",
                        checkpoints,
                        JOURNAL_NAME,
                    )
            except ConfigError as exc:
                app.state.startup_error = exc
                raise
            running = [
                asyncio.create_task(controller.episodes.expire(), name="expire"),
                asyncio.create_task(HeldPolicies(controller.run, config.run_dir).run(), name="hold"),
            ]
            if make_webhook is not None:
                webhook = make_webhook(config.webhook, policies.statuses, policies.alarms)
                running.append(asyncio.create_task(webhook.run(), name="webhook"))
            for task in running:
                task.add_done_callback(_tell)
            try:
                yield
            finally:
                controller.close()
                for task in running:
                    task.cancel()
                await supervisor.stop()
                await asyncio.gather(*running, return_exceptions=True)
                await data_plane.close()

    snapshots = Snapshots(config.run_dir)
    # another engine resolves its configuration itself
    resolver = Resolver(config.run_dir) if engine_command is None else None
    changes = Changes(config, controller, supervisor, snapshots, resolver)
    foreign: ForeignClients = (added("foreign_clients") or ForeignClients)(config, controller, log)
    routes: list[BaseRoute] = [
        *EpisodeRoutes(config, controller.episodes, meters, names, log, foreign).routes(),
        *data_plane.routes(),
        *UnrecordedRoutes(data_plane).routes(),
        *EngineRoutes(controller, changes, foreign, monitor, audit).routes(),
        *CodeRoutes(config, changes, snapshots, audit, log, foreign).routes(),
        *ConfigRoutes(changes, History(config.run_dir), audit, log).routes(),
        *foreign.routes(),
        *MetricsRoutes(monitor).routes(),
        *policies.routes(),
        *GroupRoutes(config.run_dir / JOURNAL_NAME, controller, audit).routes(),
        *DataRoutes(config.run_dir / JOURNAL_NAME, controller, audit).routes(),
        Route("/health", health, methods=["GET"]),
    ]

    openapi = OpenApi("swarm server", _DESCRIPTION, routes, _SCHEMES, _plain_security)
    routes.append(ControlRoute("GET", "/openapi.json", openapi.openapi, "read"))

    def body_limit(scope: Scope) -> int:
        return snapshots.limits.max_archive_bytes if scope["path"] == CODE_PATH else config.max_body_bytes

    admit = TokenCheck(ring, config.anonymous, Scopes(routes), {CODE_PATH: CODE_TYPE})
    not_found = NotFound(data_plane.routes())
    app = App(
        routes=[*routes, Mount("/episodes", app=not_found), Mount("/groups", app=not_found)],
        middleware=[
            Middleware(RequestMiddleware, over=meters.request),
            Middleware(ErrorMiddleware, body_limit=body_limit, admit=admit),
        ],
        lifespan=lifespan,
    )
    app.state.startup_error = None
    app.state.controller = controller
    app.state.supervisor = supervisor
    app.state.data_plane = data_plane
    return app


def _tell(task: asyncio.Task[None]) -> None:
    """Say that a task has failed which is to run as long as the server."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.critical("%s has ended, and nobody does its work: restart the server", task.get_name(), exc_info=error)


def _plain_security(path: str) -> Security:
    return [{"episode": []}] if path.startswith(("/episodes/", "/groups/")) else []


def _open_journal(config: ServerConfig) -> MeteredJournal:
    try:
        config.run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"cannot make the run folder {config.run_dir}: {exc.strerror}", param="run_dir") from exc
    return MeteredJournal.open(config.run_dir / JOURNAL_NAME, config)


async def health(request: Request) -> Response:
    """The server answers; the engine may be in any state."""
    return JSONResponse({"status": "ok"})


def run(
    config: ServerConfig,
    *,
    engine_command: Sequence[str] | None = None,
    on_ready: Callable[[str], None] | None = None,
    log_level: str = "warning",
) -> None:
    """Serve until SIGINT or SIGTERM; then stop the engine.

    Args:
        on_ready: called with the server's URL once it serves (port 0 is resolved).

    Raises:
        ConfigError: beyond loopback without a token, the port is in use, the host is not this machine's, or the run
            folder is another server's or cannot be read.
    """
    check_exposure(config)
    listener = bind(config.host, config.port)
    app = create_app(config, engine_command=engine_command)
    allow_connections()

    def ready() -> None:
        spare_collections()
        # the journal is open by now: opening it may fail, and takes long if it is large
        if on_ready is not None:
            on_ready(url_of(config.host, listener.getsockname()[1]))

    uvicorns = uvicorn_config(app, shutdown_seconds=_DRAIN_SECONDS, log_level=log_level)
    uvicorn_log = logging.getLogger("uvicorn.error")

    def is_news(record: logging.LogRecord) -> bool:
        # no traceback of a start that fails with an error of ours, which says it all
        return app.state.startup_error is None

    uvicorn_log.addFilter(is_news)
    try:
        run_server(AppServer(uvicorns, release=app.state.controller.close, ready=ready), listener)
    except ConfigError as exc:
        raise app.state.startup_error or exc from None
    finally:
        uvicorn_log.removeFilter(is_news)
