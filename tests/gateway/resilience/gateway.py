"""The gateway of the resilience tests: a real one, which also tells where each of its requests is.

``python -m tests.gateway.resilience.gateway CONFIG.yaml`` prints its URL, then a line of JSON per event:
``{"request": id, "at": phase}`` as a request enters a phase, ``{"request": id, "left": phase}`` when its caller hangs
up in that phase, and ``{"request": id, "left": ""}`` when its answer is out. ``GET /held`` tells what is held by whom.

Invariant: looking changes nothing of what the gateway does.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from opentelemetry.trace import INVALID_SPAN, Span
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.app import create_app
from gateway.cli.sections import read_gateway
from gateway.observability.request import Metrics, RequestRecord, recording
from gateway.runtime import Gateway
from swarm.http.serve import bind, run_app

#: Where a request can be when its caller hangs up, by the names of the phases that tell it.
PHASES = {"queue": "queued", "claim": "claiming", "sample": "sampling", "hook": "judging"}


def tell(**fields: Any) -> None:
    """One line, in one write, so that lines never mix."""
    os.write(sys.stdout.fileno(), json.dumps(fields).encode() + b"\n")


class Whereabouts:
    """Where one request is; a tracer to it."""

    def __init__(self, request: str) -> None:
        self._request = request
        self._inside: Counter[str] = Counter()
        self._sampled = False
        self.streaming = False
        self.over = False

    @property
    def now(self) -> str:
        """The phase; ``between`` where it is in none."""
        if self.streaming:
            return "streaming"
        return next((known for name, known in PHASES.items() if self._inside[name]), "between")

    @contextmanager
    def span(self, name: str, headers: dict[str, str] | None = None) -> Generator[Span]:
        self._sampled = self._sampled or name == "sample"
        if name == "hook" and not self._sampled:
            name = "submit hook"
        self._inside[name] += 1
        if name in PHASES and not (self.streaming or self.over):
            tell(request=self._request, at=self.now)
        try:
            yield INVALID_SPAN
        finally:
            self._inside[name] -= 1

    def headers(self) -> dict[str, str]:
        return {}

    def sent(self, message: Message) -> None:
        body = message.get("body", b"")
        if body and not self.streaming and b"data:" in body:
            self.streaming = True
            tell(request=self._request, at="streaming")
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._end("")

    def received(self, message: Message) -> None:
        if message["type"] == "http.disconnect":
            self._end(self.now)

    def _end(self, phase: str) -> None:
        if not self.over:
            self.over = True
            tell(request=self._request, left=phase)


class WhereaboutsMiddleware:
    """The innermost middleware: whoever else looks at requests does so around it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        # the gateway's own are of the middleware around this one
        self._metrics = Metrics()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self.app(scope, receive, send)
            return
        request: str = scope["state"]["request_id"]
        where = Whereabouts(request)

        async def receiving() -> Message:
            message = await receive()
            where.received(message)
            return message

        async def sending(message: Message) -> None:
            await send(message)
            where.sent(message)

        with recording(RequestRecord(request, self._metrics, where)):
            await self.app(scope, receiving, sending)


async def held(request: Request) -> Response:
    """What is held; all zero, but for ``tasks``, while nobody asks anything."""
    gateway: Gateway = request.state.gateway
    stats = gateway.routes.stats
    loads = [gateway.admission.load(name) for name in stats]
    return JSONResponse(
        {
            "held": {
                "places": sum(load.in_flight + load.queued for load in loads),
                "requests": gateway.door.in_flight,
                "joinable": len(gateway.retries),
                "background": sum(len(swarm.background) for swarm in gateway.routes.swarms),
                "tasks": len(asyncio.all_tasks()),
            },
            "stats": {name: one.model_dump(mode="json") for name, one in stats.items()},
        }
    )


def main() -> None:
    path = Path(sys.argv[1])
    config = read_gateway(path)
    app = create_app(config, lambda: read_gateway(path))
    app.user_middleware.append(Middleware(WhereaboutsMiddleware))
    app.router.routes.insert(0, Route("/held", held))
    sock = bind(config.host, config.port)
    tell(url=f"http://{config.host}:{sock.getsockname()[1]}")
    run_app(app, sock)


if __name__ == "__main__":
    main()
