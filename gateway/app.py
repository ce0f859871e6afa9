"""The gateway's ASGI app: its addresses, and what every request passes before it gets there."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from gateway.api import admin, metrics, models, status
from gateway.api.feedback import end_session, give_feedback
from gateway.api.openapi import openapi
from gateway.api.routes import ANY_OTHER, dialect_routes, other_routes
from gateway.config import GatewayConfig
from gateway.keys.middleware import KeyMiddleware
from gateway.keys.ring import KeyRing
from gateway.observability.telemetry import TelemetryMiddleware, check_telemetry
from gateway.routing.live import Plan
from gateway.runtime import ConfigSource, Gateway
from swarm.errors import SwarmGatewayError
from swarm.http.asgi import EXCEPTION_HANDLERS, RequestIdMiddleware, on_http_exception
from swarm.http.guard import LoopbackGuard

logger = logging.getLogger(__name__)


def create_app(config: GatewayConfig, source: ConfigSource | None = None) -> Starlette:
    """The app for one gateway.

    Args:
        config: what to serve.
        source: reads the configuration anew, on SIGHUP and for ``POST /admin/reload``.

    Raises:
        ConfigError: hooks do not load, or what is to see cannot; said here, before anything is started.
    """
    plan = Plan.of(config)
    check_telemetry(config)
    keys = KeyRing(config)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[dict[str, Any]]:
        async with Gateway(plan, keys, source) as gateway:
            gateway.telemetry.metrics.registry.register(metrics.GatewayCollector(gateway))
            with _reloading_on_hangup(gateway, enabled=source is not None):
                yield {"gateway": gateway}

    return Starlette(
        routes=[
            *dialect_routes(),
            Route("/v1/models", models.list_models),
            Route("/v1/models/{name:path}", models.get_model),
            Route("/v1/feedback", give_feedback, methods=["POST"]),
            Route("/v1/sessions/{id:path}/end", end_session, methods=["POST"]),
            Route("/health", status.health),
            Route("/status", status.status),
            Route("/metrics", metrics.metrics),
            Route("/openapi.json", openapi),
            Route("/admin/reload", admin.reload, methods=["POST"]),
            *other_routes(),
        ],
        middleware=[
            Middleware(RequestIdMiddleware),
            Middleware(TelemetryMiddleware),
            Middleware(LoopbackGuard, enabled=keys.open),
            Middleware(KeyMiddleware, keys=keys),
        ],
        exception_handlers={**EXCEPTION_HANDLERS, HTTPException: _on_http_exception},
        lifespan=lifespan,
    )


@contextmanager
def _reloading_on_hangup(gateway: Gateway, *, enabled: bool) -> Generator[None]:
    """SIGHUP reads the configuration again, where this platform has it and this thread may hear it."""
    if not enabled or not hasattr(signal, "SIGHUP") or threading.current_thread() is not threading.main_thread():
        yield
        return
    reloads: set[asyncio.Task[None]] = set()

    def begin() -> None:
        task = asyncio.create_task(_reload(gateway))
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, begin)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        for task in reloads:
            task.cancel()


async def _reload(gateway: Gateway) -> None:
    try:
        await gateway.reload()
    except SwarmGatewayError:
        # the log says what is wrong
        return
    except Exception:
        logger.exception("the configuration was not reloaded")


async def _on_http_exception(request: Request, exc: Exception) -> Response:
    """A 404 of what is there under ``/v1`` says that the caller's ``base_url`` lacks it."""
    moved = {**request.scope, "path": f"/v1{request.url.path}"}
    ours = [route for route in request.app.routes if route.path != ANY_OTHER]
    if (
        isinstance(exc, HTTPException)
        and exc.status_code == 404
        and any(route.matches(moved)[0] is not Match.NONE for route in ours)
    ):
        exc = HTTPException(404, f"not found; base_url must end with /v1: {request.base_url}v1")
    return await on_http_exception(request, exc)
