"""The way to servers of our own making and to the engine's: plain HTTP/1.1 at a fraction of a general client's time.

Invariant: as of :mod:`swarm.http.client`. A connection has one request at a time, and is used again only after an
answer of which it is certain where it ended.
"""

from __future__ import annotations

import asyncio
import functools
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

import httptools

from swarm.http.client import CONNECT_SECONDS, Answer, ConnectionBrokenError, HttpClient

#: of a status line and headers
HEAD_BYTES = 65536
#: of a body that nobody reads, before no more of it is taken in
AHEAD_BYTES = 1024 * 1024

_BODILESS = frozenset({204, 304})


class _Place(NamedTuple):
    host: str
    port: int
    tls: bool


class NearClient(HttpClient):
    """See :class:`~swarm.http.client.HttpClient`. No proxies, redirects, compression, cookies, and no HEAD.

    Args:
        keepalive: seconds an idle connection is kept; less than the other side keeps it, for a connection that breaks
            under a request cannot be told from a server that died of it.
        tls: for ``https`` addresses; default: the system's certificates.
    """

    def __init__(self, *, keepalive: float, tls: ssl.SSLContext | None = None) -> None:
        self._keepalive = keepalive
        self._tls = tls
        self._open: set[_Connection] = set()
        #: by place, the one that was used last at the end
        self._idle: dict[_Place, list[_Connection]] = {}
        self._sweeping: asyncio.TimerHandle | None = None
        self._closed = False

    async def close(self) -> None:
        self._closed = True
        if self._sweeping is not None:
            self._sweeping.cancel()
        for connection in list(self._open):
            connection.abort()
        # the event loop closes sockets in its next turn
        await asyncio.sleep(0)

    @asynccontextmanager
    async def posted(
        self, url: str, content: bytes | None, headers: Mapping[str, str], *, method: str = "POST"
    ) -> AsyncGenerator[_Reply]:
        place, request = _asked(method, url, headers, content)
        connection = self._idle_at(place) or await self._connected(place)
        try:
            reply = connection.ask(request)
            await reply.begin()
            yield reply
        finally:
            self._put_back(place, connection)

    async def request(self, method: str, url: str, content: bytes | None, headers: Mapping[str, str]) -> Answer:
        place, request = _asked(method, url, headers, content)
        connection = self._idle_at(place) or await self._connected(place)
        try:
            reply = connection.ask(request)
            body = await reply.read()
            return Answer(reply.status, reply.headers, body)
        finally:
            self._put_back(place, connection)

    def _put_back(self, place: _Place, connection: _Connection) -> None:
        if connection.rest():
            self._idle.setdefault(place, []).append(connection)
            if self._sweeping is None:
                self._sweeping = asyncio.get_running_loop().call_later(self._keepalive, self._sweep)
        else:
            connection.abort()

    def _idle_at(self, place: _Place) -> _Connection | None:
        idle = self._idle.get(place, [])
        oldest = asyncio.get_running_loop().time() - self._keepalive
        while idle:
            connection = idle.pop()
            if connection.is_open and connection.idle_since > oldest:
                return connection
            connection.abort()
        return None

    async def _connected(self, place: _Place) -> _Connection:
        loop = asyncio.get_running_loop()
        self._check()
        if place.tls and self._tls is None:
            self._tls = ssl.create_default_context()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self._open), place.host, place.port, ssl=self._tls if place.tls else None
                )
        except (OSError, TimeoutError, UnicodeError) as exc:
            # UnicodeError: no name of a host
            where = f"{place.host}:{place.port}"
            raise ConnectionBrokenError(f"no connection to {where}: {exc or 'timeout'}", unsent=True) from exc
        try:
            self._check()
        except ConnectionBrokenError:
            connection.abort()
            raise
        return connection

    def _check(self) -> None:
        if self._closed:
            raise ConnectionBrokenError("the client was closed", unsent=True)

    def _sweep(self) -> None:
        """Close what has idled for too long."""
        loop = asyncio.get_running_loop()
        oldest = loop.time() - self._keepalive
        for place, idle in list(self._idle.items()):
            for connection in idle:
                if connection.idle_since <= oldest:
                    connection.abort()
            idle[:] = [connection for connection in idle if connection.is_open]
            if not idle:
                del self._idle[place]
        self._sweeping = loop.call_later(self._keepalive, self._sweep) if self._idle else None


class _Reply:
    """One answer as it comes; what :class:`~swarm.http.client.LiveAnswer` promises."""

    def __init__(self, connection: _Connection) -> None:
        self.status = 0
        self.headers: Mapping[str, str] = {}
        self.begun = False
        self.whole = False
        self._connection = connection
        self._parts: list[bytes] = []
        self._ahead = 0
        self._all_wanted = False
        self._error: ConnectionBrokenError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def over(self) -> bool:
        """Whether no more will come."""
        return self.whole or self._error is not None

    async def begin(self) -> None:
        """Wait for the head."""
        while not self.begun:
            await self._change()

    async def read(self) -> bytes:
        self._all_wanted = True
        self._connection.resume()
        while not self.whole:
            await self._change()
        return self._taken()

    async def parts(self) -> AsyncIterator[bytes]:
        while True:
            if self._parts:
                part = self._taken()
                self._connection.resume()
                yield part
            elif self.whole:
                return
            else:
                await self._change()

    def add(self, part: bytes) -> bool:
        """A part of the body came; false: more of it is to wait."""
        self._parts.append(part)
        self._ahead += len(part)
        return self._all_wanted or self._ahead < AHEAD_BYTES

    def fail(self, why: str) -> None:
        """No more will come; nothing to an answer that is whole."""
        self._error = self._error or ConnectionBrokenError(why, unsent=False)

    def wake(self) -> None:
        """Something has changed."""
        # whoever waits for all of it need not look at each part
        wanted = self.over or not self._all_wanted
        if wanted and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _taken(self) -> bytes:
        parts, self._parts, self._ahead = self._parts, [], 0
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _change(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class _Connection(asyncio.Protocol):
    """One connection, which is among ``others`` while it is open."""

    def __init__(self, others: set[_Connection]) -> None:
        self._others = others
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._reply: _Reply | None = None
        self._paused = False
        #: of the answer that is being read
        self._interim = self._bounded = self._reusable = False
        self._head = 0
        self._headers: dict[str, str] = {}
        self.idle_since = 0.0

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def ask(self, request: bytes) -> _Reply:
        """Send ``request``."""
        reply = self._reply = _Reply(self)
        self._interim = self._bounded = self._reusable = False
        self._head, self._headers = 0, {}
        if self._transport is None or self._transport.is_closing():
            reply.fail("the server closed the connection")
        else:
            self._transport.write(request)
        return reply

    def rest(self) -> bool:
        """The answer was read, as far as it will be; whether another request may follow."""
        reply, self._reply = self._reply, None
        self.idle_since = asyncio.get_running_loop().time()
        if reply is None or not (reply.whole and self._reusable and self.is_open):
            return False
        self.resume()
        return True

    def resume(self) -> None:
        """Take in more of the body."""
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()

    def abort(self) -> None:
        # the event loop will tell of our own end as of the server's, at which an answer of no told length is whole
        if self._reply is not None:
            self._reply.fail("the connection was closed at this end")
            self._reply.wake()
        if self._transport is not None:
            self._transport.abort()

    # ------------------------------------------------------------------ what the event loop tells

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from asyncio's
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpResponseParser(self)
        self._others.add(self)

    def data_received(self, data: bytes) -> None:
        reply = self._reply
        if reply is None:
            # nobody has asked
            self.abort()
            return
        if not reply.begun:
            self._head += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            self._reusable = False
            reply.fail(f"the answer is no HTTP: {exc}")
        if not reply.begun and self._head > HEAD_BYTES:
            reply.fail("the answer's head is too large")
        reply.wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._others.discard(self)
        # the parser refers to us
        self._transport = self._parser = None
        reply = self._reply
        if reply is None or reply.over:
            return
        if reply.begun and not self._bounded and exc is None:
            reply.whole = True
        else:
            reply.fail(f"the server closed the connection ({exc})" if exc else "the server closed the connection")
        reply.wake()

    # ------------------------------------------------------------------ what the parser finds

    def on_message_begin(self) -> None:
        if self._reply is not None and self._reply.whole:
            self._reusable = False

    def on_header(self, name: bytes, value: bytes) -> None:
        reply = self._reply
        if reply is None or reply.begun:
            return
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        if key == "content-length" or (key == "transfer-encoding" and "chunked" in text.lower()):
            self._bounded = True
        headers = self._headers
        headers[key] = f"{headers[key]}, {text}" if key in headers else text

    def on_headers_complete(self) -> None:
        reply, status = self._reply, self._parser.get_status_code()
        if reply is None or reply.begun:
            return
        if status < 200:
            self._interim = True
            self._headers = {}
            return
        self._bounded |= status in _BODILESS
        reply.status, reply.headers = status, self._headers
        reply.begun = True

    def on_body(self, body: bytes) -> None:
        reply = self._reply
        if reply is not None and not reply.whole and not reply.add(body) and not self._paused:
            assert self._transport is not None
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._interim:
            self._interim = self._bounded = False
            return
        if self._reply is not None and not self._reply.whole:
            self._reply.whole = True
            self._reusable = self._bounded and self._parser.should_keep_alive()


def _asked(method: str, url: str, headers: Mapping[str, str], content: bytes | None) -> tuple[_Place, bytes]:
    """Where to send what.

    Raises:
        ConnectionBrokenError: no request can be made of it.
    """
    if method == "HEAD":
        # the parser cannot be told that the body which the headers promise will not come
        raise ValueError("this client cannot ask HEAD: ask GET, or use an OutsideClient")
    try:
        place, named, target = _located(url)
        return place, _request(method, target, named, headers, content)
    except ValueError as exc:
        raise ConnectionBrokenError(f"no request can be made to {url!r}: {exc}", unsent=True) from exc


def _located(url: str) -> tuple[_Place, str, str]:
    """:func:`_parsed`, which need not look at what is but a path: those differ by episode."""
    end = url.find("/", len("https://"))
    if end < 0 or "#" in url or "?" in url[:end] or not url.isprintable():
        return _parsed(url)
    return *_parsed(url[:end])[:2], url[end:]


@functools.lru_cache(maxsize=1024)
def _parsed(url: str) -> tuple[_Place, str, str]:
    """Where ``url`` leads, how its host is named, and what to ask for there.

    Raises:
        ValueError: it is no http(s) address.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("it must begin with http:// or https://")
    tls = parts.scheme == "https"
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return _Place(parts.hostname, parts.port or (443 if tls else 80), tls), parts.netloc.rpartition("@")[2], target


def _request(method: str, target: str, host: str, headers: Mapping[str, str], content: bytes | None) -> bytes:
    """What is sent.

    Raises:
        ValueError: something in its head has line breaks, or letters that are not in latin-1.
    """
    lines = [f"{method} {target} HTTP/1.1", f"host: {host}", *(f"{name}: {value}" for name, value in headers.items())]
    if content is not None:
        lines.append(f"content-length: {len(content)}")
    head = "\r\n".join(lines)
    if head.count("\n") != len(lines) - 1 or head.count("\r") != len(lines) - 1:
        raise ValueError("a header must not contain line breaks")
    return head.encode("latin-1") + b"\r\n\r\n" + (content or b"")
