"""Run a function over many tasks, in threads or on an event loop, and which episodes each run has left open.

Invariant: a run that fails or forgets leaves no episode behind, and no task is tried more often than its cap.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Generator, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from swarm.client.policy import RetryPolicy
from swarm.client.retrying import with_retries, with_retries_async
from swarm.client.wire import EpisodeEndpoint

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Run:
    """One run of user code: what tells it to end, and the episodes it has begun and not ended."""

    stopping: threading.Event | None = None
    episodes: set[str] = field(default_factory=set[str])


class OpenEpisodes:
    """Episodes that have been begun and not ended, per run of user code. Thread-safe: each run has its own set."""

    def __init__(self) -> None:
        self._current: ContextVar[Run | None] = ContextVar("open_episodes", default=None)

    def add(self, episodes: Iterable[EpisodeEndpoint]) -> None:
        """Note begun episodes; nothing to do outside a run."""
        if (current := self._current.get()) is not None:
            current.episodes.update(one.episode_uuid for one in episodes)

    def discard(self, episode_uuids: Iterable[str]) -> None:
        """Note episodes that are over."""
        if (current := self._current.get()) is not None:
            current.episodes.difference_update(episode_uuids)

    @property
    def stopping(self) -> threading.Event | None:
        """Set when the run that this thread works for is to end; ``None`` outside a run."""
        current = self._current.get()
        return None if current is None else current.stopping

    @contextmanager
    def run(self, stopping: threading.Event | None = None) -> Generator[Run, None, None]:
        """What is begun inside the block, in this thread or task, belongs to this run."""
        current = Run(stopping)
        token = self._current.set(current)
        try:
            yield current
        finally:
            self._current.reset(token)


class Sweep(Generic[ItemT, ResultT]):
    """One pass of ``func`` over ``items`` in at most ``max_workers`` threads, reading the items as it goes.

    ``stopping`` is set when the pass ends early: ``func`` should not begin anything then.
    """

    def __init__(
        self,
        items: Iterable[ItemT],
        func: Callable[[ItemT], ResultT],
        attempts: int,
        policy: RetryPolicy,
        stopping: threading.Event,
    ) -> None:
        self._items = enumerate(items)
        self._func = func
        self._attempts = attempts
        self._policy = policy
        self._lock = threading.Lock()
        self._stopping = stopping
        self._outcomes = _Outcomes[ResultT]()

    def run(self, max_workers: int) -> list[ResultT | None]:
        """Results in the order of the items, ``None`` where an item failed for good (logged).

        Raises:
            ExceptionGroup: every item failed.
        """
        with ThreadPoolExecutor(max_workers, thread_name_prefix="episodes") as pool:
            workers = [pool.submit(self._work) for _ in range(max_workers)]
            try:
                wait(workers, return_when=FIRST_EXCEPTION)
            finally:
                # Ctrl-C, or the items' own iterator failed: what runs may finish, nothing new starts
                self._stopping.set()
        for worker in workers:
            worker.result()
        return self._outcomes.in_order()

    def _next(self) -> tuple[int, ItemT] | None:
        with self._lock:
            return None if self._stopping.is_set() else next(self._items, None)

    def _work(self) -> None:
        while (entry := self._next()) is not None:
            index, item = entry
            try:
                self._outcomes.results[index] = with_retries(
                    lambda item=item: self._func(item), self._attempts, self._policy, self._stopping, f"task {index}"
                )
            except Exception as exc:
                self._outcomes.errors[index] = exc


async def sweep_async(
    items: Iterable[ItemT],
    func: Callable[[ItemT], Awaitable[ResultT]],
    max_workers: int,
    attempts: int,
    policy: RetryPolicy,
) -> list[ResultT | None]:
    """The same on an event loop, with at most ``max_workers`` at once; cancelled, it cancels what runs."""
    outcomes = _Outcomes[ResultT]()
    free = asyncio.Semaphore(max_workers)

    async def work(index: int, item: ItemT) -> None:
        try:
            outcomes.results[index] = await with_retries_async(lambda: func(item), attempts, policy, f"task {index}")
        except Exception as exc:
            outcomes.errors[index] = exc
        finally:
            free.release()

    async with asyncio.TaskGroup() as group:
        # the next item is read when there is room for it: they may be without end
        for index, item in enumerate(items):
            await free.acquire()
            group.create_task(work(index, item))
    return outcomes.in_order()


class _Outcomes(Generic[ResultT]):
    def __init__(self) -> None:
        self.results: dict[int, ResultT] = {}
        self.errors: dict[int, Exception] = {}

    def in_order(self) -> list[ResultT | None]:
        if self.errors and not self.results:
            raise ExceptionGroup(f"all {len(self.errors)} tasks failed", list(self.errors.values()))
        return [self.results.get(index) for index in range(len(self.results) + len(self.errors))]
