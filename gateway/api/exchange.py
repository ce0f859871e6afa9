"""Deliver one outcome over ASGI while it is still being produced.

Invariant: when the caller hangs up, the work for it is cancelled; while it waits on a stream, it hears something at
least every ``keepalive`` seconds; an error before the first byte is an HTTP error, after it an event that ends the
stream. What is live goes out as it comes.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from starlette.types import Receive, Scope, Send

from adapters.dialects import EventStream
from gateway.api.rendering import Rendering, parts_of
from gateway.background import HEAD_START
from gateway.types import Decided, Live, Outcome, Relayed
from swarm.errors import RelayedError, SwarmGatewayError, UpstreamError

logger = logging.getLogger(__name__)

SSE = "text/event-stream"
#: Of an event stream that no proxy should hold back.
_SSE_HEADERS = {"content-type": f"{SSE}; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
#: Of an upstream's error that comes too late to be one by status.
_MOST_ERROR_BYTES = 64 * 1024


class Exchange:
    """ASGI app that awaits ``produce()`` and delivers its outcome.

    Args:
        produce: makes the outcome; cancelled when the caller disconnects.
        rendering: says how it looks.
        keepalive: seconds after which a silent stream gets a keep-alive of its dialect (the first one also sends the
            headers, so until then an error still has its own HTTP status). Plain answers wait in silence.
        on_error: told of every error that the caller gets to see.
    """

    def __init__(
        self,
        produce: Callable[[], Awaitable[Outcome]],
        rendering: Rendering,
        *,
        keepalive: float,
        on_error: Callable[[SwarmGatewayError], None],
    ) -> None:
        self._produce = produce
        self._rendering = rendering
        self._keepalive = keepalive
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with _while_there(receive):
            out = _Sender(send, self._rendering.more_headers)
            if self._rendering.streamed:
                await self._stream(out, scope, receive, send)
                return
            try:
                await self._deliver(out, None)
            except Exception as exc:
                error = self._told(exc, scope)
                if out.started:
                    # part of a body is out, and only a broken connection says that it is not whole
                    raise
                await self._rendering.refusal(error)(scope, receive, send)

    async def _stream(self, out: _Sender, scope: Scope, receive: Receive, send: Send) -> None:
        events = self._rendering.events()
        beats = _Behind(lambda: out.beat(events.keepalive, self._keepalive))
        try:
            await self._deliver(out, events)
        except Exception as exc:
            error = self._told(exc, scope)
            beats.cancel()
            if not out.started:
                await self._rendering.refusal(error)(scope, receive, send)
            elif out.has_events:
                await out.write((b"" if out.between else b"\n\n") + events.fail(error))
                await out.finish()
            else:
                raise
        finally:
            beats.cancel()

    async def _deliver(self, out: _Sender, events: EventStream | None) -> None:
        outcome = await self._produce()
        try:
            match outcome:
                case Relayed():
                    await _relay(out, outcome)
                case Decided() if events is None:
                    out.prepare(200, {"content-type": "application/json", **outcome.headers})
                    await out.whole(self._rendering.body(outcome.completion))
                    return
                case Decided() | Live():
                    if events is None:
                        # the pipeline answers a plain request whole
                        raise UpstreamError("a stream came where none was asked for", code="malformed_answer")
                    out.prepare(200, {**_SSE_HEADERS, **outcome.headers})
                    async for part in parts_of(outcome, events):
                        await out.write(part)
            await out.finish()
        finally:
            if outcome.close is not None:
                await outcome.close()

    def _told(self, exc: Exception, scope: Scope) -> SwarmGatewayError:
        if isinstance(exc, SwarmGatewayError):
            error = exc
        else:
            request_id = scope.get("state", {}).get("request_id", "-")
            logger.error("request %s failed", request_id, exc_info=exc)
            error = SwarmGatewayError(f"internal error; quote request id {request_id}", code="internal_error")
        self._on_error(error)
        return error


class _Sender:
    """The sending half of one exchange: headers once, with the first byte; one write at a time."""

    def __init__(self, send: Send, more_headers: Mapping[str, str]) -> None:
        self._send = send
        self._more = more_headers
        self._status = 200
        self._headers: Mapping[str, str] = _SSE_HEADERS
        self._writing = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        #: whether the last byte ended an event
        self.between = True
        self.started = False

    @property
    def has_events(self) -> bool:
        """Whether what goes out is a stream of events."""
        return self._headers.get("content-type", "").startswith(SSE)

    def prepare(self, status: int, headers: Mapping[str, str]) -> None:
        """What the head will say, unless it is out."""
        if not self.started:
            self._status, self._headers = status, headers

    async def write(self, part: bytes) -> None:
        """Send a part of the body."""
        async with self._writing:
            await self._start()
            await self._send({"type": "http.response.body", "body": part, "more_body": True})
            self.between = part.endswith(_EVENT_ENDS)
            self._last = self._loop.time()

    async def whole(self, body: bytes) -> None:
        """Send the whole body."""
        await self._start(len(body))
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def finish(self) -> None:
        """The body is whole."""
        async with self._writing:
            await self._start()
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def beat(self, keepalive: bytes, seconds: float) -> None:
        """Write ``keepalive`` wherever nothing was said for ``seconds``, between events only; until cancelled."""
        while True:
            silent = self._loop.time() - self._last
            if silent < seconds:
                await asyncio.sleep(seconds - silent)
            elif self._writing.locked() or not (self.between and self.has_events):
                await asyncio.sleep(seconds)
            else:
                await self.write(keepalive)

    async def _start(self, length: int | None = None) -> None:
        if self.started:
            return
        self.started = True
        headers = {**self._headers, **self._more}
        if length is not None:
            headers["content-length"] = str(length)
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": self._status, "headers": raw})


async def _relay(out: _Sender, relayed: Relayed) -> None:
    """Send an upstream's own answer on; where keep-alives have gone out already, it must be a stream of events.

    Raises:
        RelayedError, UpstreamError: it is none.
    """
    if out.started and not (relayed.status == 200 and relayed.headers.get("content-type", "").startswith(SSE)):
        raise _error_of(await _collected(relayed.body), relayed.status)
    out.prepare(relayed.status, relayed.headers)
    if isinstance(relayed.body, bytes):
        await out.write(relayed.body)
        return
    async for part in relayed.body:
        await out.write(part)


class _Behind:
    """``work()`` in a task of its own, begun so late that it does not keep a request from being asked on."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._task: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(HEAD_START, self._begin, work)

    def cancel(self) -> None:
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _begin(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._task = asyncio.create_task(work())


@contextmanager
def _while_there(receive: Receive) -> Generator[None]:
    """Cancel the block when the caller hangs up, which then ends without an error."""
    task = asyncio.current_task()
    assert task is not None
    before, running, gone = task.cancelling(), True, False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        if running:
            gone = True
            task.cancel()

    watcher = _Behind(watch)
    try:
        yield
    except asyncio.CancelledError:
        if not gone or task.uncancel() > before:
            raise
    finally:
        running = False
        watcher.cancel()


async def _collected(body: bytes | AsyncIterator[bytes]) -> bytes:
    if isinstance(body, bytes):
        return body
    gathered = bytearray()
    async for part in body:
        gathered += part
        if len(gathered) > _MOST_ERROR_BYTES:
            break
    return bytes(gathered)


def _error_of(body: bytes, status: int) -> SwarmGatewayError:
    """The upstream's own error, or one that says what status it had."""
    try:
        data: Any = json.loads(body)
    except ValueError:
        data = None
    error: Any = cast("dict[str, Any]", data).get("error") if isinstance(data, dict) else None
    if not isinstance(error, dict):
        error = {"message": f"the fallback upstream answered {status}", "code": "fallback_failed"}
    said = cast("dict[str, Any]", error)
    if 400 <= status < 500:
        return RelayedError(status, said)
    return UpstreamError(str(said.get("message")), code=str(said.get("code") or "fallback_failed"))
