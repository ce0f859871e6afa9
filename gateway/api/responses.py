"""``/v1/responses``: a conversation can continue from a stored response.

Invariant: a reference to a stored response is resolved before the model is asked, or the request is refused; a response
is stored only if it was delivered whole, its request did not switch ``store`` off and lets its texts be kept.

The store serves clients that send ``previous_response_id`` or ``item_reference``: the AI SDK, Codex and the OpenAI
Agents SDK.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, cast

from starlette.datastructures import QueryParams
from starlette.types import Scope

from adapters.dialects import ResponsesDialect
from adapters.dialects.fields import Fields
from adapters.dialects.jsons import encode, object_in
from adapters.dialects.response_items import without_seals
from adapters.dialects.responses import ResponseStream
from adapters.dialects.sse import SseDecoder
from gateway.api.endpoint import Answering, DialectEndpoint, caller_of
from gateway.api.exchange import Rendering
from gateway.api.others import Passthrough
from gateway.observability.request import deleted, notes
from gateway.runtime import Gateway
from gateway.sessions.response_store import ResponseStore, StoredResponse, unknown_response
from gateway.types import AnyRequest, Caller, Incoming, Outcome, Relayed
from swarm.errors import NotFoundError, RequestError, SwarmGatewayError


class ResponsesEndpoint(DialectEndpoint):
    """The model's answer, from which a later request may go on."""

    def __init__(self) -> None:
        super().__init__(ResponsesDialect(stored=True))

    def prepared(self, gateway: Gateway, caller: Caller, data: dict[str, Any]) -> dict[str, Any]:
        """``data`` with the whole conversation as its input; ``store`` is on unless it is off, as at OpenAI."""
        data = {**data, "store": Fields(data).flag("store") is not False}
        content = data.get("input")
        if isinstance(content, list):
            items = cast("list[Any]", content)
            data = {**data, "input": [_referred(gateway, caller, item) for item in items]}
        previous = data.get("previous_response_id")
        if not isinstance(previous, str):
            return data
        try:
            earlier = gateway.responses.get(caller.key_id, previous)
        except NotFoundError as exc:
            raise RequestError(exc.message, code="previous_response_not_found", param="previous_response_id") from exc
        return {**data, "input": [*earlier.items, *_items(data.get("input"))]}

    def raw(self, data: Mapping[str, Any], body: Mapping[str, Any], raw: bytes) -> bytes:
        """The body for an upstream, which does not know our stored responses."""
        if data.get("input") == body.get("input"):
            return raw
        return encode({name: value for name, value in data.items() if name != "previous_response_id"})

    def rendering(
        self, gateway: Gateway, incoming: Incoming, data: Mapping[str, Any], more_headers: Mapping[str, str]
    ) -> Rendering:
        return _StoringRendering(self.dialect, data, incoming.call.stream, more_headers, gateway.responses, incoming)

    async def answer(self, gateway: Gateway, incoming: Incoming, data: Mapping[str, Any]) -> Outcome:
        """A response of an upstream that stands in is stored, too: the swarm may answer the next turn."""
        outcome = await super().answer(gateway, incoming, data)
        if not isinstance(outcome, Relayed) or outcome.status != 200:
            return outcome
        async with AsyncExitStack() as held:
            # the caller may leave meanwhile
            if outcome.close is not None:
                held.push_async_callback(outcome.close)
            is_plain = await gateway.pipeline.is_plain(incoming.call.model, incoming.caller)
            held.pop_all()
        if is_plain:
            return outcome
        rendering = cast("_StoringRendering", self.rendering(gateway, incoming, data, {}))
        if not isinstance(outcome.body, bytes):
            return replace(outcome, body=_kept(outcome.body, rendering))
        if (response := object_in(outcome.body)) is not None:
            rendering.keep(response)
        return outcome


async def _kept(parts: AsyncIterator[bytes], rendering: _StoringRendering) -> AsyncIterator[bytes]:
    """``parts`` of a stream of events, whose response is stored before its end goes out."""
    decoder = SseDecoder()
    async for part in parts:
        for event in decoder.feed(part):
            match object_in(event):
                case {"type": "response.completed" | "response.incomplete", "response": dict(response)}:
                    rendering.keep(cast("dict[str, Any]", response))
                case _:
                    pass
        yield part


@dataclass(frozen=True)
class _StoringRendering(Rendering):
    """Stores what it renders, unless the request says ``store: false`` or nothing of it may be kept."""

    store: ResponseStore
    incoming: Incoming

    def body(self, completion: Mapping[str, Any]) -> bytes:
        response = self.dialect.answer(self.data, completion)
        body = encode(response)
        self.keep(response, len(body))
        return body

    def events(self) -> _StoringStream:
        return _StoringStream(self)

    def keep(self, response: dict[str, Any], size: int | None = None) -> None:
        """Store a whole response of ``size`` bytes as JSON."""
        if not self.data.get("store") or deleted():
            return
        # an upstream's may be of any shape
        if not isinstance(response.get("id"), str) or not isinstance(response.get("output"), list):
            return
        items = [*_items(self.data.get("input")), *response["output"]]
        # it repeats the instructions, the tools and the metadata
        if not self.incoming.consent.keeps([without_seals(items), response]):
            return
        size = len(encode(response)) if size is None else size
        stored = StoredResponse(response, items, size + len(encode(items)), notes())
        self.store.put(self.incoming.caller.key_id, stored)


class _StoringStream(ResponseStream):
    """The bytes of a response that is stored once its stream has ended."""

    def __init__(self, rendering: _StoringRendering) -> None:
        super().__init__(rendering.data)
        self._rendering = rendering

    def end(self) -> bytes:
        last = super().end()
        # stored before its id goes out: the next request may be here before this one has ended
        self._rendering.keep(self.response)
        return last


class KeptResponse(Passthrough):
    """A stored response, told or forgotten; an unknown one may be the upstream's."""

    async def read(self, gateway: Gateway, scope: Scope, raw: bytes, more_headers: Mapping[str, str]) -> Answering:
        key_id, response_id = caller_of(scope).key_id, scope["path_params"]["response_id"]
        try:
            kept = gateway.responses.get(key_id, response_id).response
        except NotFoundError:
            return await super().read(gateway, scope, raw, more_headers)
        if scope["method"] == "DELETE":
            gateway.responses.delete(key_id, response_id)
            kept = {"id": response_id, "object": "response", "deleted": True}
        elif QueryParams(scope["query_string"]).get("stream") == "true":
            raise RequestError("a kept response is given whole, not as a stream", param="stream")

        async def stored() -> Relayed:
            return Relayed(200, {"content-type": "application/json"}, encode(kept))

        return Answering(stored, Rendering(self.dialect, {}, False, more_headers))

    def absent(self, request: AnyRequest, exc: NotFoundError) -> SwarmGatewayError:
        return unknown_response(request.path.rpartition("/")[2])


def _referred(gateway: Gateway, caller: Caller, item: Any) -> Any:
    """The item of a stored response that ``item`` refers to, with or without its type; anything else as it is. The
    dialect refuses references that are left."""
    match item:
        case {"id": str() as item_id} if item.get("type") in ("item_reference", None) and "role" not in item:
            pass
        case _:
            return item
    kept = gateway.responses.item(caller.key_id, item_id)
    return item if kept is None else kept


def _items(content: Any) -> list[Any]:
    if isinstance(content, list):
        return cast("list[Any]", content)
    return [] if content is None else [{"type": "message", "role": "user", "content": content}]
