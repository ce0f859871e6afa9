"""The engine without episodes: ``/v1/...`` as vLLM answers it, for callers with a token of the scope ``claim``.

Invariant: nothing that is sampled here is recorded or trained, and it is sampled as the caller asks; no call waits for
an engine that sleeps.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import Receive, Scope, Send

from adapters.dialects.jsons import encode
from adapters.dialects.sse import DONE, encode_event
from swarm.cards import model_list
from swarm.errors import NotFoundError, SwarmGatewayError, UnavailableError
from swarm.http.asgi import error_response, read_json
from swarm.http.routes import OpenAIBody
from swarm.server.auth.scopes import ControlRoute
from swarm.server.concurrency import ClientGoneError, until_gone
from swarm.server.dataplane.calls import CallOwner, Unrecorded
from swarm.server.dataplane.relaying import RelayedCall
from swarm.server.dataplane.routes import CLIENT_CLOSED_REQUEST, POLICY_VERSION, DataPlane

#: vLLM's addresses that are passed on as they are
RELAYED_PATHS = ("/v1/completions", "/v1/embeddings", "/tokenize", "/detokenize")

_SAMPLES = {"5XX": "the engine failed the call, or none serves now"}
_NO_JOB = {503: "there is no training job"}


@dataclass(frozen=True)
class ServingRoutes:
    """``/v1/chat/completions``, ``/v1/models`` and :data:`RELAYED_PATHS`."""

    plane: DataPlane

    def routes(self) -> list[BaseRoute]:
        body = {"requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}}
        streams = {"responses": {"200": {"content": {"application/json": {}, "text/event-stream": {}}}}}
        return [
            ControlRoute("POST", "/v1/chat/completions", self.chat, "claim", refusals=_SAMPLES, extra=body | streams),
            *(
                ControlRoute("POST", path, self.relay, "claim", refusals=_SAMPLES, extra=body | streams)
                for path in RELAYED_PATHS
            ),
            ControlRoute("GET", "/v1/models", self.models, "read", refusals=_NO_JOB),
            ControlRoute("GET", "/v1/models/{name:path}", self.model, "read", refusals=_NO_JOB),
        ]

    async def chat(self, request: Request) -> Response:
        """The engine without an episode: like vLLM's, never recorded and never trained."""
        return await self.plane.unrecorded_chat_completions(request)

    async def models(self) -> OpenAIBody:
        """The model that is served."""
        return OpenAIBody.model_validate(model_list([self._card()]))

    async def model(self, name: str) -> OpenAIBody:
        """The same by its name."""
        card = self._card()
        if name != card["id"]:
            text = f"The model `{name[:200]}` does not exist; `{card['id']}` is served"
            raise NotFoundError(text, code="model_not_found", param="model")
        return OpenAIBody.model_validate(card)

    def _card(self) -> dict[str, Any]:
        if not self.plane.controller.has_job:
            raise UnavailableError("there is no training job yet", code="engine_offline")
        return self.plane.card()

    async def relay(self, request: Request) -> Response:
        """Like vLLM's, except for the name of the model."""
        plane, controller = self.plane, self.plane.controller
        asked = await read_json(request)
        owner = Unrecorded(controller)
        owner.check()
        serving = controller.serving
        call = RelayedCall(
            upstream=plane.upstream,
            placement=plane.placement(owner, lambda: _prefix(asked)),
            path=request.url.path,
            body=asked | {"model": serving.engine_model},
            model_name=controller.job.model_name,
            attempts=plane.config.call_attempts,
        )
        version = str(controller.policy_version)
        if asked.get("stream") is True:
            return _RelayedStream(plane, owner, call, version)
        try:
            answer = await until_gone(request.receive, plane.while_open(owner, serving.gone, call.complete()))
        except ClientGoneError:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return Response(encode(answer), media_type="application/json", headers={POLICY_VERSION: version})


class _RelayedStream(Response):
    """Events as vLLM sends them; the first one decides the status."""

    def __init__(self, plane: DataPlane, owner: CallOwner, call: RelayedCall, version: str) -> None:
        super().__init__()
        self._plane = plane
        self._owner = owner
        self._call = call
        self._version = version
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = self._plane.controller.serving.gone
        try:
            await until_gone(receive, self._plane.while_open(self._owner, gone, self._send(send)))
            tail = DONE
        except ClientGoneError:
            return
        except SwarmGatewayError as exc:
            if not self._started:
                await error_response(exc)(scope, receive, send)
                return
            tail = encode_event(exc.body())
        await self._start(send)
        await send({"type": "http.response.body", "body": tail, "more_body": False})

    async def _send(self, send: Send) -> None:
        events: AsyncGenerator[dict[str, Any]]
        async with aclosing(self._call.stream()) as events:
            async for event in events:
                await self._start(send)
                await send({"type": "http.response.body", "body": encode_event(event), "more_body": True})

    async def _start(self, send: Send) -> None:
        if not self._started:
            self._started = True
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (POLICY_VERSION.encode(), self._version.encode()),
            ]
            await send({"type": "http.response.start", "status": 200, "headers": headers})


def _prefix(body: dict[str, Any]) -> bytes:
    """The beginning of the prompt, if it is text."""
    prompt = body.get("prompt") or body.get("input") or ""
    return str(prompt)[:64].encode(errors="replace")[:64]
