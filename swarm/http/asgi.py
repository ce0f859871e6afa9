"""Pure-ASGI pieces that both servers mount.

Invariant: every answer carries ``x-request-id``, and every error is OpenAI-shaped and says whether to retry.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import re
import secrets
from codecs import BOM_UTF8
from collections.abc import Awaitable, Iterable, Mapping
from typing import Any, TypeVar, cast

import orjson
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swarm.errors import (
    NotFoundError,
    PayloadTooLargeError,
    RequestError,
    SwarmGatewayError,
    UnsupportedEncodingError,
)

logger = logging.getLogger(__name__)

ModelT = TypeVar("ModelT", bound=BaseModel)

#: ASGI's headers: pairs of lower-case name and value
RawHeaders = Iterable[tuple[bytes, bytes]]

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_ENCODING_SHOWN = 64
_STATUS_CLASSES: dict[int, type[RequestError]] = {404: NotFoundError}


class RequestIdMiddleware:
    """Give each request an id (the caller's ``x-request-id`` if it is well formed) and echo it in the answer.

    The id is in ``scope["state"]["request_id"]``.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = request_id(scope["headers"])
        scope.setdefault("state", {})["request_id"] = given.decode()

        def send_with_id(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                if header(headers, b"x-request-id") is None:
                    headers.append((b"x-request-id", given))
                message["headers"] = headers
            return send(message)

        await self.app(scope, receive, send_with_id)


def request_id(headers: RawHeaders) -> bytes:
    """The caller's ``x-request-id`` if it is well formed, else a new one."""
    return given_request_id(headers) or new_request_id()


def given_request_id(headers: RawHeaders) -> bytes | None:
    """The caller's ``x-request-id`` if it is well formed."""
    given = header(headers, b"x-request-id")
    return given if given is not None and _REQUEST_ID.fullmatch(given) else None


def new_request_id() -> bytes:
    return b"req_" + secrets.token_hex(16).encode()


def header(headers: RawHeaders, name: bytes) -> bytes | None:
    """The first value of ``name``, in lower case, among ASGI's headers; without the objects that a lookup by
    starlette's ``Headers`` makes for each request."""
    for key, value in headers:
        if key == name:
            return value
    return None


def error_response(exc: SwarmGatewayError) -> JSONResponse:
    """The OpenAI-shaped answer for ``exc`` with ``x-should-retry`` and, where a retry helps, ``retry-after``."""
    headers = {"x-should-retry": "true" if exc.should_retry else "false"}
    if exc.retry_after is not None:
        headers["retry-after"] = str(max(1, math.ceil(exc.retry_after)))
    return JSONResponse(exc.body(), status_code=exc.status, headers=headers)


async def on_our_error(request: Request, exc: Exception) -> Response:
    """Exception handler for :class:`SwarmGatewayError`."""
    assert isinstance(exc, SwarmGatewayError)
    return error_response(exc)


async def on_http_exception(request: Request, exc: Exception) -> Response:
    """Exception handler that gives starlette's own 404 and 405 our shape."""
    assert isinstance(exc, HTTPException)
    error = _STATUS_CLASSES.get(exc.status_code, RequestError)(
        f"{request.method} {request.url.path}: {exc.detail}", code="route_not_found" if exc.status_code == 404 else None
    )
    error.status = exc.status_code
    return error_response(error)


async def on_unexpected(request: Request, exc: Exception) -> Response:
    """Exception handler of last resort: the trace goes to the log, the caller gets the request id to quote."""
    request_id = getattr(request.state, "request_id", "-")
    logger.error("request %s failed", request_id, exc_info=exc)
    answer = error_response(SwarmGatewayError(f"internal error; quote request id {request_id}", code="internal_error"))
    # starlette answers for this handler outside of all middleware
    answer.headers["x-request-id"] = request_id
    return answer


async def on_caller_gone(request: Request, exc: Exception) -> Response:
    """Exception handler for a caller that left before its body was there: no fault of ours, and nobody reads this."""
    return Response(status_code=499)


EXCEPTION_HANDLERS = {
    SwarmGatewayError: on_our_error,
    ClientDisconnect: on_caller_gone,
    HTTPException: on_http_exception,
    Exception: on_unexpected,
}


async def read_json(request: Request, limit: int) -> dict[str, Any]:
    """The request body as a JSON object of at most ``limit`` bytes.

    Raises:
        PayloadTooLargeError: the body is longer; raised before the rest is read.
        UnsupportedEncodingError: it is compressed.
        RequestError: no JSON (NaN, infinities and lone surrogates are none), or not an object.
    """
    check_encoding(request.scope["headers"])
    return parse_json(await read_body(request.scope, request.receive, limit))


def check_encoding(headers: RawHeaders) -> None:
    """Raise :class:`UnsupportedEncodingError` for a compressed body: nothing here unpacks one."""
    encoding = header(headers, b"content-encoding")
    if encoding is not None and encoding.strip().lower() not in (b"", b"identity"):
        name = encoding.decode("latin-1")[:_ENCODING_SHOWN]
        raise UnsupportedEncodingError(f"content-encoding: {name} is not read here; send the body plain")


def parse_json(body: bytes | bytearray) -> dict[str, Any]:
    """``body`` as a JSON object; raises like :func:`read_json`."""
    try:
        quick: Any = orjson.loads(body)
    except ValueError:
        quick = None  # which is said below, in words, unless it is only more tolerant
    if isinstance(quick, dict):
        return cast("dict[str, Any]", quick)
    try:
        text = body.decode("utf-8-sig" if body.startswith(BOM_UTF8) else "utf-8")
        data = _DECODER.decode(text)
        if "\\u" in text and _SURROGATE.search(text):
            # half a surrogate pair is a string to Python, and an error to whoever encodes it later
            json.dumps(data, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as exc:
        raise RequestError(f"the request body is not valid JSON: {exc}", code="malformed_json") from exc
    if not isinstance(data, dict):
        raise RequestError(f"the request body must be a JSON object, got {type(data).__name__}", code="malformed_json")
    return cast(dict[str, Any], data)


def _no_number(constant: str) -> float:
    raise ValueError(f"{constant} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _no_number(text)


#: one for all: ``json.loads`` with these arguments would build a decoder for each body
_DECODER = json.JSONDecoder(parse_constant=_no_number, parse_float=_finite)


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes | bytearray:
    """The whole body; like starlette's ``Request.stream``, without the async generator for the one message that most
    bodies are.

    Raises:
        PayloadTooLargeError: it is longer than ``limit`` bytes; raised before the rest is read.
        ClientDisconnect: the caller left before its end.
    """
    declared = header(scope["headers"], b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    gathered = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk: bytes = message.get("body", b"")
        if len(gathered) + len(chunk) > limit:
            raise _too_large(limit)
        if not message.get("more_body", False):
            return gathered + chunk if gathered else chunk
        gathered += chunk


def _too_large(limit: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"the request body is larger than the limit of {limit} bytes")


async def read_model(request: Request, model: type[ModelT], limit: int) -> ModelT:
    """The request body validated as ``model``.

    Raises:
        PayloadTooLargeError, RequestError: see :func:`read_json`; a wrong field, the first one, is named in ``param``.
    """
    return validated(model, await read_json(request, limit))


def validated(model: type[ModelT], data: Mapping[str, Any]) -> ModelT:
    """``data`` as ``model``; raises like :func:`read_model`."""
    try:
        return model.model_validate(data)
    except ValidationError as exc:
        first = exc.errors()[0]
        param = ".".join(str(part) for part in first["loc"])
        raise RequestError(f"{param}: {first['msg']}", param=param) from exc


def bearer(request: Request) -> str:
    """The caller's key from ``Authorization: Bearer`` or ``x-api-key``; empty when there is none."""
    return bearer_bytes(request.scope["headers"]).decode("latin-1")


def bearer_bytes(headers: RawHeaders) -> bytes:
    """:func:`bearer`, as the bytes that were sent."""
    scheme, _, value = (header(headers, b"authorization") or b"").partition(b" ")
    if scheme.lower() == b"bearer" and value:
        return value.strip()
    return header(headers, b"x-api-key") or b""


def base_url(request: Request) -> str:
    """``str(request.base_url)``: the address under which this caller reached us, with a slash at its end."""
    scope = request.scope
    root: str = scope.get("app_root_path", scope.get("root_path", ""))
    return base_url_at(scope["scheme"], header(scope["headers"], b"host"), scope.get("server"), root)


@functools.lru_cache(maxsize=256)
def base_url_at(scheme: str, host: bytes | None, server: tuple[str, int | None] | None, root: str) -> str:
    """:func:`base_url` of a request with this ``host`` header; the rest is as in its ASGI scope."""
    headers = [] if host is None else [(b"host", host)]
    scope: Scope = {"type": "http", "scheme": scheme, "server": server, "path": root, "root_path": root}
    return str(Request({**scope, "headers": headers, "query_string": b""}).base_url)
