"""Request ids, error responses and request bodies, for both servers.

Invariant: every response carries ``x-request-id``, and every error is OpenAI-shaped and says whether a retry helps.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import math
import re
import secrets
import time
import zlib
from codecs import BOM_UTF8
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, cast

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swarm.concurrency import ClientGoneError
from swarm.errors import (
    MethodError,
    NotFoundError,
    PayloadTooLargeError,
    RequestError,
    SwarmGatewayError,
    UnavailableError,
    UnsupportedEncodingError,
)

logger = logging.getLogger(__name__)

#: ASGI's headers: pairs of lower-case name and value
RawHeaders = Iterable[tuple[bytes, bytes]]

#: The header in which OpenAI's and Anthropic's SDKs count how often they have repeated a request.
SDK_RETRIES = "x-stainless-retry-count"
#: seconds from the end of a request's head to the end of its body
BODY_SECONDS = 300.0

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_MOST_ENCODING_SHOWN = 64
#: nginx's status for a caller that left before the response
_CALLER_GONE = 499


# ---------------------------------------------------------------------- headers


def header(headers: RawHeaders, name: bytes) -> bytes | None:
    """The first value of ``name``, in lower case."""
    for key, value in headers:
        if key == name:
            return value
    return None


def has_body(headers: RawHeaders) -> bool:
    """Whether a request with these headers has a body."""
    return header(headers, b"content-length") not in (None, b"0") or header(headers, b"transfer-encoding") is not None


def bearer_bytes(headers: RawHeaders) -> bytes:
    """The caller's key from ``Authorization: Bearer``, ``x-api-key`` or the password of ``Authorization: Basic``; empty
    without one."""
    scheme, _, value = (header(headers, b"authorization") or b"").partition(b" ")
    if scheme.lower() == b"bearer" and value:
        return value.strip()
    return header(headers, b"x-api-key") or basic_password(headers)


def basic_password(headers: RawHeaders) -> bytes:
    """The password of ``Authorization: Basic``, which HTTP clients make of ``http://user:password@host``; empty without
    one."""
    scheme, _, value = (header(headers, b"authorization") or b"").partition(b" ")
    if scheme.lower() != b"basic":
        return b""
    try:
        return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
    except ValueError:
        return b""


def is_sdk_retry(headers: Mapping[str, str]) -> bool:
    """Whether OpenAI's or Anthropic's SDK says that it repeats a request, to which it got no answer or an error."""
    count = headers.get(SDK_RETRIES, "")
    return count.isdecimal() and bool(count.strip("0"))


# ---------------------------------------------------------------------- middleware


class App(Starlette):
    """A Starlette app with the given middleware and no other: each layer costs a request as much as a small endpoint.

    :class:`RequestMiddleware` comes first and :class:`ErrorMiddleware` last; they replace Starlette's own.

    Attributes:
        leaving: the server is being stopped: what could go on for long ends now.
    """

    leaving = False

    def build_middleware_stack(self) -> ASGIApp:
        app: ASGIApp = self.router
        for cls, args, kwargs in reversed(self.user_middleware):
            app = cls(app, *args, **kwargs)
        return app


class RequestMiddleware:
    """Give each request an id (the caller's ``x-request-id`` if it is well formed) and return it with the response.

    The id is in ``scope["state"]["request_id"]``. An unexpected error is logged, and the caller gets the id to quote.

    Args:
        over: called after each request with its scope, the status of its response (499: the caller left before there
            was one) and the seconds that it took.
    """

    def __init__(self, app: ASGIApp, over: Callable[[Scope, int, float], None] | None = None) -> None:
        self.app = app
        self._over = over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = time.monotonic()
        request_id = header(scope["headers"], b"x-request-id")
        if request_id is None or not _REQUEST_ID.fullmatch(request_id):
            # no secret: it only has to be unique
            request_id = b"req_" + secrets.token_hex(16).encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode()
        status = 0

        def send_with_id(message: Message) -> Awaitable[None]:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = list(message.get("headers", ()))
                if header(headers, b"x-request-id") is None:
                    headers.append((b"x-request-id", request_id))
                message["headers"] = headers
            return send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except Exception as exc:
            if status:
                status = 500
                raise  # the server closes the connection, which is all that can tell the caller
            await error_response(internal_error(request_id.decode(), exc))(scope, receive, send_with_id)
        finally:
            if self._over is not None:
                self._over(scope, status or _CALLER_GONE, time.monotonic() - began)


class ErrorMiddleware:
    """Admit each request, bound its body, and answer the errors that endpoints raise.

    Whoever reads a body beyond its bounds gets the error, so that each endpoint can refuse in its own format; the
    connection is closed after the response, because the rest of the body may never end.

    Args:
        body_limit: the most bytes that the body of a request with this scope may have.
        admit: raises why a request with this scope may not come here; its body is not read then.
        body_seconds: from the end of the head to the end of the body.
        on_http_exception: answers errors of the framework, such as 404 and 405.
    """

    def __init__(
        self,
        app: ASGIApp,
        body_limit: Callable[[Scope], int],
        admit: Callable[[Scope], None] | None = None,
        body_seconds: float = BODY_SECONDS,
        on_http_exception: Callable[[Request, HTTPException], Response] | None = None,
    ) -> None:
        self.app = app
        self._body_limit = body_limit
        self._admit = admit
        self._body_seconds = body_seconds
        self._on_http_exception = on_http_exception or http_error_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        limit = self._body_limit(scope)
        scope.setdefault("state", {})["body_limit"] = limit
        exchange = _Exchange(scope, receive, send, limit, self._body_seconds)
        try:
            if self._admit is not None:
                self._admit(scope)
            if header(scope["headers"], b"sec-websocket-version") is not None:
                # clients that try a WebSocket first (Codex) ask by HTTP at once upon a 426
                raise RequestError("there are no WebSockets here: ask by HTTP", code="no_websockets", status=426)
            await self.app(scope, exchange.receive, exchange.send)
        except (SwarmGatewayError, HTTPException, ClientDisconnect, ClientGoneError) as exc:
            if exchange.begun:
                raise
            await self._response(Request(scope), exc)(scope, exchange.receive, exchange.send)
        except asyncio.CancelledError:
            # only uvicorn cancels a request: the time that it gives requests at its end is over
            if exchange.begun:
                raise
            await error_response(stopping())(scope, exchange.receive, exchange.send)

    def _response(self, request: Request, exc: Exception) -> Response:
        match exc:
            case SwarmGatewayError():
                return error_response(exc)
            case HTTPException():
                return self._on_http_exception(request, exc)
            case _:
                # the caller left; nobody reads the response
                return Response(status_code=_CALLER_GONE)


class _Exchange:
    """One request with its response; its body may have ``limit`` bytes and arrive within ``seconds``."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, limit: int, seconds: float) -> None:
        self._receive, self._send = receive, send
        self._limit, self._seconds = limit, seconds
        self._deadline = asyncio.get_running_loop().time() + seconds
        self._complete = not has_body(scope["headers"])
        self._refused = self.begun = False
        declared = header(scope["headers"], b"content-length") or b""
        # no need to wait for what is declared to be too large
        self._size = size if declared.isdigit() and (size := int(declared)) > limit else 0

    async def receive(self) -> Message:
        """The next message.

        Raises:
            PayloadTooLargeError: the body is larger than its limit, or declares to be.
            RequestError: the body is not complete in time; the status is 408.
        """
        if self._complete:
            return await self._receive()
        self._check()
        message: Message = {"type": "http.request", "more_body": True}
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            self._deadline = 0.0
        self._size += len(message.get("body", b""))
        self._check()
        self._complete = not message.get("more_body", False)
        return message

    def _check(self) -> None:
        too_large, too_late = self._size > self._limit, asyncio.get_running_loop().time() > self._deadline
        self._refused = too_large or too_late
        if too_large:
            raise PayloadTooLargeError(f"the request body is larger than the limit of {self._limit} bytes")
        if too_late:
            late = f"the request body did not arrive within {self._seconds:g} s"
            raise RequestError(late, code="body_timeout", status=408)

    def send(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            self.begun = True
            if self._refused:
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
        return self._send(message)


# ---------------------------------------------------------------------- bodies


async def read_json(request: Request) -> dict[str, Any]:
    """The request body as a JSON object, for a request behind :class:`ErrorMiddleware`.

    Raises:
        RequestError: it is not JSON (NaN, infinities and lone surrogates are not), or not an object.
        UnsupportedEncodingError, PayloadTooLargeError, ClientDisconnect: see :func:`decoded`, :func:`read_body`.
    """
    body = await read_body(request.receive)
    return parse_json(decoded(request.scope["headers"], bytes(body), request.scope["state"]["body_limit"]))


def decoded(headers: RawHeaders, body: bytes, most: int) -> bytes:
    """``body`` without the compression that ``headers`` name.

    Args:
        most: bytes that it may have then.

    Raises:
        UnsupportedEncodingError: it is compressed otherwise than by gzip or deflate.
        PayloadTooLargeError: it is larger.
        RequestError: it is not what the header says.
    """
    named = header(headers, b"content-encoding") or b""
    encoding = named.strip().lower()
    if encoding in (b"", b"identity"):
        return body
    if encoding not in (b"gzip", b"x-gzip", b"deflate"):
        name = named.decode("latin-1")[:_MOST_ENCODING_SHOWN]
        raise UnsupportedEncodingError(f"content-encoding: {name} is not supported; send the body uncompressed")
    # either format has a head by which zlib knows it
    decoder = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)
    try:
        plain = decoder.decompress(body, most + 1)
    except zlib.error as exc:
        raise RequestError(f"the request body is not {encoding.decode()}: {exc}", code="malformed_encoding") from exc
    if len(plain) > most:
        raise PayloadTooLargeError(f"the decoded request body is larger than the limit of {most} bytes")
    if not decoder.eof or decoder.unused_data:
        raise RequestError(f"the request body is not one whole {encoding.decode()} stream", code="malformed_encoding")
    return plain


async def read_body(receive: Receive) -> bytes | bytearray:
    """The whole body.

    Raises:
        PayloadTooLargeError, RequestError: it is beyond the bounds of :class:`ErrorMiddleware`.
        ClientDisconnect: the caller left before its end.
    """
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk: bytes = message.get("body", b"")
        if not message.get("more_body", False):
            return body + chunk if body else chunk
        body += chunk


def parse_json(body: bytes | bytearray) -> dict[str, Any]:
    """``body`` as a JSON object; raises like :func:`read_json`."""
    try:
        data: Any = orjson.loads(body.removeprefix(BOM_UTF8))
    except ValueError as exc:
        raise RequestError(f"the request body is not valid JSON: {exc}", code="malformed_json") from exc
    if not isinstance(data, dict):
        raise RequestError(f"the request body must be a JSON object, got {type(data).__name__}", code="malformed_json")
    return cast("dict[str, Any]", data)


# ---------------------------------------------------------------------- errors


def error_response(exc: SwarmGatewayError, content: bytes | None = None) -> Response:
    """The response for ``exc`` with ``x-should-retry`` and, where a retry helps, ``retry-after``.

    Args:
        content: its JSON in another format than OpenAI's.
    """
    headers = {"x-should-retry": "true" if exc.should_retry else "false"}
    if exc.retry_after is not None:
        headers["retry-after"] = str(max(1, math.ceil(exc.retry_after)))
    if isinstance(exc, MethodError):
        headers["allow"] = exc.allow
    if exc.status == 401:
        # a refusal of this kind says how to ask (RFC 9110, 15.5.2)
        headers["www-authenticate"] = "Bearer"
    if exc.status == 426:
        # a refusal of this kind says what is spoken (RFC 9110, 15.5.22)
        headers["upgrade"] = "HTTP/1.1"
    if content is None:
        return JSONResponse(exc.body(), status_code=exc.status, headers=headers)
    return Response(content, exc.status, headers, media_type="application/json")


def http_error_response(request: Request, exc: HTTPException) -> Response:
    """The framework's own errors, such as 404 and 405, in our shape."""
    message = f"{request.method} {request.url.path}: {exc.detail}"
    if exc.status_code == 404:
        return error_response(NotFoundError(message, code="route_not_found"))
    if exc.status_code == 405:
        return error_response(MethodError(message, _methods_at(request) or (exc.headers or {}).get("Allow", "")))
    return error_response(RequestError(message, status=exc.status_code))


def _methods_at(request: Request) -> str:
    """The methods of all routes of the request's path; the framework names those of the first."""
    routes = [route for route in cast("App", request.app).routes if isinstance(route, Route)]
    fitting = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    methods = [method for route in fitting if route.path == fitting[0].path for method in route.methods or ()]
    return ", ".join(sorted({*methods}))


def stopping() -> UnavailableError:
    """The error of a request for which the server, at its end, has no time left."""
    return UnavailableError("the server is being stopped; ask again soon", code="stopping", retry_after=5)


def internal_error(request_id: str, exc: Exception) -> SwarmGatewayError:
    """The error of last resort: the log has the traceback, the caller the request id to quote."""
    logger.error("request %s failed", request_id, exc_info=exc)
    return SwarmGatewayError(f"internal error; quote request id {request_id}", code="internal_error")
