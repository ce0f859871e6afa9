"""HTTP routes of the endpoints of episodes (``/episodes/{episode_uuid}/v1/...``) and of groups of them
(``/groups/{group_uuid}/v1/...``), each opened by its own key; episodes also speak the dialects of
:mod:`adapters.dialects`.

Invariant: a call lives no longer than its caller, its episodes and its deadline, and is cancelled in vLLM with them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from adapters.dialects import CompletionsDialect, Dialect, MessagesDialect, ResponsesDialect
from adapters.dialects.jsons import encode
from swarm.cards import model_card, model_list
from swarm.errors import RequestError, SwarmGatewayError, TokenTruthError, UpstreamError
from swarm.http.asgi import bearer, header, read_json
from swarm.protocol import ReplicaStatus
from swarm.server.concurrency import ClientGoneError, Once, until_gone
from swarm.server.config import ServerConfig
from swarm.server.dataplane import replicas
from swarm.server.dataplane.calls import Members, Nobody, Party
from swarm.server.dataplane.chat import ChatSession, StreamCutError
from swarm.server.dataplane.failures import UpstreamRefusalError, too_long
from swarm.server.dataplane.requests import prepare
from swarm.server.dataplane.upstream import Upstream
from swarm.server.dataplane.wires import ChatWire, DialectWire, Wire
from swarm.server.engine.controller import Controller

T = TypeVar("T")

POLICY_VERSION = "x-swarm-policy-version"
#: of a group's plain answer: how many tokens each choice has, in order; its usage tells only their sum
COMPLETION_TOKENS = "x-swarm-completion-tokens"
#: of a group's call: the places of the episodes that it samples for, by commas; default: all
PLACES = b"x-swarm-places"
#: of a plain call: its choices are to tell the text length of each token as ``pieces``, where that is known
PIECES = b"x-swarm-pieces"
#: of a streamed call: once begun it is to end, untrained, even if its episode is deleted for the engine's next phase
OUTLIVE = b"x-swarm-outlive"
#: nginx's status for a caller that left; nobody reads it
CLIENT_CLOSED_REQUEST = 499


@dataclass(frozen=True)
class DataPlane:
    """The endpoints of all episodes and groups; ``quarantined`` counts episodes by reason since the server started."""

    config: ServerConfig
    controller: Controller
    upstream: Upstream
    quarantined: Counter[str] = field(default_factory=Counter[str])

    def routes(self) -> list[Route]:
        return [
            Route("/episodes/{episode_uuid}/v1/chat/completions", self.chat_completions, methods=["POST"]),
            Route("/episodes/{episode_uuid}/v1/completions", self.completions, methods=["POST"]),
            Route("/episodes/{episode_uuid}/v1/messages", self.messages, methods=["POST"]),
            Route("/episodes/{episode_uuid}/v1/responses", self.responses, methods=["POST"]),
            Route("/episodes/{episode_uuid}/v1/models", self.models, methods=["GET"]),
            Route("/groups/{group_uuid}/v1/chat/completions", self.group_chat_completions, methods=["POST"]),
            Route("/groups/{group_uuid}/v1/models", self.models, methods=["GET"]),
        ]

    def replicas(self) -> list[ReplicaStatus]:
        """What is known of each vLLM replica."""
        return self.upstream.replicas.rows()

    async def chat_completions(self, request: Request) -> Response:
        return await self._chat(request, self._open(request), ChatWire())

    async def group_chat_completions(self, request: Request) -> Response:
        members = self._open(request)
        if (given := header(request.scope["headers"], PLACES)) is not None:
            places = _places(given, len(members.episodes))
            members = Members(self.controller, [members.episodes[place] for place in places], self.quarantined)
        return await self._chat(request, members, ChatWire(), len(members.episodes))

    async def completions(self, request: Request) -> Response:
        return await self._speak(request, CompletionsDialect())

    async def messages(self, request: Request) -> Response:
        return await self._speak(request, MessagesDialect())

    async def responses(self, request: Request) -> Response:
        return await self._speak(request, ResponsesDialect())

    async def unrecorded_chat_completions(self, request: Request) -> Response:
        """The engine's own answer, for no episode; who may ask is for the route to say."""
        return await self._chat(request, Nobody(self.controller), ChatWire())

    async def models(self, request: Request) -> Response:
        self._open(request)
        return JSONResponse(model_list([self.card()]))

    def card(self) -> dict[str, Any]:
        """The model that is served; raises :class:`SwarmGatewayError` without a job."""
        job = self.controller.job
        return model_card(job.model_name, max_model_len=job.max_model_len)

    async def while_open(self, members: Party, engine_gone: Once, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``, cancelled with its episodes, its engine and the deadline of calls.

        Raises:
            SwarmGatewayError: why an episode is over, that no engine serves, that the request is too long for the
                model, or that the deadline has passed.
        """
        try:
            async with asyncio.timeout(self.config.call_timeout):
                return await members.while_open(work, engine_gone)
        except UpstreamRefusalError as exc:
            if (told := too_long(exc, self.controller.job)) is None:
                raise
            raise told from exc
        except TimeoutError as exc:
            error = UpstreamError(
                f"the call took longer than {self.config.call_timeout:g} s (call_timeout)", code="upstream_timeout"
            )
            error.status = 504
            raise error from exc

    async def _speak(self, request: Request, dialect: Dialect) -> Response:
        wire = DialectWire(dialect)
        try:
            return await self._chat(request, self._open(request), wire)
        except SwarmGatewayError as exc:
            return wire.refusal(exc)

    async def _chat(self, request: Request, members: Party, wire: Wire, group_size: int | None = None) -> Response:
        body = wire.request(await read_json(request))
        # reading the body took time: an episode may be over by now
        members.check()
        controller = self.controller
        serving = controller.serving
        pieces = header(request.scope["headers"], PIECES) == b"1"
        call = prepare(body, members.episode_type, controller.job, serving.engine_model, group_size, pieces=pieces)
        session = ChatSession(
            upstream=self.upstream,
            route=replicas.Route(
                self.upstream.replicas,
                members.owners,
                lambda: replicas.prefix_of(body),
                lambda: controller.serving.addresses,
            ),
            call=call,
            attempts=self.config.call_attempts,
            version=lambda: controller.policy_version,
            log=members,
        )
        if call.wants.stream:
            outlives = header(request.scope["headers"], OUTLIVE) == b"1"
            return _EventStream(self, members, serving.gone, session, wire, outlives=outlives)
        try:
            with members:
                work = self.while_open(members, serving.gone, session.complete())
                done = await until_gone(request.receive, work)
        except ClientGoneError:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        headers = {POLICY_VERSION: str(done.version), **wire.headers}
        if group_size is not None:
            headers[COMPLETION_TOKENS] = ",".join(map(str, done.tokens))
        try:
            content = wire.answer(encode(done.answer))
        except UpstreamError:
            members.quarantine_all(
                TokenTruthError("an answer was recorded but could not be delivered", code="undelivered")
            )
            raise
        return Response(content, media_type="application/json", headers=headers)

    def _open(self, request: Request) -> Members:
        pool, key = self.controller.pool, bearer(request)
        if (group_uuid := request.path_params.get("group_uuid")) is not None:
            episodes = pool.open_group(group_uuid, key).members
        else:
            episodes = (pool.open(request.path_params["episode_uuid"], key),)
        return Members(self.controller, episodes, self.quarantined)


class _EventStream(Response):
    """A streamed answer whose status is decided by its first chunk."""

    def __init__(
        self,
        plane: DataPlane,
        members: Party,
        engine_gone: Once,
        session: ChatSession,
        wire: Wire,
        *,
        outlives: bool,
    ) -> None:
        super().__init__()
        self._outlives = outlives
        self._plane = plane
        self._members = members
        self._engine_gone = engine_gone
        self._session = session
        self._wire = wire
        self._started = False
        self._unsent = b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._members:
                work = self._plane.while_open(self._members, self._engine_gone, self._send(send))
                await until_gone(receive, work)
            tail = self._wire.end()
        except ClientGoneError:
            return
        except SwarmGatewayError as exc:
            if not self._started:
                await self._wire.refusal(exc)(scope, receive, send)
                return
            if not isinstance(exc, StreamCutError):
                # the agent has seen, and may act on, tokens that are in no record
                problem = TokenTruthError(f"a stream was cut: {exc.message}", code="stream_cut")
                self._members.quarantine_all(problem)
            tail = self._unsent + self._wire.cut(exc)
        await send({"type": "http.response.body", "body": tail, "more_body": False})

    async def _send(self, send: Send) -> None:
        chunks: AsyncGenerator[list[dict[str, Any]]]
        async with aclosing(self._session.stream()) as chunks:
            async for together in chunks:
                if not self._started:
                    self._started = True
                    if self._outlives:
                        self._members.outlive()
                    headers = [
                        (b"content-type", b"text/event-stream; charset=utf-8"),
                        (b"cache-control", b"no-cache"),
                        (POLICY_VERSION.encode(), str(self._session.version()).encode()),
                        *((name.encode(), told.encode()) for name, told in self._wire.headers.items()),
                    ]
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                for chunk in together:
                    self._unsent += self._wire.chunk(chunk)
                if self._unsent:
                    events, self._unsent = self._unsent, b""
                    await send({"type": "http.response.body", "body": events, "more_body": True})


def _places(given: bytes, count: int) -> list[int]:
    """The places that :data:`PLACES` names, of a group of ``count``.

    Raises:
        RequestError: they make no sense.
    """
    texts = given.split(b",")
    places = [int(text) for text in texts if text.isdigit() and len(text) < 6]
    if len(places) < len(texts) or len(set(places)) < len(places) or max(places) >= count:
        name = PLACES.decode()
        raise RequestError(f"{name}: different numbers from 0 to {count - 1}, separated by commas", param=name)
    return places
