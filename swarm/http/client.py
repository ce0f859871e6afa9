"""The port through which our servers send requests: pooled connections, whole answers or live ones.

Invariant: whatever the network does comes out as one :class:`ConnectionBrokenError`, which says whether anything was
sent; an answer that is not read to its end takes its connection with it, and so ends the call at the other side.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

#: Seconds that a connection may take to be made.
CONNECT_SECONDS = 5.0


class ConnectionBrokenError(Exception):
    """No answer, or half of one; ``unsent`` tells that the server has certainly not read the request."""

    def __init__(self, message: str, *, unsent: bool) -> None:
        super().__init__(message)
        self.unsent = unsent


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer; header names in lower case are found."""

    status: int
    headers: Mapping[str, str]
    content: bytes


class LiveAnswer(Protocol):
    """An answer whose body is still coming; headers as of :class:`Answer`."""

    status: int
    headers: Mapping[str, str]

    async def read(self) -> bytes:
        """The whole body.

        Raises:
            ConnectionBrokenError: it breaks off.
        """
        ...

    def parts(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises as :meth:`read`."""
        ...


class HttpClient(ABC):
    """A pool of connections; :meth:`close` it. Deadlines are the caller's: an answer is waited for for ever."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connections; calls under way break."""

    @abstractmethod
    def posted(
        self, url: str, content: bytes | None, headers: Mapping[str, str], *, method: str = "POST"
    ) -> AbstractAsyncContextManager[LiveAnswer]:
        """The answer from its headers on.

        Raises:
            ConnectionBrokenError: there is none, or it breaks off while it is read.
        """

    async def post(self, url: str, content: bytes, headers: Mapping[str, str]) -> Answer:
        """The whole answer, whatever its status.

        Raises:
            ConnectionBrokenError: there is none.
        """
        return await self.request("POST", url, content, headers)

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
        try:
            async with asyncio.timeout(seconds):
                return await self.request("GET", url, None, {})
        except TimeoutError as exc:
            raise ConnectionBrokenError(f"no answer within {seconds:g} s", unsent=False) from exc
