"""Every address under ``/v1`` that has no endpoint of its own, and the engine's answers about tokens.

Invariant: a request that is not the gateway's to answer is forwarded to an upstream as it came, but unpacked, or
refused with a 404 that says why. The tokens that are counted are those that would be sampled from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from starlette.datastructures import URL
from starlette.responses import RedirectResponse
from starlette.types import Receive, Scope, Send

from adapters.dialects import Dialect, MessagesDialect, dialect_of
from adapters.dialects.chat import without_lines
from adapters.dialects.jsons import decode, encode, error_in, object_in
from gateway.api.endpoint import Answering, ApiEndpoint, caller_of, model_of, plain_headers, public_headers, query_of
from gateway.api.exchange import Rendering
from gateway.pipeline import with_placeholders
from gateway.rollout.first import engine_answer
from gateway.runtime import Gateway
from gateway.types import AnyRequest, Outcome, Relayed
from swarm.errors import MethodError, NotFoundError, RequestError, SwarmGatewayError, UnavailableError, UpstreamError
from swarm.http.asgi import decoded, parse_json
from swarm.http.client import Answer

_MESSAGES = MessagesDialect()
#: The path when ``base_url`` ends with /v1 although the SDK adds that.
_TWICE = "/v1/v1/"
_SLASHES = re.compile("//+")
#: Of a form, such as for audio; bounded, for a part could begin in every line of a body.
_FORM_MODEL = re.compile(rb'form-data; name="?model"?\r\n(?:[^\r\n]{1,200}\r\n){0,4}\r\n([^\r\n]{1,1000})\r\n')


class Passthrough(ApiEndpoint):
    """Any method: embeddings, audio, and whatever else an upstream has. ``ours`` are paths that the gateway answers,
    with the methods that it answers to."""

    def __init__(self, dialect: Dialect | None = None, ours: Mapping[str, str] | None = None) -> None:
        super().__init__(dialect)
        self._ours = ours or {}

    async def read(self, gateway: Gateway, scope: Scope, raw: bytes, more_headers: Mapping[str, str]) -> Answering:
        """Forward the request."""
        headers, query = public_headers(scope["headers"]), query_of(scope)
        # a body that cannot be unpacked is forwarded unchanged
        with suppress(SwarmGatewayError):
            raw = decoded(scope["headers"], raw, gateway.routes.plan.config.max_body_bytes)
            headers = plain_headers(scope["headers"])
        model = _model(headers, raw)
        request = AnyRequest(scope["method"], scope["path"], query, headers, raw, model, caller_of(scope))
        return Answering(lambda: self._answer(gateway, request), Rendering(self.dialect, {}, False, more_headers))

    async def _answer(self, gateway: Gateway, request: AnyRequest) -> Outcome:
        if request.path.startswith(_TWICE):
            # an upstream whose base_url has no /v1 may answer it
            raise NotFoundError(
                f"{request.method} {request.path}: not found; it contains /v1 twice: SDKs such as Anthropic's add "
                "it to base_url themselves: leave it out there",
                code="route_not_found",
            )
        try:
            return await gateway.pipeline.forward(request)
        except NotFoundError as exc:
            if exc.code != "route_not_found":
                raise
            raise self.absent(request, exc) from exc

    def absent(self, request: AnyRequest, exc: NotFoundError) -> SwarmGatewayError:
        """The error for an address that neither the gateway nor an upstream has."""
        if request.path in self._ours:
            return MethodError(f"{request.method} {request.path}: Method Not Allowed", self._ours[request.path])
        return exc


class AnyOther:
    """Every path under ``/v1`` that has no route: :class:`Passthrough`, with errors as the caller's SDK reads them. A
    path of ours with a slash at its end is redirected, as by vLLM, and so is one with two slashes in a row: an upstream
    that merges them would answer it."""

    def __init__(self, ours: Mapping[str, str]) -> None:
        self._ours = ours

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        if (ours := _SLASHES.sub("/", path).rstrip("/")) in self._ours and ours != path:
            # without scheme and host: where a balancer speaks TLS, the gateway knows neither
            await RedirectResponse(URL(path=ours, query=query_of(scope)), 307)(scope, receive, send)
            return
        await Passthrough(dialect_of(path, scope["headers"]), self._ours)(scope, receive, send)


def _model(headers: Mapping[str, str], body: bytes) -> str | None:
    """The model that a JSON body or a form names."""
    kind = headers.get("content-type", "").lower()
    if kind.startswith("multipart/form-data") and (named := _FORM_MODEL.search(body)) is not None:
        return named[1].decode(errors="replace")
    if not kind.startswith("application/json"):
        return None
    return model_of(object_in(body) or {})


class CountTokens(ApiEndpoint):
    """How many tokens a request of Anthropic's would be."""

    def __init__(self) -> None:
        super().__init__(_MESSAGES)

    async def read(self, gateway: Gateway, scope: Scope, raw: bytes, more_headers: Mapping[str, str]) -> Answering:
        raw = decoded(scope["headers"], raw, gateway.routes.plan.config.max_body_bytes)
        data, headers = parse_json(raw), plain_headers(scope["headers"])
        request = AnyRequest("POST", scope["path"], query_of(scope), headers, raw, model_of(data), caller_of(scope))
        return Answering(lambda: _count(gateway, data, request), Rendering(_MESSAGES, data, False, more_headers))


class EngineCall(ApiEndpoint):
    """The engine's own answer about tokens, as of vLLM."""

    async def read(self, gateway: Gateway, scope: Scope, raw: bytes, more_headers: Mapping[str, str]) -> Answering:
        data = parse_json(decoded(scope["headers"], raw, gateway.routes.plan.config.max_body_bytes))
        caller, path = caller_of(scope), scope["path"]

        async def answer() -> Relayed:
            with gateway.routes.table.held() as table:
                route = await table.find(model_of(data), caller)
                if route.plain or route.training is None:
                    why = f"POST {path}: the route {route.name!r} has no engine of its own to ask"
                    raise NotFoundError(why, code="route_not_found")
                body, _ = without_lines(data, route.settings.drop_lines)
                content = _answered(await engine_answer(route.training, path, encode(body))).content
                return Relayed(200, {"content-type": "application/json"}, content)

        return Answering(answer, Rendering(self.dialect, data, False, more_headers))


async def _count(gateway: Gateway, data: dict[str, Any], request: AnyRequest) -> Outcome:
    """The count of the engine, or of the upstream where there is no engine to ask.

    Raises:
        RequestError: the request cannot be carried, or the engine finds fault with it.
        UnavailableError, UpstreamError: nobody can count now.
    """
    await gateway.pipeline.hear(request.headers, data, request.caller)
    with gateway.routes.table.held() as table:
        route = await table.find(request.model, request.caller)
        masked = with_placeholders(route, data)
        if masked is not data:
            data, request = masked, replace(request, body=encode(masked))
        if route.plain or route.training is None:
            return await gateway.pipeline.forward(request)
        body, _ = without_lines(_MESSAGES.counted(data), route.settings.drop_lines)
        try:
            answer = await engine_answer(route.training, "/tokenize", encode(body))
        except (UnavailableError, UpstreamError):
            if route.upstream is None:
                raise
            return await gateway.pipeline.forward(request)
        return Relayed(200, {"content-type": "application/json"}, encode({"input_tokens": _counted(answer)}))


def _counted(answer: Answer) -> int:
    with suppress(ValueError, LookupError, TypeError):
        return int(decode(_answered(answer).content)["count"])
    raise UpstreamError("the engine does not count tokens", code="engine_failed")


def _answered(answer: Answer) -> Answer:
    """The engine's ``answer`` to a question about tokens.

    Raises:
        RequestError, UpstreamError: it is an error.
    """
    if answer.status == 200:
        return answer
    message = str(error_in(answer.content).get("message", f"status {answer.status}"))
    if answer.status in (400, 413, 422):
        raise RequestError(message)
    raise UpstreamError(f"the engine does not tokenize: {message}", code="engine_failed")
