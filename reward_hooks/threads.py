"""Call blocking user code in threads that can be given up.

Invariant: at most ``limit`` threads exist, abandoned ones included, and none of them keeps the process from ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

from swarm.errors import HookError


@dataclass(frozen=True)
class Done:
    """How a call ended: ``error`` is set, or ``value`` is what it returned."""

    value: Any = None
    error: BaseException | None = None


class HookThreads:
    """One daemon thread per call.

    A Python thread cannot be killed: a call past its deadline is abandoned, and its thread keeps its place until the
    call returns by itself. Once ``limit`` calls hang, further calls fail at once instead of piling up.
    (A ``ThreadPoolExecutor`` would join its hung threads when the interpreter ends.)
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._places = asyncio.Semaphore(limit)
        self._abandoned = 0

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
        context = copy_context()
        started = finished = abandoned = False

        def finish(done: Done) -> None:
            nonlocal finished
            finished = True
            if abandoned:
                self._abandoned -= 1
            self._places.release()
            if not outcome.done():
                outcome.set_result(done)

        def work() -> None:
            try:
                done = Done(value=context.run(function, *args))
            except BaseException as exc:  # SystemExit of a hook must not pass either
                done = Done(error=exc)
            # a call that outlives the server finds its loop closed
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(finish, done)

        try:
            async with asyncio.timeout(timeout):
                await self._places.acquire()
                try:
                    threading.Thread(target=work, name="reward-hook", daemon=True).start()
                except RuntimeError as exc:  # the machine has no thread to give
                    self._places.release()
                    raise HookError(f"cannot start a hook thread: {exc}", code="hook_busy") from exc
                started = True
                return await outcome
        except TimeoutError:
            if started and not finished:
                abandoned = True
                self._abandoned += 1
            raise
