"""Deliver one reply over ASGI while it is still being produced.

Invariant: when the caller hangs up, the work for it is cancelled; while it waits on a stream, it hears something at
least every ``keepalive`` seconds; an error before the first byte is an HTTP error, after it an error event.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from swarm.errors import SwarmGatewayError
from swarm.http.asgi import error_response

logger = logging.getLogger(__name__)

SSE = "text/event-stream"
_KEEPALIVE = b": keep-alive\n\n"
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")


@dataclass(frozen=True, slots=True)
class Reply:
    """What goes back: a whole body, or one that comes in parts; ``close`` is called once it is sent or given up."""

    body: bytes | AsyncIterator[bytes]
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict[str, str])
    close: Callable[[], Awaitable[None]] | None = None


class Exchange:
    """ASGI app that awaits ``produce()`` and sends its reply.

    Args:
        produce: makes the reply; cancelled when the caller disconnects.
        keepalive: seconds after which a silent stream gets a comment (the first one also sends the headers, so until
            then an error still has its own HTTP status). ``None`` for plain answers: those wait in silence.
        on_error: told of every error that the caller gets to see.
    """

    def __init__(
        self,
        produce: Callable[[], Awaitable[Reply]],
        *,
        keepalive: float | None,
        on_error: Callable[[SwarmGatewayError], None],
    ) -> None:
        self._produce = produce
        self._keepalive = keepalive
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with asyncio.TaskGroup() as group:
            delivery = group.create_task(self._deliver(scope, receive, send))
            watcher = group.create_task(_cancel_on_disconnect(receive, delivery))
            delivery.add_done_callback(lambda _: watcher.cancel())

    async def _deliver(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts: asyncio.Queue[Reply | bytes | SwarmGatewayError | None] = asyncio.Queue(maxsize=8)
        async with asyncio.TaskGroup() as group:
            pump = group.create_task(self._pump(parts, scope))
            out = _Sender(send)
            while True:
                try:
                    async with asyncio.timeout(self._keepalive if out.may_comment else None):
                        part = await parts.get()
                except TimeoutError:
                    await out.comment()
                    continue
                match part:
                    case None:
                        break
                    case SwarmGatewayError():
                        self._on_error(part)
                        if out.started:
                            await out.error(part.body())
                        else:
                            await error_response(part)(scope, receive, send)
                            return
                        break
                    case Reply() if out.started and part.status != 200:
                        await out.error(_error_of(await _collect(part, parts), part.status))
                        break
                    case Reply():
                        await out.start(part)
                    case bytes():
                        await out.write(part)
            pump.cancel()
            await out.finish()

    async def _pump(self, parts: asyncio.Queue[Any], scope: Scope) -> None:
        """Put the reply, then the parts of its body, then ``None`` into ``parts``; or the error that prevented it."""
        try:
            reply = await self._produce()
            try:
                await parts.put(reply)
                if isinstance(reply.body, bytes):
                    await parts.put(reply.body)
                else:
                    async for part in reply.body:
                        await parts.put(part)
                await parts.put(None)
            finally:
                if reply.close is not None:
                    await reply.close()
        except SwarmGatewayError as exc:
            await parts.put(exc)
        except Exception as exc:
            request_id = scope.get("state", {}).get("request_id", "-")
            logger.error("request %s failed", request_id, exc_info=exc)
            await parts.put(SwarmGatewayError(f"internal error; quote request id {request_id}", code="internal_error"))


class _Sender:
    """The sending half of one exchange: headers once, then body parts; knows where a comment may stand."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False
        self._events = True
        self._between = True

    @property
    def may_comment(self) -> bool:
        """Whether a comment now would stand between two events, in a stream of events."""
        return self._events and self._between

    async def start(self, reply: Reply) -> None:
        if self.started:
            return
        response = Response(status_code=reply.status, headers=reply.headers)
        headers = MutableHeaders(raw=response.raw_headers)
        del headers["content-length"]
        if isinstance(reply.body, bytes):
            headers["content-length"] = str(len(reply.body))
        await self._send({"type": "http.response.start", "status": reply.status, "headers": headers.raw})
        self.started = True
        self._events = headers.get("content-type", "").startswith(SSE)

    async def write(self, part: bytes) -> None:
        await self._send({"type": "http.response.body", "body": part, "more_body": True})
        self._between = part.endswith(_EVENT_ENDS)

    async def comment(self) -> None:
        await self.start(Reply(body=_nothing(), headers=sse_headers()))
        await self.write(_KEEPALIVE)

    async def error(self, body: dict[str, Any]) -> None:
        await self.write(b"data: " + json.dumps(body).encode() + b"\n\n")

    async def finish(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


def sse_headers() -> dict[str, str]:
    """Headers of an event stream that no proxy should hold back."""
    return {"content-type": f"{SSE}; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield


async def _cancel_on_disconnect(receive: Receive, work: asyncio.Task[None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    work.cancel()


async def _collect(reply: Reply, parts: asyncio.Queue[Any]) -> bytes:
    """The body that follows ``reply``."""
    body = bytearray()
    while isinstance(part := await parts.get(), bytes):
        body += part
    return bytes(body)


def _error_of(body: bytes, status: int) -> dict[str, Any]:
    """The upstream's own error body, or one that says what status it had."""
    try:
        data = json.loads(body)
    except ValueError:
        data = None
    if isinstance(data, dict) and "error" in data:
        return data
    return SwarmGatewayError(f"the fallback upstream answered {status}", code="fallback_failed").body()
