"""The cheapest HTTP/1.1 client that is still one: a keep-alive connection, one request at a time, no pipelining.

A load generator on the machine that it measures must cost little; httpx takes more CPU time per request than a server.
Answers must have a ``content-length``, which all plain answers of our servers have.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any, Self, cast
from urllib.parse import urlsplit


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


class Stream(asyncio.Protocol):
    """A keep-alive connection for streamed answers in chunked encoding: when the first token came."""

    _TOKEN = re.compile(rb'"content": ?"[^"]')

    def __init__(self) -> None:
        self._received = bytearray()
        self._began = 0.0
        self._first: float | None = None
        self._done: asyncio.Future[float] | None = None
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def open(cls, host: str, port: int) -> Self:
        _, protocol = await asyncio.get_running_loop().create_connection(cls, host, port)
        return protocol

    def ask(self, request: bytes) -> asyncio.Future[float]:
        """Send ``request`` and read its whole answer; seconds until its first chunk with content had come."""
        assert self._done is None and self._transport is not None, "one request at a time"
        self._done = asyncio.get_running_loop().create_future()
        self._began = time.perf_counter()
        self._transport.write(request)
        return self._done

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._received += data
        if self._first is None and self._TOKEN.search(self._received):
            self._first = now - self._began
        if self._done is None or not self._received.endswith(b"\r\n0\r\n\r\n"):
            return
        done, self._done = self._done, None
        answer, first = bytes(self._received), self._first
        self._received.clear()
        self._first = None
        if first is None or not answer.startswith(b"HTTP/1.1 200 "):
            done.set_exception(RuntimeError(f"no stream of tokens: {answer[:500]!r}"))
        else:
            done.set_result(first)

    def connection_lost(self, exc: Exception | None) -> None:
        done, self._done = self._done, None
        if done is not None and not done.done():
            done.set_exception(ConnectionError(f"the server closed the connection ({exc})"))


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
