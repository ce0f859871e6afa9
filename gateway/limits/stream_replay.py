"""One stream, read by any number of followers, each from its beginning.

Invariant: every follower gets every part, in order; no more than :data:`KEPT_PARTS` are held for the slowest of them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

from swarm.errors import UnavailableError

PartT = TypeVar("PartT")

#: Later than this nobody can begin to follow; an SDK asks again only before its answer has begun.
KEPT_PARTS = 512


class Followed(Generic[PartT]):
    """Reads a stream ahead of its followers, no further than they can be told."""

    def __init__(self) -> None:
        self._parts: deque[PartT] = deque()
        self._gone = 0
        self._followers: list[Follower[PartT]] = []
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self.over = False
        self.error: Exception | None = None

    @property
    def open(self) -> bool:
        """Whether one more may follow: all parts so far are still there."""
        return not self._gone

    async def read(self, stream: AsyncIterator[PartT]) -> None:
        """Read ``stream`` to its end; what it raises, followers raise after its last part."""
        try:
            async for part in stream:
                self._parts.append(part)
                self._tell()
                while not self._trimmed():
                    self._room.clear()
                    await self._room.wait()
        except asyncio.CancelledError:
            self.error = UnavailableError("the answer is given up: the gateway stops")
            raise
        except Exception as exc:
            self.error = exc
        finally:
            self.over = True
            self._tell()

    def follow(self) -> Follower[PartT]:
        """One more follower, from the first part on."""
        follower = Follower(self)
        self._followers.append(follower)
        return follower

    def leave(self, follower: Follower[PartT]) -> None:
        """``follower`` reads no further."""
        if follower in self._followers:
            self._followers.remove(follower)
            self._room.set()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _trimmed(self) -> bool:
        """Whether there is room for one more part, after dropping those that all have read."""
        if len(self._parts) < KEPT_PARTS:
            return True
        # without followers the beginning is kept: somebody may yet come back for it
        slowest = min((follower.position for follower in self._followers), default=self._gone)
        while self._gone < slowest:
            self._parts.popleft()
            self._gone += 1
        return len(self._parts) < KEPT_PARTS

    async def part(self, position: int) -> PartT:
        """The part at ``position``, once it is there; raises :class:`StopAsyncIteration` behind the last."""
        while position - self._gone >= len(self._parts):
            if self.over:
                if self.error is not None:
                    raise self.error
                raise StopAsyncIteration
            await self._news.wait()
        if len(self._parts) >= KEPT_PARTS:
            self._room.set()
        return self._parts[position - self._gone]


class Follower(AsyncIterator[PartT]):
    """One reader of a :class:`Followed`."""

    def __init__(self, followed: Followed[PartT]) -> None:
        self._followed = followed
        self.position = 0

    async def __anext__(self) -> PartT:
        part = await self._followed.part(self.position)
        self.position += 1
        return part

    def leave(self) -> None:
        """Read no further."""
        self._followed.leave(self)
