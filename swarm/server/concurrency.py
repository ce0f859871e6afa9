"""Small pieces of structured concurrency that the server's parts share.

Invariant: no coroutine given to a function here outlives the call.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Signal:
    """A broadcast without memory: :meth:`notify` wakes everyone who waits now."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self) -> None:
        await self._event.wait()

    async def until(self, condition: Callable[[], bool], within: float | None = None) -> bool:
        """Wait until ``condition`` holds, looking at each notification; whether it did ``within`` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                while not condition():
                    await self.wait()
        return condition()


async def first_of(*works: Coroutine[Any, Any, T]) -> T:
    """Run ``works`` together; the first to end decides the result or the error, and the others are cancelled."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        # several may be done in one turn of the loop: the order given is their precedence
        return next(task for task in tasks if task in done).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class ClientGoneError(Exception):
    """The caller closed its connection; nobody reads an answer any more."""


async def until_gone(receive: Callable[[], Awaitable[Any]], work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the caller disconnects.

    ``receive`` is the ASGI receive of a request whose body has been read in full.

    Raises:
        ClientGoneError: the caller is gone.
    """

    async def watch() -> T:
        while (await receive())["type"] != "http.disconnect":
            pass
        raise ClientGoneError

    return await first_of(work, watch())
