"""``POST /v1/chat/completions``: through the swarm, else through the fallback, else a 503 that says when to come back.

Invariant: an error answer means that nothing of the request was trained.

What became of the request's group is told in headers of a plain answer (``x-swarm-policy-version``, ``x-swarm-reward``,
``x-swarm-reward-mean``, ``x-swarm-trained``: ``true``, ``false``, or ``pending`` while the swarm server has not yet
acknowledged, and ``x-swarm-drop-reason``). A stream says it in the ``swarm`` object of the chunk that carries the last
``finish_reason`` (clients skip a field that they do not know), and in the same headers too when the group was done
before they had to leave, which they do with the first keep-alive.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from adapters.dialects import ChatDialect
from gateway.exchange import Exchange, Reply, sse_headers
from gateway.forms import Caller, Decided, Incoming, Live, Relayed
from gateway.pipeline import Pipeline
from gateway.routing import LiveRoutes
from gateway.stats import Stats
from swarm.errors import SwarmGatewayError
from swarm.http.asgi import read_json

#: Events that go out in one write: a long answer is thousands of them.
_EVENTS_PER_WRITE = 16
#: Headers whose name says so much never reach a hook; one too many dropped is the lesser mistake.
_SECRET_HEADER = re.compile(r"^(?!x-swarm-).*(auth|cookie|credential|key|passw|secret|session|token)")


class ChatRoute:
    """ASGI endpoint."""

    def __init__(self, pipeline: Pipeline, routes: LiveRoutes, door: Stats) -> None:
        self._pipeline = pipeline
        self._routes = routes
        self._door = door
        self._dialect = ChatDialect()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        config = self._routes.plan.config
        self._door.requests += 1
        self._door.in_flight += 1
        try:
            request = Request(scope, receive)
            data = await read_json(request, config.max_body_bytes)
            incoming = Incoming(
                call=self._dialect.parse(data),
                headers={name: value for name, value in request.headers.items() if not _SECRET_HEADER.search(name)},
                caller=scope["state"].get("caller") or Caller(),
                path=scope["path"],
                raw=_dump(data),
                request_id=scope["state"]["request_id"],
            )
            exchange = Exchange(
                lambda: self._answer(incoming),
                keepalive=config.keepalive_seconds if incoming.call.stream else None,
                on_error=self._count_error,
            )
            await exchange(scope, receive, send)
        finally:
            self._door.in_flight -= 1

    async def _answer(self, incoming: Incoming) -> Reply:
        outcome = await self._pipeline.answer(incoming)
        close = outcome.close
        match outcome:
            case Relayed():
                return Reply(outcome.body, outcome.status, dict(outcome.headers), close)
            case Decided() if not incoming.call.stream:
                headers = {"content-type": "application/json", **outcome.headers}
                return Reply(_dump(outcome.completion), headers=headers, close=close)
            case Decided():
                return Reply(_events(outcome.chunks()), headers={**sse_headers(), **outcome.headers}, close=close)
            case Live():
                return Reply(_events(outcome.chunks), headers={**sse_headers(), **outcome.headers}, close=close)

    def _count_error(self, error: SwarmGatewayError) -> None:
        self._door.errors[error.code or error.type] += 1


async def _events(chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    events: list[bytes] = []
    async for chunk in chunks:
        events.append(b"data: " + _dump(chunk) + b"\n\n")
        if len(events) == _EVENTS_PER_WRITE:
            yield b"".join(events)
            events.clear()
    events.append(b"data: [DONE]\n\n")
    yield b"".join(events)


def _dump(body: dict[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
