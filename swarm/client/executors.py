"""Thread pools for episodes: one that does not run ahead of its workers, and one that hands in results as it goes.

Invariant: at most so many calls are pending as was said, and of every call submitted the outcome is handed out exactly
once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from typing import Any, Generic, ParamSpec, Self, TypeVar

from swarm.client.episodes import attempts_of, is_last
from swarm.client.wire import RetryPolicy

P = ParamSpec("P")
T = TypeVar("T")


class BoundedThreadPoolExecutor(Executor):
    """A thread pool whose :meth:`submit` blocks while ``max_pending`` calls are not done yet.

    Args:
        max_workers: threads.
        max_pending: calls submitted and not done, those that run included; default ``max_workers``.
    """

    def __init__(self, max_workers: int, max_pending: int | None = None) -> None:
        self._pool = ThreadPoolExecutor(max_workers, thread_name_prefix="episodes")
        self._max_pending = max_workers if max_pending is None else max_pending
        if self._max_pending < 1:
            raise ValueError("max_pending must be at least 1, or nothing could ever be submitted")
        self._pending = 0
        self._closed = False
        self._free = threading.Condition()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run ``fn`` in a thread, once there is room.

        Raises:
            RuntimeError: the executor was shut down, maybe while this waited.
        """
        with self._free:
            self._free.wait_for(lambda: self._closed or self._pending < self._max_pending)
            if self._closed:
                raise RuntimeError("cannot submit after shutdown")
            self._pending += 1
        try:
            future = self._pool.submit(fn, *args, **kwargs)
        except BaseException:
            self._release()
            raise
        future.add_done_callback(self._release)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more; submitters that wait are told."""
        with self._free:
            self._closed = True
            self._free.notify_all()
        self._pool.shutdown(wait, cancel_futures=cancel_futures)

    def _release(self, _: Any = None) -> None:
        with self._free:
            self._pending -= 1
            self._free.notify()


class PeriodicDrainThreadPoolExecutor(Generic[T]):
    """A thread pool that after every ``workers`` submissions waits for all that run and hands their outcomes in.

    Args:
        workers: submissions between two drains.
        max_parallel: threads; default ``workers``.
        auto_retry: ``True`` tries a call up to three times, a number that many times, ``False`` once.
    """

    def __init__(self, workers: int, max_parallel: int | None = None, auto_retry: bool | int = True) -> None:
        if workers < 1:
            raise ValueError("workers must be at least 1")
        self._workers = workers
        self._attempts = attempts_of(auto_retry)
        self._pool = ThreadPoolExecutor(max_parallel or workers, thread_name_prefix="episodes")
        self._stopping = threading.Event()
        self._running: list[Future[T]] = []

    def submit_with_periodic_drain(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> list[Future[T]]:
        """Run ``fn`` in a thread. Returns what :meth:`drain` would, if it is time for that, else an empty list."""
        self.submit(fn, *args, **kwargs)
        return self.drain() if len(self._running) >= self._workers else []

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run ``fn`` in a thread; its outcome is part of the next drain."""

        def work() -> T:
            for attempt in range(1, self._attempts + 1):
                try:
                    return fn(*args, **kwargs)
                except Exception as exc:
                    final = is_last(exc, attempt, self._attempts, "a task")
                    if final or self._stopping.wait(RetryPolicy().delay(attempt)):
                        raise
            raise AssertionError("there is at least 1 attempt")

        future = self._pool.submit(work)
        self._running.append(future)
        return future

    def drain(self) -> list[Future[T]]:
        """Wait for all calls that run; returns them, done, in the order of their submission. Each is returned once."""
        wait(self._running)
        done, self._running = self._running, []
        return done

    def shutdown(self) -> None:
        """Retry nothing any more, wait for what runs, and end the threads."""
        self._stopping.set()
        self._pool.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
