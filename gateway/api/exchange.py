"""Delivers one outcome over ASGI, in the dialect of its request, while it is still being produced.

Invariant: a caller sees one dialect, whatever happens. When it hangs up, the work for it is cancelled. A stream stays
without headers until an answer is on its way, so an error until then is an HTTP error, which an SDK may repeat; from
then on the caller gets something every ``keepalive`` seconds, and an error is an event that ends the stream. What is
live goes out as it comes, event by event.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from adapters.dialects import Dialect, EventStream, sse
from adapters.dialects.jsons import encode, error_in
from gateway.types import Decided, Live, Outcome, Prospect, Relayed
from swarm.concurrency import ClientGoneError, until_gone
from swarm.errors import RelayedError, SwarmGatewayError, UpstreamError
from swarm.http.asgi import error_response, internal_error, stopping

logger = logging.getLogger(__name__)

#: Chunks of a finished answer that go out in one write: a long answer is thousands of them.
_CHUNKS_PER_WRITE = 16


@dataclass(frozen=True)
class Rendering:
    """How a request with the body ``data``, as its dialect reads it, is answered; ``more_headers``: of any answer."""

    dialect: Dialect
    data: Mapping[str, Any]
    streamed: bool
    more_headers: Mapping[str, str]

    def events(self) -> EventStream:
        """Makes the events of the answer; call it once."""
        return self.dialect.stream(self.data)

    def body(self, completion: Mapping[str, Any]) -> bytes:
        """The plain body of a ``chat.completion``.

        Raises:
            UpstreamError: it is none.
        """
        return encode(self.dialect.answer(self.data, completion))

    def refusal(self, exc: SwarmGatewayError) -> Response:
        """The error as a response."""
        response = error_response(exc, encode(self.dialect.error(exc)))
        response.headers.update(self.more_headers)
        return response


async def deliver(
    scope: Scope,
    receive: Receive,
    send: Send,
    produce: Callable[[], Awaitable[Outcome]],
    rendering: Rendering,
    *,
    keepalive: float,
    on_error: Callable[[SwarmGatewayError], None],
    prospect: Prospect | None = None,
) -> None:
    """Await ``produce()`` and deliver its outcome.

    Args:
        produce: makes the outcome; cancelled when the caller disconnects.
        keepalive: seconds after which a silent stream gets a keep-alive of its dialect. Plain answers wait in silence.
        on_error: called with every error that the caller sees.
        prospect: of the answer; the first keep-alive, which sends the headers, waits until the answer has been under
            way for ``keepalive`` seconds. ``None``: the headers wait for the outcome.
    """

    events = rendering.events() if rendering.streamed else None
    out = _Sender(send, rendering.more_headers)

    async def fail(error: SwarmGatewayError) -> None:
        on_error(error)
        if not out.started:
            await rendering.refusal(error)(scope, receive, send)
            return
        logger.warning("an answer broke off: %s", error)
        if out.has_events:
            await out.write((events or rendering.events()).fail(error))
            await out.finish()
        # else the server breaks the connection, which alone shows that a body is not whole

    async def exchange() -> None:
        beats = asyncio.create_task(out.beat(events.keepalive, keepalive, prospect)) if events is not None else None
        try:
            await _send_outcome(out, await produce(), rendering, events)
        except Exception as exc:
            request_id = scope.get("state", {}).get("request_id", "-")
            if beats is not None:
                beats.cancel()
            await fail(exc if isinstance(exc, SwarmGatewayError) else internal_error(request_id, exc))
        finally:
            if beats is not None:
                beats.cancel()

    try:
        with suppress(ClientGoneError):
            await until_gone(receive, exchange())
    except asyncio.CancelledError:
        # only uvicorn cancels a request: the time that it gives requests at its end is over
        await fail(stopping())


async def _send_outcome(out: _Sender, outcome: Outcome, rendering: Rendering, events: EventStream | None) -> None:
    try:
        match outcome:
            case Relayed():
                await _relay(out, outcome)
            case Decided() if events is None:
                out.prepare(200, {"content-type": "application/json", **outcome.headers})
                await out.whole(rendering.body(outcome.completion))
                return
            case Decided() | Live():
                if events is None:
                    # the pipeline answers a plain request whole
                    raise UpstreamError("a stream came where none was asked for", code="malformed_answer")
                out.prepare(200, {**sse.HEADERS, **outcome.headers})
                async for part in parts_of(outcome, events):
                    await out.write(part)
        await out.finish()
    finally:
        if outcome.close is not None:
            await outcome.close()


class _Sender:
    """The sending half of one exchange: headers once, with the first byte; one write at a time."""

    def __init__(self, send: Send, more_headers: Mapping[str, str]) -> None:
        self._send = send
        self._more = more_headers
        self._status = 200
        self._headers: Mapping[str, str] = sse.HEADERS
        self._writing = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self.started = False

    @property
    def has_events(self) -> bool:
        """Whether what goes out is a stream of events."""
        return self._headers.get("content-type", "").startswith(sse.EVENTS)

    def prepare(self, status: int, headers: Mapping[str, str]) -> None:
        """Set status and headers, unless they are out."""
        if not self.started:
            self._status, self._headers = status, headers

    async def write(self, part: bytes) -> None:
        """Send a part of the body; of a stream, whole events."""
        async with self._writing:
            await self._start()
            await self._send({"type": "http.response.body", "body": part, "more_body": True})
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

    async def beat(self, keepalive: bytes, seconds: float, prospect: Prospect | None) -> None:
        """Write ``keepalive`` after each ``seconds`` of silence, between events only; until cancelled. Before the
        headers silence counts from when the answer came under way."""
        while True:
            since = self._last
            if not self.started:
                under_way = prospect.since() if prospect is not None else None
                if under_way is None:
                    await asyncio.sleep(seconds)
                    continue
                since = max(since, under_way)
            silent = self._loop.time() - since
            if silent < seconds:
                await asyncio.sleep(seconds - silent)
            elif self._writing.locked() or not self.has_events:
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
    """Send an upstream's own answer on; after keep-alives it must be a stream of events.

    Raises:
        RelayedError, UpstreamError: it is not.
    """
    streamed = relayed.headers.get("content-type", "").startswith(sse.EVENTS)
    if out.started and not (relayed.status == 200 and streamed):
        raise _error_of(relayed)
    out.prepare(relayed.status, {**(sse.HEADERS if streamed else {}), **relayed.headers})
    if isinstance(relayed.body, bytes):
        await out.write(relayed.body)
        return
    # half an event is none, and nothing could follow it
    async for part in sse.whole_events(relayed.body) if streamed else relayed.body:
        await out.write(part)


def _error_of(relayed: Relayed) -> SwarmGatewayError:
    """The upstream's own error, or one that names its status."""
    details = error_in(relayed.body) if isinstance(relayed.body, bytes) else {}
    details = details or {"message": f"the fallback upstream answered {relayed.status}", "code": "fallback_failed"}
    if 400 <= relayed.status < 500:
        return RelayedError(relayed.status, details)
    return UpstreamError(str(details.get("message")), code=str(details.get("code") or "fallback_failed"))


async def parts_of(outcome: Decided | Live, events: EventStream) -> AsyncIterator[bytes]:
    """The bytes of a streamed answer: live chunks one by one, those of a finished answer in larger parts.

    Raises:
        SwarmGatewayError: the answer breaks off.
    """
    if isinstance(outcome, Live):
        async for chunk in outcome.chunks:
            if part := events.take(chunk):
                yield part
        yield events.end()
        return
    events.foresee(outcome.completion.get("usage") or {})
    gathered: list[bytes] = []
    for chunk in outcome.chunks():
        gathered.append(events.take(chunk))
        if len(gathered) == _CHUNKS_PER_WRITE:
            yield b"".join(gathered)
            gathered.clear()
    yield b"".join([*gathered, events.end()])
