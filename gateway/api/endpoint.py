"""One ASGI endpoint per dialect: read the body, hand the request to the pipeline, deliver what comes of it.

Invariant: whatever comes in, the caller gets an answer in its own dialect; nothing secret that it sent goes further.

What became of the request's group is told in headers of a plain answer (``x-swarm-policy-version``, ``x-swarm-reward``,
``x-swarm-reward-mean``, ``x-swarm-trained``: ``true``, ``false``, or ``pending`` while the swarm server has not yet
acknowledged, and ``x-swarm-drop-reason``). A chat's stream says it in the ``swarm`` object of the chunk that carries
the last ``finish_reason`` (clients skip a field that they do not know), and every stream in the same headers when the
group was done before they had to leave, which they do with the first keep-alive. What of the request could not be
carried to the model is told in ``x-swarm-left-out`` of every answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from starlette.types import Receive, Scope, Send

from adapters.dialects import Dialect, LLMRequest
from gateway.api.exchange import Exchange
from gateway.api.passing import Passed, is_plain, model_of, pass_on
from gateway.api.rendering import Rendering, refusal
from gateway.api.seen import caller_of, public_headers
from gateway.types import Caller, Incoming, Outcome
from swarm.errors import RequestError, SwarmGatewayError
from swarm.http.asgi import check_encoding, parse_json

if TYPE_CHECKING:
    from gateway.runtime import Gateway


class Endpoint:
    """``POST`` of one dialect.

    Args:
        dialect: its wire format.
        id_header: in which the dialect's SDKs look for the request's id, where that is not ``x-request-id``.
    """

    def __init__(self, dialect: Dialect, id_header: str | None = None) -> None:
        self.dialect = dialect
        self._id_header = id_header

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway: Gateway = scope["state"]["gateway"]
        door = gateway.door
        more_headers = {self._id_header: scope["state"]["request_id"]} if self._id_header else {}
        door.requests += 1
        door.in_flight += 1
        try:
            try:
                check_encoding(scope["headers"])
                raw = await gateway.read_body(scope, receive)
                produce, rendering = await self._read(gateway, scope, raw, more_headers)
            except SwarmGatewayError as exc:
                gateway.count_error(exc)
                await refusal(self.dialect, exc, more_headers)(scope, receive, send)
                return
            exchange = Exchange(
                produce, rendering, keepalive=gateway.config.keepalive_seconds, on_error=gateway.count_error
            )
            await exchange(scope, receive, send)
        finally:
            door.in_flight -= 1

    async def _read(
        self, gateway: Gateway, scope: Scope, raw: bytes, more_headers: Mapping[str, str]
    ) -> tuple[Callable[[], Awaitable[Outcome]], Rendering]:
        """How the request is answered, and how the answer looks."""
        caller, headers, given = caller_of(scope), public_headers(scope["headers"]), parse_json(raw)
        try:
            data = self.prepared(gateway, caller, given)
            call = self.parsed(data)
        except RequestError:
            # what we cannot carry is refused only where we would have to
            if not await is_plain(gateway, model_of(given), caller):
                raise
            passed = Passed("POST", scope["path"], "", headers, raw, model_of(given), caller)
            rendering = Rendering(self.dialect, given, given.get("stream") is True, more_headers)
            return lambda: pass_on(gateway, passed), rendering
        if call.left_out and not await is_plain(gateway, call.model, caller):
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
            RequestError: it refers to what is not there.
        """
        return data

    def parsed(self, data: dict[str, Any]) -> LLMRequest:
        """The internal form of ``data``; raises :class:`RequestError` for what it cannot say."""
        return self.dialect.parse(data)

    def raw(self, data: Mapping[str, Any], raw: bytes) -> bytes:
        """The body as an upstream reads it."""
        return raw

    def rendering(
        self, gateway: Gateway, incoming: Incoming, data: Mapping[str, Any], more_headers: Mapping[str, str]
    ) -> Rendering:
        """How the answer to ``data`` looks."""
        return Rendering(self.dialect, data, incoming.call.stream, more_headers)

    async def answer(self, gateway: Gateway, incoming: Incoming, data: Mapping[str, Any]) -> Outcome:
        """What comes of ``incoming``; errors as of :meth:`gateway.pipeline.Pipeline.answer`."""
        return await gateway.pipeline.answer(incoming)
