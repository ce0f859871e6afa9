"""The way out: pooled connections to servers that are posted to, whole answers or live ones.

Invariant: whatever the network does comes out as one :class:`ConnectionBrokenError`, which says whether anything was
sent; an answer that is not read to its end takes its connection with it, and so ends the call at the other side.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp

_CONNECT_SECONDS = 5.0


class ConnectionBrokenError(Exception):
    """No answer, or half of one; ``unsent`` tells that the server has certainly not read the request."""

    def __init__(self, message: str, *, unsent: bool) -> None:
        super().__init__(message)
        self.unsent = unsent


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer; header names are found in any case."""

    status: int
    headers: Mapping[str, str]
    content: bytes


class LiveAnswer:
    """An answer whose body is still coming."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers

    async def read(self) -> bytes:
        """The whole body.

        Raises:
            ConnectionBrokenError: it breaks off.
        """
        try:
            return await self._response.read()
        except aiohttp.ClientError as exc:
            raise _broken(exc) from exc

    async def parts(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises as :meth:`read`."""
        try:
            async for part in self._response.content.iter_any():
                yield part
        except aiohttp.ClientError as exc:
            raise _broken(exc) from exc


class HttpClient:
    """A pool of connections; :meth:`close` it. Deadlines are the caller's: no answer is waited for less than for ever.

    Args:
        keepalive: seconds an idle connection is kept; less than the other side keeps it, for a connection that breaks
            under a request cannot be told from a server that died of it.
        trust_env: whether proxies of the environment lead there.
        tls: for ``https`` addresses; default: the system's certificates.
    """

    def __init__(self, *, keepalive: float, trust_env: bool = False, tls: ssl.SSLContext | None = None) -> None:
        self._keepalive = keepalive
        self._trust_env = trust_env
        self._tls = tls
        self._opened: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close the connections; calls under way break."""
        if self._opened is not None:
            await self._opened.close()

    async def post(self, url: str, content: bytes, headers: Mapping[str, str]) -> Answer:
        """The whole answer, whatever its status.

        Raises:
            ConnectionBrokenError: there is none.
        """
        return await self.request("POST", url, content, headers)

    @asynccontextmanager
    async def posted(
        self, url: str, content: bytes | None, headers: Mapping[str, str], *, method: str = "POST"
    ) -> AsyncGenerator[LiveAnswer]:
        """The answer from its headers on.

        Raises:
            ConnectionBrokenError: there is none, or it breaks off while it is read.
        """
        try:
            async with self._session.request(
                method, url, data=content, headers=headers, allow_redirects=False
            ) as response:
                yield LiveAnswer(response)
        except aiohttp.ClientError as exc:
            raise _broken(exc) from exc

    async def request(self, method: str, url: str, content: bytes | None, headers: Mapping[str, str]) -> Answer:
        """The whole answer to another method.

        Raises:
            ConnectionBrokenError: there is none.
        """
        async with self.posted(url, content, headers, method=method) as answer:
            return Answer(answer.status, answer.headers, await answer.read())

    async def get(self, url: str, seconds: float) -> Answer:
        """The same for a short question that is given up after ``seconds``.

        Raises:
            ConnectionBrokenError: no answer in time.
        """
        limit = aiohttp.ClientTimeout(total=seconds)
        try:
            async with self._session.get(url, timeout=limit, allow_redirects=False) as response:
                return Answer(response.status, response.headers, await response.read())
        except (aiohttp.ClientError, TimeoutError) as exc:
            raise _broken(exc) from exc

    @property
    def _session(self) -> aiohttp.ClientSession:
        # not in __init__: a session belongs to the event loop that runs when it is made
        if self._opened is None:
            connector = aiohttp.TCPConnector(
                limit=0, keepalive_timeout=self._keepalive, ssl=True if self._tls is None else self._tls
            )
            self._opened = aiohttp.ClientSession(
                connector=connector,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=self._trust_env,
            )
        return self._opened


def _broken(exc: Exception) -> ConnectionBrokenError:
    unsent = isinstance(exc, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError | aiohttp.InvalidURL)
    return ConnectionBrokenError(f"{type(exc).__name__}: {exc}", unsent=unsent)
