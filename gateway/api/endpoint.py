"""One ASGI endpoint per dialect: read the body, hand the request to the pipeline, deliver the outcome.

Invariant: the caller always gets an answer in its own dialect; no secret of its headers goes further.

Headers of a plain answer report its group (``x-swarm-policy-version``, ``x-swarm-reward``, ``x-swarm-reward-mean``,
``x-swarm-trained``: ``true``, ``false``, or ``pending`` until the swarm server acknowledges, and
``x-swarm-drop-reason``). A chat's stream has them in the ``swarm`` object of the chunk with the last ``finish_reason``
(clients skip unknown fields), and every stream in its headers when the group was done before they left, which they do
with the first keep-alive. ``x-swarm-left-out`` of every answer lists fields that could not be carried to the model.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.types import Receive, Scope, Send

from adapters.dialects import Dialect, LLMRequest
from gateway.api.exchange import Exchange, Rendering, refusal
from gateway.pipeline import AnyRequest
from gateway.runtime import Gateway
from gateway.types import Caller, Incoming, Outcome
from swarm.errors import RequestError, SwarmGatewayError
from swarm.http.asgi import RawHeaders, check_encoding, parse_json, read_body

#: Headers with such a name never reach a hook; dropping one too many is the lesser mistake.
_SECRET_HEADER = re.compile(
    r"^(?!x-swarm-|x-claude-code-session-id$|idempotency-key$).*"
    r"(auth|cookie|credential|key|passw|secret|session|token)"
)
#: Agents that name their sessions in headers that elsewhere may hold a secret, and these headers.
_AGENT = re.compile(r"codex|opencode/")
_SESSION_NAMES = ("session-id", "x-session-id", "x-parent-session-id")
_NOBODY = Caller()

#: How a request is answered, and in which form.
Answering = tuple[Callable[[], Awaitable[Outcome]], Rendering]


def caller_of(scope: Scope) -> Caller:
    """The owner of the request, as found by the keys' middleware."""
    return scope["state"].get("caller") or _NOBODY


def model_of(data: Mapping[str, Any]) -> str | None:
    """The model that a body names; ``None`` for anything but a text."""
    model = data.get("model")
    return model if isinstance(model, str) else None


def public_headers(headers: RawHeaders) -> dict[str, str]:
    """The headers without secrets; names in lower case, and of one name the last value."""
    told = {key.decode("latin-1"): value.decode("latin-1") for key, value in headers}
    named = _SESSION_NAMES if _AGENT.match(told.get("user-agent", "")) else ()
    return {name: value for name, value in told.items() if name in named or not _SECRET_HEADER.search(name)}


async def serve(
    scope: Scope,
    receive: Receive,
    send: Send,
    dialect: Dialect,
    read: Callable[[Gateway, bytes], Awaitable[Answering]],
    more_headers: Mapping[str, str] | None = None,
) -> None:
    """Answer one request with what ``read`` makes of its body; errors go out in ``dialect``."""
    gateway: Gateway = scope["state"]["gateway"]
    gateway.door.requests += 1
    gateway.door.in_flight += 1
    try:
        try:
            produce, rendering = await read(gateway, bytes(await read_body(receive)))
        except SwarmGatewayError as exc:
            gateway.count_error(exc)
            await refusal(dialect, exc, more_headers or {})(scope, receive, send)
            return
        keepalive = gateway.config.keepalive_seconds
        await Exchange(produce, rendering, keepalive=keepalive, on_error=gateway.count_error)(scope, receive, send)
    finally:
        gateway.door.in_flight -= 1


class Endpoint:
    """``POST`` of one dialect.

    Args:
        dialect: its wire format.
        id_header: where the dialect's SDKs look for the request's id, other than ``x-request-id``.
    """

    def __init__(self, dialect: Dialect, id_header: str | None = None) -> None:
        self.dialect = dialect
        self._id_header = id_header

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        more_headers = {self._id_header: scope["state"]["request_id"]} if self._id_header else {}

        async def read(gateway: Gateway, raw: bytes) -> Answering:
            check_encoding(scope["headers"])
            return await self._read(gateway, scope, raw, more_headers)

        await serve(scope, receive, send, self.dialect, read, more_headers)

    async def _read(self, gateway: Gateway, scope: Scope, raw: bytes, more_headers: Mapping[str, str]) -> Answering:
        caller, headers, given = caller_of(scope), public_headers(scope["headers"]), parse_json(raw)
        try:
            data = self.prepared(gateway, caller, given)
            call = self.parsed(data)
        except RequestError:
            # a plain upstream may understand what the dialect does not
            if not await gateway.pipeline.is_plain(model_of(given), caller):
                raise
            request = AnyRequest("POST", scope["path"], "", headers, raw, model_of(given), caller)
            rendering = Rendering(self.dialect, given, given.get("stream") is True, more_headers)
            return lambda: gateway.pipeline.forward(request), rendering
        if call.left_out and not await gateway.pipeline.is_plain(call.model, caller):
            gateway.leave_out(call.left_out)
            more_headers = {**more_headers, **call.answer_headers}
        incoming = Incoming(
            call=call,
            headers=headers,
            caller=caller,
            path=self.dialect.path,
            raw=self.raw(data, raw),
            request_id=scope["state"]["request_id"],
        )
        return lambda: self.answer(gateway, incoming, data), self.rendering(gateway, incoming, data, more_headers)

    def prepared(self, gateway: Gateway, caller: Caller, data: dict[str, Any]) -> dict[str, Any]:
        """The body as the dialect reads it.

        Raises:
            RequestError: it refers to something that does not exist.
        """
        return data

    def parsed(self, data: dict[str, Any]) -> LLMRequest:
        """The internal form of ``data``; raises :class:`RequestError` for what it cannot express."""
        return self.dialect.parse(data)

    def raw(self, data: Mapping[str, Any], raw: bytes) -> bytes:
        """The body as an upstream reads it."""
        return raw

    def rendering(
        self, gateway: Gateway, incoming: Incoming, data: Mapping[str, Any], more_headers: Mapping[str, str]
    ) -> Rendering:
        """The form of the answer to ``data``."""
        return Rendering(self.dialect, data, incoming.call.stream, more_headers)

    async def answer(self, gateway: Gateway, incoming: Incoming, data: Mapping[str, Any]) -> Outcome:
        """The outcome of ``incoming``; errors as of :meth:`gateway.pipeline.Pipeline.answer`."""
        return await gateway.pipeline.answer(incoming)
