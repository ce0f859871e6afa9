"""The cheapest HTTP/1.1 clients that are still such: a keep-alive connection, one request at a time, no pipelining.

A load generator on the machine that it measures must cost little; httpx takes more CPU time per request than a server.
:class:`Connection` is for our own servers, whose plain answers have a ``content-length``; :class:`Caller` is for any.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from dataclasses import dataclass
from typing import Any, Self, cast
from urllib.parse import urlsplit

import httptools


class Connection(asyncio.Protocol):
    """One connection; :meth:`ask` sends a request and waits for its answer."""

    def __init__(self) -> None:
        self._received = b""
        self._needed = -1
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def open(cls, host: str, port: int) -> Self:
        _, protocol = await asyncio.get_running_loop().create_connection(cls, host, port)
        return protocol

    def ask(self, request: bytes) -> asyncio.Future[tuple[int, bytes]]:
        """Send ``request``; its status and body, or :class:`ConnectionError`."""
        assert self._answer is None, "one request at a time"
        answer = self._answer = asyncio.get_running_loop().create_future()
        if self._transport is None or self._transport.is_closing():
            self.connection_lost(None)
        else:
            self._transport.write(request)
        return answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from asyncio's
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        received = self._received = self._received + data if self._received else data
        if self._needed < 0:
            head = received.find(b"\r\n\r\n")
            if head < 0:
                return
            start = received.lower().find(b"content-length:", 0, head)
            if start < 0:
                raise ValueError(f"an answer without content-length: {received[:200]!r}")
            self._needed = head + 4 + int(received[start + 15 : received.index(b"\r\n", start)])
            self._body = head + 4
        if len(received) >= self._needed and self._answer is not None:
            answer, self._answer = self._answer, None
            self._received, body = b"", received[self._body : self._needed]
            self._needed = -1
            if not answer.done():
                answer.set_result((int(received[9:12]), body))

    def connection_lost(self, exc: Exception | None) -> None:
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_exception(ConnectionError(f"the server closed the connection ({exc})"))


@dataclass(frozen=True)
class Reply:
    """A whole answer; seconds since the request was sent. ``first_token`` is ``None`` where no chunk had content."""

    status: int
    body: bytes
    first_token: float | None
    seconds: float


class Caller(asyncio.Protocol):
    """Sends one request at a time to a server of any making and reads its answer: of a length that is told, in chunks,
    or until the connection ends. A connection that the server has closed is opened anew, which is not timed."""

    _TOKEN = re.compile(rb'"content": ?"[^"]')

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self._transport: asyncio.Transport | None = None
        self._reply: asyncio.Future[Reply] | None = None
        self._parser: Any = None
        self._answered = False

    async def ask(self, request: bytes) -> Reply:
        """The answer to ``request``.

        Raises:
            ConnectionError: there is none.
        """
        assert self._reply is None, "one request at a time"
        try:
            return await self._ask(request)
        except ConnectionError:
            if self._answered:
                raise
        # it may have closed an idle connection just as the request was on its way
        return await self._ask(request)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    async def _ask(self, request: bytes) -> Reply:
        loop = asyncio.get_running_loop()
        if self._transport is None or self._transport.is_closing():
            await loop.create_connection(lambda: self, *self._address)
        assert self._transport is not None
        self._body = bytearray()
        self._first: float | None = None
        self._answered = False
        reply = self._reply = loop.create_future()
        self._began = time.perf_counter()
        self._transport.write(request)
        return await reply

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from asyncio's
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpResponseParser(self)
        self._bounded = False

    def data_received(self, data: bytes) -> None:
        self._answered = True
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._reply is None:
            return
        if exc is None and self._answered and not self._bounded:
            self.on_message_complete()
        else:
            self._end().set_exception(ConnectionError(f"the server closed the connection ({exc})"))

    # ------------------------------------------------------------------ what the parser finds

    def on_message_begin(self) -> None:
        self._bounded = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self._bounded |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_body(self, body: bytes) -> None:
        self._body += body
        if self._first is None and self._TOKEN.search(self._body):
            self._first = time.perf_counter() - self._began

    def on_message_complete(self) -> None:
        seconds = time.perf_counter() - self._began
        if not self._parser.should_keep_alive() and self._transport is not None:
            self._transport.close()
        if self._reply is not None:
            self._end().set_result(Reply(self._parser.get_status_code(), bytes(self._body), self._first, seconds))

    def _end(self) -> asyncio.Future[Reply]:
        assert self._reply is not None
        reply, self._reply = self._reply, None
        return reply


def address_of(url: str) -> tuple[str, int]:
    """Host and port of ``http://host:port``."""
    parts = urlsplit(url)
    assert parts.hostname and parts.port, url
    return parts.hostname, parts.port


def post(path: str, body: bytes, *, host: str = "127.0.0.1", key: str = "") -> bytes:
    """The bytes of a POST of JSON."""
    authorization = f"authorization: Bearer {key}\r\n" if key else ""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {host}\r\n{authorization}"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def get(path: str, *, host: str = "127.0.0.1") -> bytes:
    """The bytes of a GET."""
    return f"GET {path} HTTP/1.1\r\nhost: {host}\r\n\r\n".encode()


async def ask_json(connection: Connection, path: str, body: Any = None) -> dict[str, Any]:
    """The JSON answer of the one-off request (POST if there is a body), which must be 200."""
    request = get(path) if body is None else post(path, json.dumps(body).encode())
    status, answer = await connection.ask(request)
    if status != 200:
        raise RuntimeError(f"{path}: {status} {answer.decode(errors='replace')[:500]}")
    return json.loads(answer)
