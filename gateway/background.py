"""Work that outlives its request: submissions and clean-up.

Invariant: no task is lost in silence; all are awaited at shutdown, up to a deadline, and failures are logged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Self, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Background:
    """A scope of tasks; leaving it waits up to ``grace_seconds`` for them and then cancels the rest."""

    def __init__(self, grace_seconds: float) -> None:
        self._grace = grace_seconds
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
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
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s failed", task.get_name(), exc_info=error)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.settle(self._grace)
        late = set(self._tasks)
        for task in late:
            logger.error("%s was still under way at shutdown and is given up", task.get_name())
            task.cancel()
        if late:
            await asyncio.wait(late)
