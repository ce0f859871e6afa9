"""Run a function over many tasks in threads, and which episodes each run has left open.

Invariant: a run that fails or forgets leaves no episode behind, and no task is tried more often than its cap.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from swarm.client.policy import RetryPolicy
from swarm.errors import AuthenticationError, ConfigError

logger = logging.getLogger(__name__)

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

#: How often ``auto_retry=True`` tries one task.
DEFAULT_ATTEMPTS = 3
#: Repeating cannot help against these.
_FINAL = (ConfigError, AuthenticationError)


@dataclass(frozen=True)
class _Run:
    stopping: threading.Event
    episodes: set[str] = field(default_factory=set[str])


class OpenEpisodes:
    """Episodes that have been begun and not ended, per run of user code. Thread-safe: each run has its own set."""

    def __init__(self) -> None:
        self._current: ContextVar[_Run | None] = ContextVar("open_episodes", default=None)

    def add(self, episode_uuid: str) -> None:
        """Note a begun episode; nothing to do outside a run."""
        if (current := self._current.get()) is not None:
            current.episodes.add(episode_uuid)

    def discard(self, episode_uuid: str) -> None:
        """Note an episode that is over."""
        if (current := self._current.get()) is not None:
            current.episodes.discard(episode_uuid)

    @property
    def stopping(self) -> threading.Event | None:
        """Set when the run that this thread works for is to end; ``None`` outside a run."""
        current = self._current.get()
        return None if current is None else current.stopping

    @contextmanager
    def run(self, abort: Callable[[str], None], stopping: threading.Event) -> Generator[None, None, None]:
        """Call ``abort`` for each episode that is still open when the block is left, however it is left."""
        current = _Run(stopping)
        token = self._current.set(current)
        try:
            yield
        finally:
            self._current.reset(token)
            for episode_uuid in current.episodes:
                abort(episode_uuid)


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
        self._results: dict[int, ResultT] = {}
        self._errors: dict[int, Exception] = {}

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
        if self._errors and not self._results:
            raise ExceptionGroup(f"all {len(self._errors)} tasks failed", list(self._errors.values()))
        return [self._results.get(index) for index in range(len(self._results) + len(self._errors))]

    def _next(self) -> tuple[int, ItemT] | None:
        with self._lock:
            return None if self._stopping.is_set() else next(self._items, None)

    def _work(self) -> None:
        while (entry := self._next()) is not None:
            index, item = entry
            for attempt in range(1, self._attempts + 1):
                try:
                    self._results[index] = self._func(item)
                    break
                except Exception as exc:
                    if attempt == self._attempts or isinstance(exc, _FINAL) or self._stopping.is_set():
                        logger.error("task %d failed for good after %d tries", index, attempt, exc_info=exc)
                        self._errors[index] = exc
                        break
                    logger.warning("task %d failed (try %d of %d): %s", index, attempt, self._attempts, exc)
                    self._stopping.wait(self._policy.delay(attempt))
