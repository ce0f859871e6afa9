"""The gateway's ASGI app: its routes, and the middleware that every request passes first; and how it is served."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Protocol

from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route

from adapters.dialects import DIALECTS
from gateway.api import admin, status
from gateway.api.completions import CompletionsEndpoint
from gateway.api.endpoint import DialectEndpoint, body_limit
from gateway.api.feedback import end_session, give_feedback, tell_session
from gateway.api.others import AnyOther, CountTokens, EngineCall
from gateway.api.responses import KeptResponse, ResponsesEndpoint
from gateway.config.gateway import LOOPBACK_HOSTS, GatewayConfig
from gateway.keys.ring import OPEN, KeyMiddleware, KeyRing
from gateway.observability.telemetry import TelemetryMiddleware, check_telemetry
from gateway.routing.plan import Plan
from gateway.runtime import ConfigSource, Gateway
from gateway.sessions.conversation import GroupWatcher
from swarm.concurrency import Background
from swarm.errors import SwarmGatewayError
from swarm.http.asgi import App, ErrorMiddleware, RequestMiddleware, http_error_response
from swarm.http.guard import check_loopback
from swarm.http.routes import JsonRoute, OpenApi, Security
from swarm.http.serve import TLSFiles, allow_connections, bind, run_app, spare_collections, url_of
from swarm.packs import required

_DESCRIPTION = """\
Answers like vLLM, in the dialect of the address. Other requests under `/v1` go on to the upstream of their route, if it
has one. A gateway that has keys needs one: `Authorization: Bearer KEY` or `x-api-key`.

Errors have OpenAI's shape, below `/v1/messages` Anthropic's, and carry `x-should-retry`, and `retry-after` where a
retry helps; every response carries `x-request-id`."""

#: Path of what is mounted last: whatever else is asked for under ``/v1``.
ANY_OTHER = "/v1/{path:path}"
_SCHEMES = {"key": {"type": "http", "scheme": "bearer", "description": "a key of the gateway"}}
_REMEDY = "give the gateway keys (`api_keys` or `keys_file`, and `host: 0.0.0.0` to be reached) and send one"
#: the empty alternative: a gateway without keys
_KEY: Security = [{"key": []}, {}]


def create_app(config: GatewayConfig, source: ConfigSource | None = None) -> App:
    """The app for one gateway; ``source`` reads the configuration again, on SIGHUP and for ``POST /admin/reload``.

    Raises:
        ConfigError: hooks do not load, or tracing or the request log cannot be set up; nothing is started yet.
    """
    plan = Plan.of(config)
    check_telemetry(config)
    keys = KeyRing(config)
    page = _page(config, keys)
    limits: dict[str, int] = dict.fromkeys(admin.CODE_PATHS, admin.CODE_BYTES)
    if page is not None:
        limits[f"{page.path}/"] = page.body_bytes

    @asynccontextmanager
    async def lifespan(app: App) -> AsyncGenerator[dict[str, Any]]:
        async with Gateway(plan, keys, source) as gateway:
            gateway.telemetry.metrics.registry.register(status.GatewayCollector(gateway))
            gateway.sessions.watcher = page.watcher if page is not None else None
            async with _reloading_on_hangup(gateway, enabled=source is not None):
                yield {"gateway": gateway}

    return App(
        routes=[*_routes(), *(page.routes if page is not None else ())],
        middleware=[
            Middleware(RequestMiddleware),
            Middleware(TelemetryMiddleware),
            # a browser asks without a key what it may send
            *_cors(config.cors_origins),
            Middleware(KeyMiddleware, keys=keys, exempt=page.path if page is not None else ""),
            Middleware(
                ErrorMiddleware,
                body_limit=partial(body_limit, limits),
                # a page that has a key may come from anywhere
                admit=partial(check_loopback, remedy=_REMEDY, origins=config.cors_origins) if keys.open else None,
                on_http_exception=_on_http_exception,
            ),
        ],
        lifespan=lifespan,
    )


class _Page(Protocol):
    """What the pack of the page adds: ``routes`` below ``path``, which check who calls themselves, for bodies of at
    most ``body_bytes``."""

    path: str
    body_bytes: int
    routes: Sequence[BaseRoute]
    watcher: GroupWatcher


def _page(config: GatewayConfig, keys: KeyRing) -> _Page | None:
    """
    Raises:
        ConfigError: a page is wanted, and its pack is not installed.
    """
    if config.ui is None:
        return None
    return required("page", "ui")(config.ui, keys, beyond_loopback=config.host not in LOOPBACK_HOSTS)


def _cors(origins: list[str]) -> list[Middleware]:
    """Lets the scripts of pages of these origins use the gateway, and read its headers."""
    if not origins:
        return []
    methods = ("GET", "POST", "PUT", "PATCH", "DELETE")
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=methods,
            allow_headers=["*"],
            expose_headers=["*"],
            allow_private_network=True,
        )
    ]


def _routes() -> list[BaseRoute]:
    not_known = {503: "not known yet"}
    more: dict[str, DialectEndpoint] = {
        endpoint.dialect.path: endpoint for endpoint in (CompletionsEndpoint(), ResponsesEndpoint())
    }
    routes: list[BaseRoute] = [
        *(
            Route(dialect.path, more.get(dialect.path) or DialectEndpoint(dialect), methods=["POST"])
            for dialect in DIALECTS
        ),
        *(Route(path, EngineCall(), methods=["POST"]) for path in ("/tokenize", "/detokenize")),
        Route("/v1/messages/count_tokens", CountTokens(), methods=["POST"]),
        Route("/v1/responses/{response_id}", KeptResponse(), methods=["GET", "DELETE"]),
        JsonRoute("/v1/models", status.list_models, security=_KEY, refusals=not_known),
        JsonRoute("/v1/models/{name:path}", status.get_model, security=_KEY, refusals=not_known),
        JsonRoute("/v1/feedback", give_feedback, methods=["POST"], security=_KEY),
        JsonRoute("/v1/sessions/{id:path}/end", end_session, methods=["POST"], security=_KEY),
        JsonRoute("/v1/sessions/{id:path}", tell_session, security=_KEY),
        Route("/health", status.health),
        *(JsonRoute("/ping", status.ping, methods=[method]) for method in ("GET", "POST")),
        JsonRoute("/version", status.version, security=_KEY),
        JsonRoute("/status", status.status, security=_KEY),
        JsonRoute("/metrics", status.metrics, security=_KEY, media_types=["text/plain"]),
        JsonRoute("/admin/reload", status.reload, methods=["POST"], security=_KEY),
        *admin.routes(),
    ]
    openapi = OpenApi("swarm-gateway", _DESCRIPTION, routes, _SCHEMES, lambda path: [] if path in OPEN else _KEY)
    routes.append(JsonRoute("/openapi.json", openapi.openapi, security=_KEY))
    ours = {route.path: ", ".join(sorted(route.methods or ())) for route in routes if isinstance(route, Route)}
    other, methods = AnyOther(ours), ["GET", "POST", "PUT", "PATCH", "DELETE"]
    # without the first, the framework would redirect it, by scheme and host, to the other
    return [
        *routes,
        Route("/v1", other, methods=methods, include_in_schema=False),
        Route(ANY_OTHER, other, methods=methods),
    ]


@asynccontextmanager
async def _reloading_on_hangup(gateway: Gateway, *, enabled: bool) -> AsyncGenerator[None]:
    """SIGHUP reads the configuration again, on platforms that have it and if this is the main thread."""
    if not enabled or not hasattr(signal, "SIGHUP") or threading.current_thread() is not threading.main_thread():
        yield
        return

    async def reload() -> None:
        # the log says what is wrong with the configuration
        with suppress(SwarmGatewayError):
            await gateway.reload()

    loop = asyncio.get_running_loop()
    async with Background(grace_seconds=0.0) as reloads:
        loop.add_signal_handler(signal.SIGHUP, lambda: reloads.start(reload(), "reloading the configuration"))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGHUP)


def _on_http_exception(request: Request, exc: HTTPException) -> Response:
    """A 404 for a path that exists under ``/v1`` says that the caller's ``base_url`` lacks it, and what a browser asks
    for a page is told the setting."""
    if request.method == "OPTIONS" and exc.status_code == 405:
        detail = f"{exc.detail}; for apps in a browser name their origins in cors_origins"
        exc = HTTPException(405, detail, exc.headers)
    moved = {**request.scope, "path": f"/v1{request.url.path}"}
    ours = [route for route in request.app.routes if route.path != ANY_OTHER]
    if exc.status_code == 404 and any(route.matches(moved)[0] is not Match.NONE for route in ours):
        exc = HTTPException(404, "not found; base_url must end with /v1")
    return http_error_response(request, exc)


def serve(
    config: GatewayConfig, on_bound: Callable[[str], None] | None = None, source: ConfigSource | None = None
) -> None:
    """Serve ``config`` until SIGINT or SIGTERM; requests and submissions in flight then get some time to finish.

    Args:
        config: its port 0 takes a free one.
        on_bound: called with the address (``http://host:port``) once the port is bound, before serving.
        source: reads the configuration again on SIGHUP; without one SIGHUP ends the process.

    Raises:
        ConfigError: the hooks do not load, the certificate does not serve, or the port is in use.
    """
    app = create_app(config, source)
    tls = tls_files(config)
    sock = bind(config.host, config.port)
    if on_bound is not None:
        url = url_of(config.host, sock.getsockname()[1])
        on_bound(url if tls is None else url.replace("http", "https", 1))
    allow_connections()
    spare_collections()
    run_app(app, sock, tls=tls)


def check(config: GatewayConfig) -> list[str]:
    """Check everything in ``config`` that can be checked without serving.

    Returns:
        The routes' names.

    Raises:
        ConfigError: hooks do not load, keys cannot be read, or the certificate does not serve.
    """
    create_app(config)
    tls_files(config)
    return config.route_names


def tls_files(config: GatewayConfig) -> TLSFiles | None:
    """The TLS files of ``config``, checked.

    Raises:
        ConfigError: the files do not serve.
    """
    return TLSFiles(config.tls.certificate, config.tls.key) if config.tls is not None else None
