"""The gateway's ASGI app: routes, and in its lifespan everything that holds a connection."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from gateway.background import Background
from gateway.chat import ChatRoute, check_model
from gateway.config import GatewayConfig
from gateway.fallback import Fallback
from gateway.fanout.episodes import Episodes, Serving
from gateway.fanout.group import FanOut
from gateway.fanout.sampling import Sampler
from gateway.fanout.submission import Submitter
from gateway.keys import ApiKeyMiddleware, KeyRing
from gateway.stats import Stats
from reward_hooks import HookRunner, Hooks, load_hooks
from swarm.client import AsyncSwarmClient
from swarm.client.policy import RetryPolicy
from swarm.client.wire import tls_context
from swarm.errors import UnavailableError
from swarm.http.asgi import EXCEPTION_HANDLERS, RequestIdMiddleware, on_http_exception
from swarm.http.guard import LoopbackGuard

#: An idle connection is dropped before the other side (uvicorn: after 5 s) closes it under a request.
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=3.0)
#: What the gateway may wait for, it waits for itself, within the bounds of its configuration.
_QUICK_RETRIES = RetryPolicy(attempts=3, base=0.1, cap=0.5, total=5.0)
#: What submissions under way get at shutdown; a swarm server that is gone must not hold a Ctrl-C for longer.
_LAST_SECONDS = 15.0


class Gateway:
    """What one running gateway consists of; made by the lifespan of :func:`create_app`."""

    def __init__(self, config: GatewayConfig, hooks: Hooks) -> None:
        self.config = config
        self.stats = Stats()
        self.background = Background(grace_seconds=min(config.submit_timeout_seconds, _LAST_SECONDS))
        # an episode's address is the swarm server's own: no proxy of the environment leads there; reads have the
        # deadline of the whole sample
        self.engine_http = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=5.0), limits=_LIMITS, trust_env=False, verify=tls_context()
        )
        self.client = AsyncSwarmClient(
            config.swarm_url or "", config.swarm_token.get_secret_value() or None, policy=_QUICK_RETRIES
        )
        self.episodes = Episodes(self.client, self.background)
        fan_out = FanOut(
            config,
            self.episodes,
            Sampler(self.engine_http),
            HookRunner(hooks, config.hook_timeout_seconds),
            Submitter(self.client),
            self.background,
            self.stats,
        )
        self.fallback_http: httpx.AsyncClient | None = None
        fallback: Fallback | None = None
        if config.upstream is not None:
            self.fallback_http = httpx.AsyncClient(
                timeout=httpx.Timeout(config.sample_timeout_seconds, connect=5.0), limits=_LIMITS
            )
            fallback = Fallback(self.fallback_http, config.upstream)
        self.chat = ChatRoute(config, self.episodes, fan_out, fallback, self.stats)


def create_app(config: GatewayConfig) -> Starlette:
    """The app for one gateway.

    Raises:
        ConfigError: the hooks do not load; said here, before anything is started.
    """
    hooks = load_hooks(config.hooks or "")

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[dict[str, Any]]:
        gateway = Gateway(config, hooks)
        async with gateway.fallback_http or nullcontext(), gateway.engine_http, gateway.client, gateway.background:
            yield {"gateway": gateway}

    return Starlette(
        routes=[
            Route("/v1/chat/completions", _Chat(), methods=["POST"]),
            Route("/v1/models", list_models),
            Route("/v1/models/{name:path}", get_model),
            Route("/health", health),
            Route("/status", status),
        ],
        middleware=[
            Middleware(RequestIdMiddleware),
            Middleware(LoopbackGuard, enabled=not config.api_keys),
            Middleware(ApiKeyMiddleware, keys=KeyRing(config.api_keys)),
        ],
        exception_handlers={**EXCEPTION_HANDLERS, HTTPException: _on_http_exception},
        lifespan=lifespan,
    )


async def _on_http_exception(request: Request, exc: Exception) -> Response:
    """A 404 of what is there under ``/v1`` says that the caller's ``base_url`` lacks it."""
    moved = {**request.scope, "path": f"/v1{request.url.path}"}
    if (
        isinstance(exc, HTTPException)
        and exc.status_code == 404
        and any(route.matches(moved)[0] is not Match.NONE for route in request.app.routes)
    ):
        exc = HTTPException(404, f"not found; base_url must end with /v1: {request.base_url}v1")
    return await on_http_exception(request, exc)


class _Chat:
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await scope["state"]["gateway"].chat(scope, receive, send)


async def list_models(request: Request) -> Response:
    """``GET /v1/models``: the one model that is trained and served, then the same under its aliases."""
    serving = await _serving(request)
    names = dict.fromkeys([serving.model, *_gateway(request).config.model_aliases])
    return JSONResponse({"object": "list", "data": [_card(name, serving) for name in names]})


async def get_model(request: Request) -> Response:
    """``GET /v1/models/{name}``."""
    serving = await _serving(request)
    name = request.path_params["name"]
    check_model(name, serving, _gateway(request).config)
    return JSONResponse(_card(name, serving))


async def health(request: Request) -> Response:
    """``GET /health``: 200 as long as this process answers; the engine's last known state is said beside it."""
    return JSONResponse({"status": "ok", **_engine(await _gateway(request).episodes.last_known())})


async def status(request: Request) -> Response:
    """``GET /status``: counts since the start."""
    gateway = _gateway(request)
    return JSONResponse(
        {
            **gateway.stats.as_dict(),
            "background": len(gateway.background),
            "control": gateway.config.control,
            **_engine(await gateway.episodes.last_known()),
        }
    )


def _gateway(request: Request) -> Gateway:
    return request.state.gateway


async def _serving(request: Request) -> Serving:
    serving = await _gateway(request).episodes.serving()
    if not serving.model:
        raise UnavailableError("the swarm server is down or has no training job yet", code="engine_offline")
    return serving


def _card(name: str, serving: Serving) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "swarm-gateway", "root": serving.model}


def _engine(serving: Serving) -> dict[str, Any]:
    return {
        "engine": serving.engine or "unreachable",
        "model": serving.model,
        "num_repeat": serving.num_repeat,
        "policy_version": serving.policy_version,
    }
