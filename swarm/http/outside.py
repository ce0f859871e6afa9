"""The way to servers of any making, over aiohttp: proxies of the environment, compressed answers, any address.

Invariant: as of :mod:`swarm.http.client`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp

from swarm.http.client import CONNECT_SECONDS, ConnectionBrokenError, HttpClient


class OutsideClient(HttpClient):
    """See :class:`~swarm.http.client.HttpClient`.

    Args:
        keepalive: seconds an idle connection is kept; less than the other side keeps it, for a connection that breaks
            under a request cannot be told from a server that died of it.
    """

    def __init__(self, *, keepalive: float) -> None:
        self._keepalive = keepalive
        self._opened: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened.close()

    @asynccontextmanager
    async def posted(
        self, url: str, content: bytes | None, headers: Mapping[str, str], *, method: str = "POST"
    ) -> AsyncGenerator[_Live]:
        try:
            async with AsyncExitStack() as stack:
                asking = self._session.request(method, url, data=content, headers=headers, allow_redirects=False)
                try:
                    response = await stack.enter_async_context(asking)
                except ValueError as exc:
                    # a host or a header that cannot be; some are aiohttp's own errors as well
                    raise ConnectionBrokenError(f"no request can be made to {url!r}: {exc}", unsent=True) from exc
                except (AssertionError, RuntimeError) as exc:
                    # which of them a closed session raises depends on how far the call was
                    if not self._session.closed:
                        raise
                    raise ConnectionBrokenError("the client was closed", unsent=False) from exc
                yield _Live(response, self._session)
        except aiohttp.ClientError as exc:
            raise _broken(exc) from exc

    @property
    def _session(self) -> aiohttp.ClientSession:
        # not in __init__: a session belongs to the event loop that runs when it is made
        if self._opened is None:
            self._opened = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=self._keepalive),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=True,
            )
        return self._opened


class _Live:
    def __init__(self, response: aiohttp.ClientResponse, session: aiohttp.ClientSession) -> None:
        self._response = response
        self._session = session
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers

    async def read(self) -> bytes:
        try:
            content = await self._response.read()
        except aiohttp.ClientError as exc:
            raise _broken(exc) from exc
        self._check()
        return content

    async def parts(self) -> AsyncIterator[bytes]:
        try:
            async for part in self._response.content.iter_any():
                yield part
        except aiohttp.ClientError as exc:
            raise _broken(exc) from exc
        self._check()

    def _check(self) -> None:
        # an answer of no told length ends with its connection, and aiohttp does not tell our end from the server's
        if self._session.closed:
            raise ConnectionBrokenError("the client was closed", unsent=False)


def _broken(exc: Exception) -> ConnectionBrokenError:
    unsent = isinstance(exc, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
    return ConnectionBrokenError(f"{type(exc).__name__}: {exc}", unsent=unsent)
