"""What has no endpoint of its own: every other address under ``/v1``, and Anthropic's token count.

Invariant: a request that is not the gateway's to answer is forwarded to an upstream as it came, or refused with a 404
that says why. The tokens that are counted are those that would be sampled from.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from starlette.types import Scope

from adapters.dialects import ChatDialect, MessagesDialect
from adapters.dialects.jsons import decode, encode, error_in, object_in
from gateway.api.endpoint import Answering, Endpoint, caller_of, model_of, public_headers
from gateway.api.exchange import Rendering
from gateway.pipeline import without_lines
from gateway.rollout.unrecorded import passed
from gateway.runtime import Gateway
from gateway.types import AnyRequest, Outcome, Relayed
from swarm.errors import NotFoundError, RequestError, SwarmGatewayError, UnavailableError, UpstreamError
from swarm.http.asgi import check_encoding, parse_json
from swarm.http.client import Answer

_MESSAGES = MessagesDialect()
#: The path when ``base_url`` ends with /v1 although the SDK adds that.
_TWICE = "/v1/v1/"


class Passthrough(Endpoint):
    """Any method: embeddings, audio, and whatever else an upstream has.

    Args:
        ours: paths that the gateway answers, to other methods.
    """

    def __init__(self, ours: Collection[str] = ()) -> None:
        super().__init__(ChatDialect())
        self._ours = ours

    async def read(self, gateway: Gateway, scope: Scope, raw: bytes, more_headers: Mapping[str, str]) -> Answering:
        """Forward the request."""
        headers, query = public_headers(scope["headers"]), scope["query_string"].decode("latin-1")
        model = _model(headers, raw)
        request = AnyRequest(scope["method"], scope["path"], query, headers, raw, model, caller_of(scope))
        return lambda: self._answer(gateway, request), Rendering(self.dialect, {}, False, more_headers)

    async def _answer(self, gateway: Gateway, request: AnyRequest) -> Outcome:
        try:
            return await gateway.pipeline.forward(request)
        except NotFoundError as exc:
            if exc.code != "route_not_found":
                raise
            raise self.absent(request, exc) from exc

    def absent(self, request: AnyRequest, exc: NotFoundError) -> SwarmGatewayError:
        """The error for an address that neither the gateway nor an upstream has."""
        if request.path in self._ours:
            error = RequestError(f"{request.method} {request.path}: Method Not Allowed", code="method_not_allowed")
            error.status = 405
            return error
        if request.path.startswith(_TWICE):
            return NotFoundError(
                f"{request.method} {request.path}: not found; it contains /v1 twice: SDKs such as Anthropic's add "
                "it to base_url themselves: leave it out there",
                code="route_not_found",
            )
        return exc


def _model(headers: Mapping[str, str], body: bytes) -> str | None:
    """The model that a JSON body names."""
    if not headers.get("content-type", "").startswith("application/json"):
        return None
    return model_of(object_in(body) or {})


class CountTokens(Endpoint):
    """``POST /v1/messages/count_tokens``: how many tokens a request of Anthropic's would be."""

    def __init__(self) -> None:
        super().__init__(_MESSAGES, id_header="request-id")

    async def read(self, gateway: Gateway, scope: Scope, raw: bytes, more_headers: Mapping[str, str]) -> Answering:
        check_encoding(scope["headers"])
        data, headers = parse_json(raw), public_headers(scope["headers"])
        request = AnyRequest("POST", scope["path"], "", headers, raw, model_of(data), caller_of(scope))
        return lambda: _count(gateway, data, request), Rendering(_MESSAGES, data, False, more_headers)


async def _count(gateway: Gateway, data: dict[str, Any], request: AnyRequest) -> Outcome:
    """The count of the engine, or of the upstream where there is no engine to ask.

    Raises:
        RequestError: the request cannot be carried, or the engine finds fault with it.
        UnavailableError, UpstreamError: nobody can count now.
    """
    with gateway.routes.table.held() as table:
        route = await table.find(request.model, request.caller)
        if route.training is None:
            return await gateway.pipeline.forward(request)
        body, _ = without_lines(_MESSAGES.counted(data), route.settings.drop_lines)
        try:
            answer = await passed(route.training, "/tokenize", encode(body))
        except (UnavailableError, UpstreamError):
            if route.upstream is None:
                raise
            return await gateway.pipeline.forward(request)
        return Relayed(200, {"content-type": "application/json"}, encode({"input_tokens": _counted(answer)}))


def _counted(answer: Answer) -> int:
    if answer.status == 200:
        with suppress(ValueError, LookupError, TypeError):
            return int(decode(answer.content)["count"])
    message = str(error_in(answer.content).get("message", f"status {answer.status}"))
    if answer.status in (400, 413, 422):
        raise RequestError(message)
    raise UpstreamError(f"the engine does not count tokens: {message}", code="engine_failed")
