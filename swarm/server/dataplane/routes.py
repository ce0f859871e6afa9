"""HTTP routes of one episode's endpoint: ``/episodes/{episode_uuid}/v1/...``, opened by the episode's own key.

Invariant: a call lives no longer than its caller, its episode and its deadline, and is cancelled in vLLM with them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from swarm.errors import SwarmGatewayError, UnavailableError, UpstreamError
from swarm.http.asgi import bearer, error_response, read_json
from swarm.server.concurrency import ClientGoneError, first_of, until_gone
from swarm.server.config import ServerConfig
from swarm.server.controller import Controller
from swarm.server.dataplane.chat import ChatSession
from swarm.server.dataplane.requests import prepare
from swarm.server.dataplane.sse import DONE, encode_event
from swarm.server.dataplane.upstream import Upstream, replica
from swarm.server.episodes import Episode
from swarm.types import ModelCall

T = TypeVar("T")

POLICY_VERSION = "x-swarm-policy-version"
#: nginx's status for a caller that left; nobody reads it
_CLIENT_CLOSED_REQUEST = 499


class EpisodeLog:
    """Counts one call of an episode in the pool, and puts what it sampled there."""

    def __init__(self, controller: Controller, episode: Episode) -> None:
        self._controller = controller
        self._pool = controller.pool
        self._episode = episode

    def __enter__(self) -> EpisodeLog:
        self._pool.begin_call(self._episode)
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.end_call(self._episode)
        self._controller.pool_changed()

    def record(self, call: ModelCall) -> None:
        self._pool.record(self._episode, call)

    def quarantine(self, reason: str) -> None:
        self._pool.quarantine(self._episode, reason)


@dataclass(frozen=True)
class DataPlane:
    """The endpoints of all episodes."""

    config: ServerConfig
    controller: Controller
    upstream: Upstream

    def routes(self) -> list[Route]:
        base = "/episodes/{episode_uuid}/v1"
        return [
            Route(f"{base}/chat/completions", self.chat_completions, methods=["POST"]),
            Route(f"{base}/models", self.models, methods=["GET"]),
        ]

    async def chat_completions(self, request: Request) -> Response:
        episode = self._open(request)
        body = await read_json(request, self.config.max_body_bytes)
        # reading the body took time: the episode may be over by now
        if episode.over_error is not None:
            raise episode.over_error
        controller = self.controller
        serving = controller.serving
        call = prepare(body, episode.episode_type, controller.job, serving.engine_model)
        log = EpisodeLog(controller, episode)
        session = ChatSession(
            upstream=self.upstream,
            base_url=replica(serving.addresses, episode.episode_uuid),
            call=call,
            attempts=self.config.call_attempts,
            version=lambda: controller.policy_version,
            log=log,
        )
        if call.wants.stream:
            return _EventStream(self, episode, log, session)
        try:
            with log:
                work = self.while_open(episode, session.complete())
                answer, version = await until_gone(request.receive, work)
        except ClientGoneError:
            return Response(status_code=_CLIENT_CLOSED_REQUEST)
        return JSONResponse(answer, headers={POLICY_VERSION: str(version)})

    async def models(self, request: Request) -> Response:
        self._open(request)
        name = self.controller.job.model_name
        card = {"id": name, "object": "model", "created": 0, "owned_by": "swarm-gateway"}
        return JSONResponse({"object": "list", "data": [card]})

    async def while_open(self, episode: Episode, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``, cancelled when the episode ends or the deadline of calls passes.

        Raises:
            SwarmGatewayError: why the episode is over, or that the deadline has passed.
        """

        async def closed() -> T:
            await episode.over.wait()
            raise episode.over_error or UnavailableError("the episode is over")

        try:
            async with asyncio.timeout(self.config.call_timeout):
                return await first_of(work, closed())
        except TimeoutError as exc:
            error = UpstreamError(
                f"the call took longer than {self.config.call_timeout:g} s (call_timeout)", code="upstream_timeout"
            )
            error.status = 504
            raise error from exc

    def _open(self, request: Request) -> Episode:
        return self.controller.pool.open(request.path_params["episode_uuid"], bearer(request))


class _EventStream(Response):
    """A streamed answer whose status is decided by its first chunk."""

    def __init__(self, plane: DataPlane, episode: Episode, log: EpisodeLog, session: ChatSession) -> None:
        super().__init__()
        self._plane = plane
        self._episode = episode
        self._log = log
        self._session = session
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._log:
                await until_gone(receive, self._plane.while_open(self._episode, self._send(send)))
            tail = DONE
        except ClientGoneError:
            return
        except SwarmGatewayError as exc:
            if not self._started:
                await error_response(exc)(scope, receive, send)
                return
            tail = encode_event(exc.body())
        await send({"type": "http.response.body", "body": tail, "more_body": False})

    async def _send(self, send: Send) -> None:
        chunks: AsyncGenerator[dict[str, Any]]
        async with aclosing(self._session.stream()) as chunks:
            async for chunk in chunks:
                if not self._started:
                    self._started = True
                    headers = [
                        (b"content-type", b"text/event-stream; charset=utf-8"),
                        (b"cache-control", b"no-cache"),
                        (POLICY_VERSION.encode(), str(self._session.version()).encode()),
                    ]
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send({"type": "http.response.body", "body": encode_event(chunk), "more_body": True})
