"""HTTP routes of episodes (``/episodes/{episode_uuid}/v1/...``) and of groups (``/groups/{group_uuid}/v1/...``), each
opened by its own key; episodes also take the dialects of :mod:`adapters.dialects`.

Invariant: a call lives no longer than its caller, its episodes and its deadline, and is cancelled in vLLM with them.
What is sampled and recorded is a chat call whatever the dialect.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from adapters.dialects import DIALECTS, ChatDialect, Dialect, dialect_of, left_out_header, sse
from adapters.dialects.jsons import encode
from swarm.cards import model_card, model_list
from swarm.concurrency import ClientGoneError, until_gone
from swarm.errors import (
    ContextLengthError,
    MethodError,
    NotFoundError,
    RequestError,
    SwarmGatewayError,
    UpstreamError,
)
from swarm.http.asgi import bearer_bytes, error_response, is_sdk_retry, read_json
from swarm.packs import added
from swarm.protocol import COMPLETION_TOKENS, OUTLIVE, PLACES, POLICY_VERSION, SAMPLES
from swarm.server.auth import ClientNames, TokenHolder
from swarm.server.config import ServerConfig
from swarm.server.dataplane.answers import Body, chunks_of
from swarm.server.dataplane.calls import CallOwner, Conversations, UnrecordedCall
from swarm.server.dataplane.chat import ChatSession, StreamCutError
from swarm.server.dataplane.replica_client import ReplicaClient, UpstreamRefusalError, not_guided, too_long
from swarm.server.dataplane.replicas import Placement, Replicas, prefix_of
from swarm.server.dataplane.requests import prepare
from swarm.server.dataplane.suspects import Identity, Suspects
from swarm.server.engine.controller import Controller
from swarm.tokens import EARLIER_IDS

T = TypeVar("T")

#: Answers of one call without an episode: as many as a claimed group may have.
_MOST_SAMPLES = 1024


class DataPlane:
    """The endpoints of all episodes and groups; :meth:`close` it.

    Args:
        names: a token opens the episodes of the clients that are its own. HTTP clients send the token in an address
            (``http://x:TOKEN@host``) in place of the episode's key.
    """

    def __init__(self, config: ServerConfig, controller: Controller, names: ClientNames) -> None:
        self.config = config
        self.controller = controller
        self._names = names
        self.upstream = ReplicaClient()
        suspects = Suspects(config.run_dir / "refused", refused=controller.engine.death_explained)
        self.replicas = Replicas(self.upstream.is_healthy, suspects)
        self._conversations = Conversations()
        controller.episodes.on_erased = self._conversations.forget

    async def close(self) -> None:
        """Close the connections to vLLM."""
        await self.replicas.close()
        await self.upstream.close()

    def routes(self) -> list[Route]:
        """All routes; a dialect has the same path below every address."""
        episode, group, chat = "/episodes/{episode_uuid}", "/groups/{group_uuid}", ChatDialect()
        return [
            *(Route(episode + dialect.path, self._endpoint(dialect), methods=["POST"]) for dialect in DIALECTS),
            Route(f"{episode}/v1/models", self.models, methods=["GET"]),
            Route(group + chat.path, self.group_chat_completions, methods=["POST"]),
            Route(f"{group}/v1/models", self.models, methods=["GET"]),
        ]

    def placement(self, owner: CallOwner, body: Mapping[str, Any]) -> Placement:
        """Where a call of ``owner`` with this request goes."""
        controller = self.controller
        return Placement(
            self.replicas,
            owner.episodes or (owner,),
            prefix_of(body),
            lambda: controller.engine.served.addresses,
            Identity(controller.job.model, body),
            controller.engine.answered,
        )

    async def group_chat_completions(self, request: Request) -> Response:
        """One call of all episodes of a group, or of those that `x-swarm-places` names."""
        owner = self._open(request)
        if (header := request.headers.get(PLACES)) is not None:
            indices = _indices(header, len(owner.episodes))
            owner = CallOwner(self.controller, [owner.episodes[index] for index in indices])
        return await self._chat(request, owner, ChatDialect(), len(owner.episodes))

    async def unrecorded_chat_completions(self, request: Request) -> Response:
        """The engine's own answer to a call without an episode, or with :data:`SAMPLES` the answers that a group would
        give; the caller checks permissions."""
        header = request.headers.get(SAMPLES)
        size = None if header is None else _samples(header)
        return await self._chat(request, self.unrecorded(request), ChatDialect(), size)

    def unrecorded(self, request: Request) -> UnrecordedCall:
        """The owner of a call without an episode, by the version in its path.

        Raises:
            NotFoundError: that is no number.
        """
        version: str | None = request.path_params.get("version")
        if version is not None and not (version.isdecimal() and len(version) < 10):
            raise NotFoundError("/kept/ is followed by the number of a version")
        return UnrecordedCall(self.controller, self.config.run_dir, None if version is None else int(version))

    async def models(self, request: Request) -> Response:
        """The model that is served, as a list."""
        self._open(request)
        return JSONResponse(model_list([self.card()]))

    def card(self) -> dict[str, Any]:
        """The model that is served; raises :class:`SwarmGatewayError` without a job."""
        job = self.controller.job
        return model_card(job.model_name, max_model_len=job.max_model_len)

    async def while_open(self, owner: CallOwner, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of ``work()``, which is cancelled with the owner's episodes, the engine and the deadline of calls.

        Raises:
            SwarmGatewayError: why an episode is over, that no engine serves, that the request is too long for the
                model or has a schema that it cannot be held to, or that the deadline has passed.
        """
        try:
            async with asyncio.timeout(self.config.call_timeout):
                return await owner.while_open(work)
        except UpstreamRefusalError as exc:
            error = too_long(exc, self.controller.job) or not_guided(exc) or owner.explain(exc)
            if error is None:
                raise
            raise error from exc
        except TimeoutError as exc:
            late = f"the call took longer than {self.config.call_timeout:g} s (call_timeout)"
            raise UpstreamError(late, code="upstream_timeout", status=504) from exc

    def _endpoint(self, dialect: Dialect) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        async def endpoint(request: Request) -> Response:
            """One call of the episode's model."""
            try:
                return await self._chat(request, self._open(request), dialect)
            except SwarmGatewayError as exc:
                return _refusal(dialect, exc)

        return endpoint

    async def _chat(
        self, request: Request, owner: CallOwner, dialect: Dialect, group_size: int | None = None
    ) -> Response:
        again = is_sdk_retry(request.headers) and owner.answer_is_lost()
        try:
            return await self._answer(request, owner, dialect, group_size, again=again)
        except SwarmGatewayError as exc:
            owner.refuse(exc)
            raise

    async def _answer(
        self, request: Request, owner: CallOwner, dialect: Dialect, group_size: int | None, *, again: bool
    ) -> Response:
        asked = await read_json(request)
        # an episode may have ended while the body was read
        owner.check()
        left_out: Sequence[str] = ()
        if isinstance(dialect, ChatDialect) and asked.get("prompt") is not None:
            body = asked
        else:
            parsed = dialect.parse(asked)
            body, left_out = parsed.body, parsed.left_out
        controller = self.controller
        # the answers of a group without episodes are sampled as if they were to be trained
        kind = "train" if group_size is not None else owner.episode_type
        record = bool(owner.episodes)
        call = prepare(body, kind, controller.job, owner.engine_model, group_size, record=record)
        headers = left_out_header([*left_out, *dialect.notes_of(call.left_out)])
        goes_on = None
        if call.record and not call.raw:
            goes_on = self._conversations.begin(controller.job.model, body, owner.episodes)
            if ids := goes_on.earlier_ids:
                call.body[EARLIER_IDS] = ids
        session = ChatSession(
            upstream=self.upstream,
            placement=self.placement(owner, body),
            call=call,
            attempts=self.config.call_attempts,
            owner=owner,
            goes_on=goes_on,
            again=again,
            syncs=controller.engine.syncs,
        )
        if call.wants.stream:
            outlives = request.headers.get(OUTLIVE) == "1"

            def begun() -> dict[str, str]:
                if outlives:
                    owner.outlive()
                return {POLICY_VERSION: str(owner.version), **headers}

            chunks = self._or_overflow(session.stream(), owner, usage=call.wants.usage_chunk)
            return EventStreamResponse(self, owner, chunks, dialect, asked, begun)
        try:
            with owner:
                done = await until_gone(request.receive, self.while_open(owner, session.complete))
        except ContextLengthError as exc:
            if (instead := self._instead_of(exc, owner)) is None:
                raise
            content = encode(dialect.answer(asked, instead))
            return Response(content, media_type="application/json", headers=dict(headers))
        headers = {POLICY_VERSION: str(done.version), **headers}
        if group_size is not None:
            headers[COMPLETION_TOKENS] = ",".join(map(str, done.tokens))
        try:
            content = encode(dialect.answer(asked, done.answer))
        except UpstreamError:
            owner.quarantine_all("an answer was recorded but could not be delivered")
            raise
        return Response(content, media_type="application/json", headers=headers)

    def _open(self, request: Request) -> CallOwner:
        pool, key = self.controller.pool, bearer_bytes(request.scope["headers"]).decode("latin-1")
        if (group_uuid := request.path_params.get("group_uuid")) is not None:
            episodes: Sequence[Any] = pool.running.open_group(group_uuid, key).members
        else:
            caller: TokenHolder | None = request.scope.get("caller")
            episodes = (
                pool.open(
                    request.path_params["episode_uuid"],
                    key,
                    lambda client_uuid: caller is not None and self._names.allows(caller, client_uuid),
                ),
            )
        return CallOwner(self.controller, episodes)

    async def _or_overflow(
        self, chunks: AsyncGenerator[list[Body]], owner: CallOwner, *, usage: bool
    ) -> AsyncGenerator[list[Body]]:
        """``chunks``, or the answer of :meth:`_instead_of`."""
        try:
            async with aclosing(chunks):
                async for together in chunks:
                    yield together
        except UpstreamRefusalError as exc:
            error = too_long(exc, self.controller.job)
            if error is None or (instead := self._instead_of(error, owner)) is None:
                raise
            yield chunks_of(instead, usage=usage)

    def _instead_of(self, error: ContextLengthError, owner: CallOwner) -> Body | None:
        """What a pack answers to a prompt that is too long; ``None``: the error stands."""
        answer = added("overflow_answer")
        return answer(error, self.controller.job, owner) if answer else None


@dataclass(eq=False, repr=False)
class EventStreamResponse(Response):
    """A streamed answer, whose status depends on its first chunk.

    Args:
        plane: sets the deadline.
        owner: the call's.
        chunks: chat chunks, in lists of those to send together.
        dialect: the form of the events.
        asked: the request body, in the dialect.
        begun: called at the first chunk; gives headers.
    """

    plane: DataPlane
    owner: CallOwner
    chunks: AsyncGenerator[list[Body]]
    dialect: Dialect
    asked: Body
    begun: Callable[[], Mapping[str, str]]
    _started: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        super().__init__()
        self._events = self.dialect.stream(self.asked)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self.owner:
                await until_gone(receive, self.plane.while_open(self.owner, lambda: self._send(send)))
            tail = self._events.end()
        except ClientGoneError:
            return
        except SwarmGatewayError as exc:
            if not self._started:
                self.owner.refuse(exc)
                await _refusal(self.dialect, exc)(scope, receive, send)
                return
            if not isinstance(exc, StreamCutError):
                # the agent has seen, and may act on, tokens that are in no record
                self.owner.quarantine_all(f"a stream was cut: {exc.message}")
            tail = self._events.fail(exc)
        await self._start(send)
        await send({"type": "http.response.body", "body": tail, "more_body": False})

    async def _send(self, send: Send) -> None:
        async with aclosing(self.chunks) as chunks:
            async for together in chunks:
                await self._start(send)
                if events := b"".join(map(self._events.take, together)):
                    await send({"type": "http.response.body", "body": events, "more_body": True})

    async def _start(self, send: Send) -> None:
        if self._started:
            return
        self._started = True
        headers = {**sse.HEADERS, **self.begun()}
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": encoded})


class NotFound:
    """The ASGI application for the paths below ``/episodes/`` and ``/groups/`` that are not in ``routes``: its errors
    say which address was probably meant.

    They do not depend on which episodes exist, so a caller without a key learns nothing.
    """

    def __init__(self, routes: Iterable[Route]) -> None:
        #: (``episodes`` or ``groups``, path below the address) -> methods
        self._served: dict[tuple[str, str], str] = {}
        for route in routes:
            _, kind, _, rest = route.path.split("/", 3)
            self._served[kind, rest] = ", ".join(sorted((route.methods or set()) - {"HEAD"}))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        _, kind, _, rest, *_ = [*scope["path"].split("/", 3), "", ""]
        asked = f"{scope['method']} {scope['path'][:200]}"
        error: RequestError = NotFoundError(f"{asked}: {self._hint(kind, rest)}", code="route_not_found")
        if allowed := self._served.get((kind, rest)):
            error = MethodError(f"{asked}: use {allowed}", allowed)
        # the address that was meant may be written without /v1, or with it twice
        meant = "/v1/" + rest.rpartition("v1/")[2]
        await _refusal(dialect_of(meant, scope["headers"]), error)(scope, receive, send)

    def _hint(self, kind: str, rest: str) -> str:
        if rest.startswith("v1/v1/"):
            return "the SDK adds /v1 itself: give it the base_url without its last part"
        if rest in ("v1/messages/count_tokens", "v1/responses/input_tokens"):
            return (
                "an episode does not count tokens: each answer tells its usage, and the server's own POST /tokenize "
                "counts without sampling (with a token of the scope claim)"
            )
        if kind == "groups" and ("episodes", rest) in self._served:
            return "a group's address takes chat/completions only: use the addresses of its episodes"
        served = (rest for where, rest in self._served if where == kind)
        return f"there are {', '.join(sorted(served))}"


def _refusal(dialect: Dialect, exc: SwarmGatewayError) -> Response:
    return error_response(exc, encode(dialect.error(exc)))


def _indices(header: str, count: int) -> list[int]:
    """The positions in the header :data:`PLACES`, in a group of ``count``.

    Raises:
        RequestError: they are not different numbers below ``count``.
    """
    texts = header.split(",")
    indices = [int(text) for text in texts if text.isdecimal() and len(text) < 6]
    if len(indices) < len(texts) or len(set(indices)) < len(indices) or max(indices) >= count:
        raise RequestError(f"{PLACES}: different numbers from 0 to {count - 1}, separated by commas", param=PLACES)
    return indices


def _samples(header: str) -> int:
    """The number in the header :data:`SAMPLES`.

    Raises:
        RequestError: it is none from 1 to :data:`_MOST_SAMPLES`.
    """
    if not (header.isdecimal() and len(header) < 6 and 1 <= int(header) <= _MOST_SAMPLES):
        raise RequestError(f"{SAMPLES}: must be a number from 1 to {_MOST_SAMPLES}", param=SAMPLES)
    return int(header)
