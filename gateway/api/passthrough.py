"""ASGI endpoint of every address under ``/v1`` that has no other: embeddings, audio, and whatever else an upstream has.

Invariant: what is not ours to answer is answered by an upstream as it came, or refused with a 404 that says why.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, cast

from starlette.types import Receive, Scope, Send

from adapters.dialects import ChatDialect
from adapters.dialects.jsons import decode
from gateway.api.exchange import Exchange
from gateway.api.passing import Passed, model_of, pass_on
from gateway.api.rendering import Rendering, refusal
from gateway.api.seen import caller_of, public_headers
from gateway.types import Outcome
from swarm.errors import NotFoundError, RequestError, SwarmGatewayError

if TYPE_CHECKING:
    from gateway.runtime import Gateway

_OPENAI = ChatDialect()
#: A path whose ``base_url`` ended with /v1 although the SDK adds that.
_TWICE = "/v1/v1/"


class Passthrough:
    """Any method.

    Args:
        ours: paths that we answer, to other methods.
    """

    def __init__(self, ours: Collection[str]) -> None:
        self._ours = ours

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.answer(scope, receive, send)

    async def answer(self, scope: Scope, receive: Receive, send: Send, absent: SwarmGatewayError | None = None) -> None:
        """Pass the request on; ``absent`` is what it is told where there is no upstream."""
        gateway: Gateway = scope["state"]["gateway"]
        gateway.door.requests += 1
        gateway.door.in_flight += 1
        try:
            try:
                body = await gateway.read_body(scope, receive)
            except SwarmGatewayError as exc:
                gateway.count_error(exc)
                await refusal(_OPENAI, exc, {})(scope, receive, send)
                return
            headers = public_headers(scope["headers"])
            passed = Passed(
                method=scope["method"],
                path=scope["path"],
                query=scope["query_string"].decode("latin-1"),
                headers=headers,
                body=body,
                model=_model(headers, body),
                caller=caller_of(scope),
            )
            exchange = Exchange(
                lambda: self._answer(gateway, passed, absent),
                Rendering(_OPENAI, {}, streamed=False, more_headers={}),
                keepalive=gateway.config.keepalive_seconds,
                on_error=gateway.count_error,
            )
            await exchange(scope, receive, send)
        finally:
            gateway.door.in_flight -= 1

    async def _answer(self, gateway: Gateway, passed: Passed, absent: SwarmGatewayError | None) -> Outcome:
        try:
            return await pass_on(gateway, passed)
        except NotFoundError as exc:
            if exc.code != "route_not_found":
                raise
            raise absent or self._absent(passed, exc) from exc

    def _absent(self, passed: Passed, exc: NotFoundError) -> SwarmGatewayError:
        """What is wrong with an address that is neither ours nor an upstream's."""
        if passed.path in self._ours:
            error = RequestError(f"{passed.method} {passed.path}: Method Not Allowed", code="method_not_allowed")
            error.status = 405
            return error
        if passed.path.startswith(_TWICE):
            return NotFoundError(
                f"{passed.method} {passed.path}: not found; /v1 stands in it twice: SDKs such as Anthropic's add "
                "it to base_url themselves: leave it out there",
                code="route_not_found",
            )
        return exc


def _model(headers: Mapping[str, str], body: bytes) -> str | None:
    """The model that a JSON body names."""
    if not headers.get("content-type", "").startswith("application/json"):
        return None
    try:
        data: Any = decode(body)
    except (ValueError, RecursionError):
        return None
    return model_of(cast("dict[str, Any]", data)) if isinstance(data, dict) else None
