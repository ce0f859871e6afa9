"""Small pieces of structured concurrency that the server's parts share.

Invariant: no coroutine given to a function here outlives the call, and no error given to an :class:`Interruptible`
leaves another block than its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)


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


class Once:
    """Something that happens at most once, and whoever is to be told then; a task that waits for it would cost as much
    as a small request."""

    __slots__ = ("_told", "happened")

    def __init__(self) -> None:
        self.happened = False
        self._told: dict[Callable[[], None], None] = {}

    def happen(self) -> None:
        self.happened = True
        while self._told:
            tell = next(iter(self._told))
            del self._told[tell]
            try:
                tell()
            except Exception:
                # the others are not to suffer for one of them
                logger.exception("something that happened could not be told")

    def tell(self, told: Callable[[], None]) -> None:
        """Call ``told`` when it happens, or at once if it has."""
        if self.happened:
            told()
        else:
            self._told[told] = None

    def forget(self, told: Callable[[], None]) -> None:
        """Do not call ``told`` any more."""
        self._told.pop(told, None)


class Interruptible:
    """A block of the current task that ends with an error once somebody else says so; for a ``with`` statement.

    Like :func:`asyncio.timeout`, it cancels the task, and turns the cancellation into the error at the end of the
    block; what the block awaits cleans up meanwhile.
    """

    def __init__(self) -> None:
        self._task: asyncio.Task[Any] | None = None
        self._cancelled_before = 0
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        assert self._task is not None, "there is nothing to interrupt outside of a task"
        self._cancelled_before = self._task.cancelling()
        return self

    def interrupt(self, error: BaseException) -> None:
        """Let the block end with ``error``; the first one counts, and none does once the block is over."""
        if self._task is None or self._error is not None:
            return
        if asyncio.current_task() is self._task:
            # it would be cancelled at its next wait, though that may come after the block
            asyncio.get_running_loop().call_soon(self.interrupt, error)
            return
        self._error = error
        self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        assert task is not None
        if self._error is not None and task.uncancel() <= self._cancelled_before and kind is asyncio.CancelledError:
            raise self._error from error


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

    with Interruptible() as working:

        async def watch() -> None:
            try:
                while (await receive())["type"] != "http.disconnect":
                    pass
                working.interrupt(ClientGoneError())
            except Exception as exc:
                working.interrupt(exc)

        watching = asyncio.ensure_future(watch())
        try:
            return await work
        finally:
            watching.cancel()
