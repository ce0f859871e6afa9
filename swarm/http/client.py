"""The HTTP client of every outgoing call, over aiohttp: pooled connections, whole answers or streamed ones.

Invariant: every network failure is a :class:`ConnectionBrokenError`, which says whether the server may have read the
request. Leaving an answer before its end, or being cancelled, closes the connection and so cancels the call there.
A connection over which an error came is not used again.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import os
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from aiohttp.connector import Connection

#: Seconds to connect and agree on TLS.
CONNECT_SECONDS = 5.0
#: Seconds an idle connection is kept: below the 5 s after which uvicorn and vLLM close it.
KEEPALIVE_SECONDS = 3.0
#: When the system asks whether the other end of a silent connection is there: after 30 s, for routers and firewalls
#: forget connections that are silent for a minute or more, and tell nobody. It breaks after two minutes without a word,
#: so that a line that is down for less costs no answer.
_PROBES = {"TCP_KEEPIDLE": 30, "TCP_KEEPALIVE": 30, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 6}

#: Statuses with which applications answer what they did not expect. uvicorn closes such a connection behind the answer,
#: without saying so in it: vLLM 0.24 after each request that it refuses.
_CLOSED_BEHIND = frozenset({400, 404, 500, 501})
_CLOSED = "the client is closed"
#: Headers that aiohttp would add. Without ``accept-encoding``, servers send the body as it is.
_NOT_ADDED = ("Accept", "Accept-Encoding", "Content-Type")


class ConnectionBrokenError(Exception):
    """There is no answer, or only a part of it. If ``unsent``, the server has certainly not read the request."""

    def __init__(self, message: str, *, unsent: bool) -> None:
        super().__init__(message)
        self.unsent = unsent


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer; names of ``headers`` match in any case."""

    status: int
    headers: Mapping[str, str]
    content: bytes


class HttpClient:
    """A pool of connections for one event loop; :meth:`close` it. It follows no redirects and keeps no cookies.

    A call raises :class:`TimeoutError` after ``seconds`` without its whole answer; without them only connecting has a
    time limit. A GET whose connection breaks before the answer is sent once more, on a new connection; other methods
    are not.

    Args:
        keepalive: seconds that an idle connection is kept. Choose fewer than the server does: a connection that the
            server closes just as a request is sent looks like a server that died of the request.
        tls: for ``https`` addresses; default: the system's certificates.
        proxies: whether to use the proxies that the environment names. This costs about a millisecond per request; ask
            :func:`has_proxy`.
    """

    def __init__(
        self, *, keepalive: float = KEEPALIVE_SECONDS, tls: ssl.SSLContext | None = None, proxies: bool = False
    ) -> None:
        self._keepalive = keepalive
        self._tls = tls
        self._proxies = proxies
        self._opened: aiohttp.ClientSession | None = None
        self._closed = False

    async def close(self) -> None:
        """Close all connections; calls under way fail with :class:`ConnectionBrokenError`."""
        self._closed = True
        if self._opened is not None:
            await self._opened.close()

    @asynccontextmanager
    async def posted(
        self,
        url: str,
        content: bytes | None,
        headers: Mapping[str, str],
        *,
        method: str = "POST",
        seconds: float | None = None,
    ) -> AsyncGenerator[LiveAnswer]:
        """Send a request; the block starts when the answer's headers have arrived.

        Raises:
            ConnectionBrokenError: the connection failed, here or while the answer is read.
        """
        response = await self._send(method, url, content, headers, seconds)
        async with response:
            yield LiveAnswer(response, self)

    async def request(
        self,
        method: str,
        url: str,
        content: bytes | None,
        headers: Mapping[str, str],
        seconds: float | None = None,
    ) -> Answer:
        """Send a request and read the whole answer, whatever its status.

        Raises:
            ConnectionBrokenError: the connection failed.
        """
        response = await self._send(method, url, content, headers, seconds)
        # aiohttp closes the connection where reading fails or is cancelled
        return Answer(response.status, response.headers, await LiveAnswer(response, self).read())

    async def post(self, url: str, content: bytes, headers: Mapping[str, str], seconds: float | None = None) -> Answer:
        """:meth:`request` with ``POST``."""
        return await self.request("POST", url, content, headers, seconds)

    async def get(self, url: str, seconds: float, headers: Mapping[str, str] | None = None) -> Answer:
        """:meth:`request` with ``GET``, given up after ``seconds``.

        Raises:
            ConnectionBrokenError: also when the time is over.
        """
        try:
            return await self.request("GET", url, None, headers or {}, seconds)
        except TimeoutError as exc:
            raise ConnectionBrokenError(f"no answer within {seconds:g} s", unsent=False) from exc

    @contextmanager
    def translated(self) -> Generator[None]:
        """Raise errors of aiohttp as :class:`ConnectionBrokenError`."""
        try:
            yield
        except aiohttp.ClientError as exc:
            unsent = isinstance(exc, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError | aiohttp.InvalidURL)
            raise ConnectionBrokenError(_words(exc), unsent=unsent) from exc
        # when the body's length is not given, aiohttp takes our closing of the connection for the body's end
        if self._closed:
            raise ConnectionBrokenError(_CLOSED, unsent=False)

    async def _send(
        self, method: str, url: str, content: bytes | None, headers: Mapping[str, str], seconds: float | None
    ) -> aiohttp.ClientResponse:
        if self._closed:
            raise ConnectionBrokenError(_CLOSED, unsent=True)
        session = self._session()
        limit = session.timeout
        if seconds is not None and seconds < math.inf:
            # aiohttp takes 0 for no limit
            limit = aiohttp.ClientTimeout(total=max(seconds, 1e-3), sock_connect=CONNECT_SECONDS)
        try:
            with self.translated():
                # not aiohttp's own way to the environment, which sends the passwords of a .netrc along
                proxy = proxy_of(url) if self._proxies else None
                return await session.request(
                    method, url, data=content, headers=headers, allow_redirects=False, timeout=limit, proxy=proxy
                )
        except ValueError as exc:
            # the URL or a header is malformed
            raise ConnectionBrokenError(f"cannot send a request to {url!r}: {exc}", unsent=True) from exc
        except (AssertionError, RuntimeError, asyncio.CancelledError) as exc:
            # which of them a closed session raises depends on how far the call was
            task = asyncio.current_task()
            if not self._closed or (task is not None and task.cancelling()):
                raise
            raise ConnectionBrokenError(_CLOSED, unsent=False) from exc

    def _session(self) -> aiohttp.ClientSession:
        # not in __init__: a session belongs to the event loop that runs when it is made
        if self._opened is None:
            self._opened = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0, keepalive_timeout=self._keepalive, ssl=self._tls or True, socket_factory=_probed_socket
                ),
                # with ``connect``, a call over an idle connection would start a timer, too
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=_NOT_ADDED,
                response_class=_Response,
            )
        return self._opened


def probe_silence(sock: socket.socket) -> None:
    """Keep the connections of ``sock``, also of one that listens, known on the way while nothing is said over them, and
    notice a peer that vanished."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES.items():
        # macOS has another name for the first
        if (option := getattr(socket, name, None)) is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _probed_socket(info: Sequence[Any]) -> socket.socket:
    family, kind, proto, *_ = info
    sock = socket.socket(family, kind, proto)
    probe_silence(sock)
    return sock


class _Response(aiohttp.ClientResponse):
    """An answer of aiohttp's that keeps its connection from the next call where the server may close it."""

    async def start(self, connection: Connection) -> aiohttp.ClientResponse:
        protocol = connection.protocol
        await super().start(connection)
        if self.status in _CLOSED_BEHIND and protocol is not None:
            if self.connection is None:
                # the whole answer has come, and the connection is back in the pool
                protocol.close()
            else:
                protocol.force_close()
        return self


class LiveAnswer:
    """An answer whose body is still to be read; attributes as of :class:`Answer`."""

    def __init__(self, response: aiohttp.ClientResponse, client: HttpClient) -> None:
        self._response = response
        self._client = client
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers

    async def read(self) -> bytes:
        """The whole body.

        Raises:
            ConnectionBrokenError: the connection broke before the body's end.
        """
        with self._client.translated():
            return await self._response.read()

    async def parts(self) -> AsyncIterator[bytes]:
        """The body in parts, each as soon as it has arrived; raises as :meth:`read`."""
        parts = self._response.content.iter_any()
        while True:
            with self._client.translated():
                part = await anext(parts, None)
            if part is None:
                return
            yield part


def _words(exc: aiohttp.ClientError) -> str:
    """What happened, in words for people: aiohttp's own name its classes, and statuses that nobody sent."""
    match exc:
        case aiohttp.ClientConnectorError(os_error=ConnectionError() as error):
            # without aiohttp's list of the addresses that were tried
            return f"cannot connect to {exc.host}:{exc.port}: {os.strerror(error.errno or 0)}"
        case aiohttp.ClientConnectorSSLError(os_error=ssl.SSLError(reason="WRONG_VERSION_NUMBER")):
            return f"{exc.host}:{exc.port} does not speak TLS: its address may be one of http, not https"
        case aiohttp.ClientConnectorError():
            return str(exc)
        case aiohttp.ConnectionTimeoutError():
            # aiohttp names the whole address, whose path may be a secret
            return f"no connection within {CONNECT_SECONDS:g} s"
        case aiohttp.ClientPayloadError():
            return "the connection broke in the middle of the answer"
        case aiohttp.ServerDisconnectedError():
            return "the server closed the connection without an answer"
        case aiohttp.ClientResponseError():
            return "the server sent something that is not HTTP"
        case aiohttp.ClientOSError(errno=int() as number):
            return f"the connection broke: {os.strerror(number)}"
        case _:
            return str(exc) or type(exc).__name__


def has_proxy(url: str) -> bool:
    """Whether the environment names a proxy for ``url``."""
    return proxy_of(url) is not None


def proxy_of(url: str) -> str | None:
    """The proxy that the environment names for ``url``; a loopback address never has one."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    # with its port too, which NO_PROXY may name
    named = (host, parts.netloc.rpartition("@")[2])
    if is_loopback(host) or any(map(proxy_bypass, named)):
        return None
    proxies = getproxies()
    # as curl and httpx read them; SOCKS is not spoken here
    every = proxies.get("all", "")
    proxy = proxies.get(parts.scheme) or (every if not every.startswith("socks") else "")
    return f"http://{proxy}" if proxy and "://" not in proxy else proxy or None


def retry_after(headers: Mapping[str, str]) -> float:
    """Seconds that an answer asks to wait; 0 if it does not, or gives a date."""
    try:
        seconds = float(headers.get("retry-after", 0))
    except ValueError:
        return 0.0
    return seconds if 0 <= seconds < float("inf") else 0.0


def is_loopback(host: str) -> bool:
    """Whether ``host``, a name or an address without brackets, can only mean this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        # any other name may resolve to anything, now or later
        return host.lower().removesuffix(".") == "localhost"
