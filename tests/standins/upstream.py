"""A plain upstream: an API like OpenAI's that no swarm server stands behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.standins.swarm import made, said

CHAT = "/v1/chat/completions"


class Got(NamedTuple):
    """A request: method, path with query, headers, and the body."""

    method: str
    target: str
    headers: dict[str, str]
    raw: bytes

    @property
    def body(self) -> Any:
        return json.loads(self.raw)


class Upstream:
    """Records what it gets, and answers by path; ``default`` answers elsewhere, by default with a framework's 404.

    Attributes:
        left: set when a caller has left a hanging answer.
        arrived: set by each request.
    """

    def __init__(self) -> None:
        self.answers: dict[str, Callable[[Any], Any]] = {CHAT: lambda body: said("from the upstream")}
        self.default: Response = JSONResponse({"detail": "Not Found"}, 404)
        self.got: list[Got] = []
        self.models = JSONResponse({"object": "list", "data": [{"id": "big", "object": "model"}]})
        self.left, self.arrived = asyncio.Event(), asyncio.Event()
        self.url = ""
        others = Route("/{path:path}", self._answer, methods=["GET", "POST", "PUT", "DELETE"])
        self.app = Starlette(routes=[Route("/v1/models", self._models), others])

    async def _models(self, request: Request) -> Response:
        return self.models

    async def _answer(self, request: Request) -> Response:
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        self.got.append(Got(request.method, target, dict(request.headers), await request.body()))
        self.arrived.set()
        make = self.answers.get(request.url.path)
        return self.default if make is None else await made(make(self.got[-1].body))

    def hanging(self, first: bytes = b"data: {}\n\n") -> Response:
        """Sends ``first`` and then nothing until the caller leaves."""

        async def body() -> AsyncIterator[bytes]:
            try:
                yield first
                await asyncio.Event().wait()
            finally:
                self.left.set()

        return StreamingResponse(body(), media_type="text/event-stream")
