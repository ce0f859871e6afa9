"""Small pieces that servers and hooks share: structured concurrency, and a memory of the latest.

Invariant: no coroutine given to a function here outlives the call, no error given to an :class:`Interruptible` leaves
another block than its own, and no task of a :class:`Background` is lost in silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import random
import signal
import sys
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")

logger = logging.getLogger(__name__)


class Latest(OrderedDict[K, V]):
    """The latest ``most`` entries, the oldest first: whichever is set becomes the newest, and may push out the
    oldest."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)


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


def backoff(failures: int, first: float, most: float) -> float:
    """Seconds to wait after the ``failures``-th failure in a row (1 for the first): uniform in [d/2, d] with
    d = min(``most``, ``first`` * 2**(failures - 1)), so that those who failed together do not return together."""
    # a power of many failures is no float any more
    return min(most, first * 2 ** min(max(0, failures - 1), 100)) * random.uniform(0.5, 1.0)


@contextlib.contextmanager
def on_signals(act: Callable[[], None], *numbers: signal.Signals) -> Generator[None]:
    """Call ``act`` at each signal of ``numbers``, in a thread; for the main thread.

    A handler runs in the main thread between two of its instructions. If it sets an event for which the main thread
    waits, both may want the event's lock, and the process waits for ever.
    """
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()  # the one queue that a handler may fill

    def deliver() -> None:
        while signals.get():
            act()

    thread = threading.Thread(target=deliver, name="signals", daemon=True)
    thread.start()
    previous = {number: signal.signal(number, lambda number, _: signals.put(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        signals.put(0)
        thread.join()


@contextlib.contextmanager
def ends_by_signals() -> Generator[None]:
    """A SIGTERM, or a terminal that is closed, ends the block as an exception does; what is ignored (``nohup``) stays
    so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, lambda number, _: sys.exit(128 + number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def kill_group(pid: int) -> None:
    """SIGKILL for all processes of the group ``pid``; none for one that has ended, to which macOS permits no signal."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def hangups() -> tuple[signal.Signals, ...]:
    """SIGHUP where it is a service's word for reading anew; of a terminal it says that this is closed, which ends
    everything."""
    return () if sys.stdin is not None and sys.stdin.isatty() else (signal.SIGHUP,)


class Once:
    """A one-shot event with synchronous callbacks, since a task that waits would cost as much as a small request."""

    __slots__ = ("_callbacks", "happened")

    def __init__(self) -> None:
        self.happened = False
        self._callbacks: dict[Callable[[], None], None] = {}

    def happen(self) -> None:
        self.happened = True
        while self._callbacks:
            tell = next(iter(self._callbacks))
            del self._callbacks[tell]
            try:
                tell()
            except Exception:
                # the others are not to suffer for one of them
                logger.exception("something that happened could not be told")

    def tell(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when it happens, or at once if it has."""
        if self.happened:
            callback()
        else:
            self._callbacks[callback] = None

    def forget(self, callback: Callable[[], None]) -> None:
        """Do not call ``callback`` any more."""
        self._callbacks.pop(callback, None)


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


async def end_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancel ``tasks`` and wait until they are over, whatever they end with."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def first_of(*works: Coroutine[Any, Any, T]) -> T:
    """Run ``works`` together; the first to end decides the result or the error, and the others are cancelled."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        # several may be done in one turn of the loop: the order given is their precedence
        return next(task for task in tasks if task in done).result()
    finally:
        await end_tasks(*tasks)


async def all_of(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of ``works``, which run together, in their order; the first error cancels the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await end_tasks(*tasks)


class ClientGoneError(Exception):
    """The caller closed its connection; nobody reads an answer any more. A server answers it with a 499."""


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


class Background:
    """A scope of tasks that outlive what began them, such as submissions and clean-up.

    Args:
        grace_seconds: leaving the scope waits so long for them and then cancels the rest.
        quiet: nothing is logged of tasks that fail or are cancelled.
    """

    def __init__(self, grace_seconds: float, quiet: bool = False) -> None:
        self._grace = grace_seconds
        self._quiet = quiet
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T], name: str | None = None) -> asyncio.Task[T]:
        """Run ``work`` as a task; cancelling the caller does not touch it."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def __len__(self) -> int:
        return len(self._tasks)

    async def settle(self, seconds: float) -> None:
        """Return once no task runs, including tasks begun meanwhile, at the latest after ``seconds``."""
        deadline = asyncio.get_running_loop().time() + seconds
        while self._tasks and (left := deadline - asyncio.get_running_loop().time()) > 0:
            await asyncio.wait(set(self._tasks), timeout=left)

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._quiet:
            logger.error("%s failed", task.get_name(), exc_info=error)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.settle(self._grace)
        late = set(self._tasks)
        for task in () if self._quiet else late:
            logger.error("%s was still under way at shutdown and is given up", task.get_name())
        await end_tasks(*late)
