"""The event loop in a thread on which every :class:`swarm.client.SwarmClient` of a process runs.

Invariant: an interrupted or stopped wait cancels its call, a claim that is granted all the same is not lost, and code
of users never runs on the loop's thread.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from concurrent.futures import Future, wait
from contextlib import suppress
from itertools import islice
from typing import Any, Generic, ParamSpec, TypeVar
from weakref import WeakSet

from anyio import CapacityLimiter, to_thread
from anyio.from_thread import BlockingPortalProvider

from swarm.client.asynchronous import AsyncSwarmClient
from swarm.client.episodes import current_run
from swarm.errors import StateError

P = ParamSpec("P")
T = TypeVar("T")

#: Seconds between two looks whether a wait was interrupted.
_LOOK_SECONDS = 0.5
#: On Windows, Ctrl-C ends no wait for a lock before Python 3.14 (python/cpython#125541).
_LOCKS_HOLD = os.name == "nt"


class BlockingCall(Generic[T]):
    """An asynchronous call that a thread waits for."""

    def __init__(self, here: Connection, work: Coroutine[Any, Any, T]) -> None:
        self._portal = here.portal
        self._task: asyncio.Task[Any] | None = None

        async def run() -> T:
            _loops.add(asyncio.get_running_loop())
            self._task = asyncio.current_task()
            return await work

        if here.pid != os.getpid():
            work.close()
            raise StateError("a process before a fork opened this client: open one of its own")
        try:
            self._future: Future[T] = self._portal.start_task_soon(run)
        except RuntimeError as exc:
            work.close()
            raise StateError(f"this client is closed, or called from its own event loop: {exc}") from exc

    def result(self, interrupted: threading.Event | None = None) -> T:
        """What the call returns or raises. An exception that interrupts the wait (Ctrl-C) cancels the call first, and
        so does ``interrupted`` once it is set.

        Raises:
            CancelledError: it was cancelled in time.
        """
        try:
            while (interrupted is not None or _LOCKS_HOLD) and not self.done(_LOOK_SECONDS):
                if interrupted is not None and interrupted.is_set():
                    self.cancel()
            return self._future.result()
        except BaseException:
            if not self._future.done():
                self.cancel()
                wait([self._future])
            raise

    def done(self, within: float) -> bool:
        """Whether the call is over, waiting for that for ``within`` seconds."""
        return bool(wait([self._future], within).done)

    def cancel(self) -> None:
        """Cancel the call; it may still end with a result."""
        with suppress(RuntimeError):  # the loop has ended, and the call with it
            self._portal.start_task_soon(lambda: self._task and self._task.cancel())


_loops: WeakSet[asyncio.AbstractEventLoop] = WeakSet()


def _runs_elsewhere(*_: object, **__: object) -> None:
    raise RuntimeError("this event loop runs in the process before a fork")


def _say_nothing(*_: object) -> None:
    pass


def _abandon_loops() -> None:
    # at the child's exit Python ends the portal of its parent, which would wait for ever for a loop that nobody runs,
    # and complains of the parent's connections
    for loop in _loops:
        vars(loop)["call_soon_threadsafe"] = _runs_elsewhere
        loop.set_exception_handler(_say_nothing)


if hasattr(os, "register_at_fork"):  # not on Windows, which has no forks
    os.register_at_fork(after_in_child=_abandon_loops)


@functools.cache
def _portals(pid: int) -> BlockingPortalProvider:
    """The event loop that all clients of a process share; a forked child has a loop of its own."""
    return BlockingPortalProvider()


class Connection:
    """The asynchronous client behind one :class:`SwarmClient` in one process."""

    def __init__(self, make: Callable[[], AsyncSwarmClient]) -> None:
        self.pid = os.getpid()
        self.client = make()
        self._provider = _portals(self.pid)
        self.portal = self._provider.__enter__()
        self._closing = threading.Lock()
        self._closed = False

    def close(self) -> None:
        """Close the client, and end the loop if no other client uses it; nothing in a forked child."""
        if self.pid != os.getpid():
            return
        with self._closing:
            if self._closed:
                return
            self._closed = True
        try:
            BlockingCall(self, self.client.close()).result()
        finally:
            self._provider.__exit__(None, None, None)

    def close_soon(self) -> None:
        """:meth:`close` without waiting, for a client that was garbage-collected: maybe by the loop's own thread."""
        threading.Thread(target=self.close, name="swarm-close", daemon=True).start()


def in_thread(func: Callable[P, T], *, abandon: bool = False) -> Callable[P, Coroutine[Any, Any, T]]:
    """``func`` for the event loop: in a thread, where it may block and use the client.

    A cancelled call waits until ``func`` returns, which must not wait for claims then; with ``abandon`` it does not.
    """

    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        def run() -> T:
            try:
                return func(*args, **kwargs)
            except (SystemExit, KeyboardInterrupt, asyncio.CancelledError) as exc:
                # it would end the event loop, or be taken for the end of this call
                raise RuntimeError(f"{exc!r} was raised in a thread of the swarm client") from exc

        # the caller bounds the number of threads
        running = asyncio.ensure_future(to_thread.run_sync(run, abandon_on_cancel=True, limiter=CapacityLimiter(1)))
        try:
            # anyio shields its threads from its own cancellation only
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            if abandon:
                running.cancel()
            else:
                if (user_run := current_run.get()) is not None:
                    user_run.stop()
                await asyncio.wait([running])
                if not running.cancelled():
                    running.exception()  # marks its error as seen
            raise

    return call


async def each_in_thread(items: Iterable[T]) -> AsyncGenerator[T]:
    """``items`` for ``async for``, each read in a thread."""
    entries = await in_thread(iter)(items)
    # a list, as an item may be anything
    take = in_thread(lambda: list(islice(entries, 1)))
    while entry := await take():
        yield entry[0]
