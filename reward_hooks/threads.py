"""Call blocking user code in threads that can be given up.

Invariant: at most ``limit`` threads exist, abandoned ones included, and none of them keeps the process from ending.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context, copy_context
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from swarm.errors import HookError

#: Seconds after which a thread without work ends; hooks of an older configuration leave none behind for longer.
IDLE_SECONDS = 10.0


@dataclass(frozen=True)
class Done:
    """How a call ended: ``error`` is set, or ``value`` is what it returned."""

    value: Any = None
    error: BaseException | None = None


class HookThreads:
    """Daemon threads, each with one call at a time; one that is done takes the next call, for to start a thread takes
    longer than most hooks do.

    A Python thread cannot be killed: a call past its deadline is abandoned, and its thread keeps its place until the
    call returns by itself. Once ``limit`` calls hang, further calls fail at once instead of piling up.
    (A ``ThreadPoolExecutor`` would join its hung threads when the interpreter ends.)

    Of one event loop at a time.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._places = asyncio.Semaphore(limit)
        self._abandoned = 0
        #: without a call, the one that was used last at the end
        self._idle: list[_Worker] = []

    async def call(self, function: Callable[..., Any], *args: Any, timeout: float) -> Done:  # noqa: ASYNC109
        """Run ``function(*args)`` in a thread and say how it ended; whatever it raises is a value here.

        Raises:
            TimeoutError: it is still running after ``timeout`` seconds, waiting for a thread included.
            HookError: every thread is held by a call that hangs (``hook_busy``).
        """
        if self._abandoned >= self._limit:
            raise HookError(
                f"all {self._limit} hook threads are held by calls that never returned; restart the gateway and put a "
                "timeout into the hook",
                code="hook_busy",
            )
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[Done] = loop.create_future()
        started = finished = abandoned = False

        def finish(worker: _Worker, done: Done) -> None:
            nonlocal finished
            finished = True
            if abandoned:
                self._abandoned -= 1
            self._idle.append(worker)
            self._places.release()
            if not outcome.done():
                outcome.set_result(done)

        try:
            async with asyncio.timeout(timeout):
                await self._places.acquire()
                try:
                    worker = self._worker(loop)
                except RuntimeError as exc:  # the machine has no thread to give
                    self._places.release()
                    raise HookError(f"cannot start a hook thread: {exc}", code="hook_busy") from exc
                started = True
                worker.calls.put(_Call(copy_context(), function, args, finish))
                return await outcome
        except TimeoutError:
            if started and not finished:
                abandoned = True
                self._abandoned += 1
            raise

    def _worker(self, loop: asyncio.AbstractEventLoop) -> _Worker:
        """One without a call, or a new one; raises :class:`RuntimeError` where there can be none."""
        while self._idle:
            worker = self._idle.pop()
            if worker.loop is loop:
                return worker
            worker.calls.put(None)
        worker = _Worker(loop, self._tired)
        Thread(target=worker.run, name="reward-hook", daemon=True).start()
        return worker

    def _tired(self, worker: _Worker) -> None:
        """It has waited long; unless it got a call meanwhile, it ends."""
        if worker in self._idle:
            self._idle.remove(worker)
            worker.calls.put(None)


@dataclass(frozen=True, slots=True)
class _Call:
    context: Context
    function: Callable[..., Any]
    args: tuple[Any, ...]
    finish: Callable[[_Worker, Done], None]


class _Worker:
    """One thread's work: what comes through ``calls`` until that is ``None``, or until ``loop`` is closed.

    Args:
        loop: is told how calls end.
        tired: called there after each :data:`IDLE_SECONDS` without a call.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, tired: Callable[[_Worker], None]) -> None:
        self.loop = loop
        self.calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._tired = tired

    def run(self) -> None:
        try:
            while True:
                try:
                    call = self.calls.get(timeout=IDLE_SECONDS)
                except Empty:
                    self.loop.call_soon_threadsafe(self._tired, self)
                    continue
                if call is None:
                    return
                self.loop.call_soon_threadsafe(call.finish, self, _done(call))
                # what it held must not stay until the next one comes
                del call
        except RuntimeError:
            # the loop is closed: nobody waits for what we do
            return


def _done(call: _Call) -> Done:
    try:
        return Done(value=call.context.run(call.function, *call.args))
    except BaseException as exc:  # SystemExit of a hook must not pass either
        return Done(error=exc)
