"""``POST /v1/messages/count_tokens``: how many tokens a request of Anthropic's would be.

Invariant: what is counted is what would be sampled from: the same chat, by the model's own template and tokenizer.
"""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, cast

from starlette.types import Receive, Scope, Send

from adapters.dialects import MessagesDialect
from adapters.dialects.jsons import encode
from gateway.api.exchange import Exchange
from gateway.api.passing import Passed, model_of, pass_on
from gateway.api.rendering import Rendering, refusal
from gateway.api.seen import caller_of, public_headers
from gateway.rollout.unrecorded import passed
from gateway.types import Caller, Outcome, Relayed
from swarm.errors import RequestError, SwarmGatewayError, UnavailableError, UpstreamError
from swarm.http.asgi import check_encoding, parse_json

if TYPE_CHECKING:
    from gateway.runtime import Gateway

_MESSAGES = MessagesDialect()


class CountTokens:
    """ASGI endpoint."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway: Gateway = scope["state"]["gateway"]
        gateway.door.requests += 1
        gateway.door.in_flight += 1
        try:
            await self._answer(gateway, scope, receive, send)
        finally:
            gateway.door.in_flight -= 1

    async def _answer(self, gateway: Gateway, scope: Scope, receive: Receive, send: Send) -> None:
        more_headers = {"request-id": scope["state"]["request_id"]}
        try:
            check_encoding(scope["headers"])
            raw = await gateway.read_body(scope, receive)
            data, caller = parse_json(raw), caller_of(scope)
        except SwarmGatewayError as exc:
            gateway.count_error(exc)
            await refusal(_MESSAGES, exc, more_headers)(scope, receive, send)
            return
        as_it_came = Passed("POST", scope["path"], "", public_headers(scope["headers"]), raw, model_of(data), caller)
        exchange = Exchange(
            lambda: _count(gateway, caller, data, as_it_came),
            Rendering(_MESSAGES, data, streamed=False, more_headers=more_headers),
            keepalive=gateway.config.keepalive_seconds,
            on_error=gateway.count_error,
        )
        await exchange(scope, receive, send)


async def _count(gateway: Gateway, caller: Caller, data: dict[str, Any], as_it_came: Passed) -> Outcome:
    """The count by the engine, or by the upstream where there is no engine to ask.

    Raises:
        RequestError: the request cannot be carried, or the engine finds fault with it.
        UnavailableError, UpstreamError: nobody can count now.
    """
    async with AsyncExitStack() as held:
        table = held.enter_context(gateway.routes.table.held())
        route = await table.find(as_it_came.model, caller)
        if route.swarm is None:
            return await pass_on(gateway, as_it_came)
        body = _MESSAGES.counted(data)
        try:
            told = await passed(route, "/tokenize", encode(body))
        except (UnavailableError, UpstreamError):
            if route.upstream is None:
                raise
            return await pass_on(gateway, as_it_came)
        if told.close is not None:
            held.push_async_callback(told.close)
        return Relayed(200, {"content-type": "application/json"}, encode({"input_tokens": await _counted(told)}))


async def _counted(told: Relayed) -> int:
    raw = told.body if isinstance(told.body, bytes) else b"".join([part async for part in told.body])
    try:
        answer: Any = json.loads(raw)
    except ValueError:
        answer = None
    said = cast("dict[str, Any]", answer) if isinstance(answer, dict) else {}
    if told.status == 200 and isinstance(said.get("count"), int):
        return said["count"]
    error: Any = said.get("error")
    message = str(cast("dict[str, Any]", error).get("message")) if isinstance(error, dict) else f"status {told.status}"
    if told.status in (400, 413, 422):
        raise RequestError(message)
    raise UpstreamError(f"the engine does not count tokens: {message}", code="engine_failed")
