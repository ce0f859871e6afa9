"""AgentJet's thread pools for episodes, and its retries.

Invariant: a call that fails is tried again, up to a cap; what an attempt began and did not end is aborted; of every
call submitted the outcome is handed out exactly once.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Generic, ParamSpec, Self, TypeVar

from swarm.client import RetryPolicy
from swarm.client.episodes import attempts_of, is_last

P = ParamSpec("P")
T = TypeVar("T")

#: Of the attempt that runs in this thread: ``begun``, episode -> what aborts it; ``interrupted``.
_attempt = threading.local()


def note_begun(episode_uuid: str, abort: Callable[[str], None]) -> None:
    """Note that the attempt in this thread, if there is one, began an episode."""
    if (begun := getattr(_attempt, "begun", None)) is not None:
        begun[episode_uuid] = abort


def note_over(episode_uuid: str) -> None:
    """Note that an episode has ended."""
    if (begun := getattr(_attempt, "begun", None)) is not None:
        begun.pop(episode_uuid, None)


def interrupted() -> threading.Event | None:
    """What is set once the attempt in this thread, if there is one, is to wait for nothing any more."""
    return getattr(_attempt, "interrupted", None)


@contextmanager
def attempt(interrupted: threading.Event | None = None) -> Generator[None]:
    """At the end of the block, abort the episodes that it began in this thread and did not end."""
    before, begun = (getattr(_attempt, "begun", None), getattr(_attempt, "interrupted", None)), {}
    _attempt.begun, _attempt.interrupted = begun, interrupted
    try:
        yield
    finally:
        _attempt.begun, _attempt.interrupted = before
        for episode_uuid, abort in begun.items():
            abort(episode_uuid)


class BoundedThreadPoolExecutor(ThreadPoolExecutor):
    """A thread pool whose :meth:`submit` blocks while ``max_queue_size`` calls are not done yet; an episode that a call
    begins must end in that call, or it is aborted."""

    def __init__(self, max_workers: int, max_queue_size: int = 100) -> None:
        if max_queue_size < 1:
            raise ValueError("max_queue_size must be at least 1, or nothing could ever be submitted")
        super().__init__(max_workers, thread_name_prefix="episodes")
        self._free = threading.Semaphore(max_queue_size)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run ``fn`` in a thread, once there is room.

        Raises:
            RuntimeError: the executor was shut down, maybe while this waited.
        """
        self._free.acquire()
        try:
            future = super().submit(attempt()(fn), *args, **kwargs)
        except BaseException:
            self._free.release()
            raise
        future.add_done_callback(lambda _: self._free.release())
        return future


class PeriodicDrainThreadPoolExecutor(Generic[T]):
    """A thread pool that waits, after every ``workers`` submissions, until all of them are done.

    Args:
        workers: submissions between two drains.
        max_parallel: threads; default ``workers``.
        auto_retry: ``True`` tries a call up to three times, a number that many times, ``False`` once.
        block_first_run: wait for the first call before the second one is taken.
    """

    def __init__(
        self,
        workers: int = 100,
        max_parallel: int | None = None,
        auto_retry: bool | int = True,
        block_first_run: bool = False,
    ) -> None:
        if workers < 1:
            raise ValueError("workers must be at least 1")
        self._workers = workers
        self._attempts = attempts_of(auto_retry)
        self._pool = ThreadPoolExecutor(max_parallel or workers, thread_name_prefix="episodes")
        #: once it is set nothing is tried again, and with the other one no episode is waited for either
        self._stopping, self._interrupted = threading.Event(), threading.Event()
        self._block_next = block_first_run
        self._undrained: list[Future[T]] = []

    def submit_with_periodic_drain(
        self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> tuple[Future[T], list[T]]:
        """Run ``fn`` in a thread; first, if ``workers`` submissions are not drained yet, wait for these.

        Returns:
            The call, and what the calls that were drained returned, in the order of their submission; one that failed
            for good (logged) is left out.
        """
        drained: list[T] = []
        if len(self._undrained) >= self._workers:
            wait(self._undrained)
            drained = [future.result() for future in self._undrained if future.exception() is None]
            self._undrained = []
        future = self.submit(fn, *args, **kwargs)
        self._undrained.append(future)
        return future, drained

    def submit(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run ``fn`` in a thread."""
        future = self._pool.submit(self._tried, functools.partial(fn, *args, **kwargs))
        if self._block_next:
            self._block_next = False
            wait([future])
        return future

    def shutdown(self, wait: bool = True) -> None:
        """End the threads once what was submitted is done; without ``wait`` nothing is tried again meanwhile."""
        try:
            self._pool.shutdown(wait)
        except BaseException:
            # Ctrl-C in the last drain
            self._interrupt()
            raise
        finally:
            self._stopping.set()

    def _interrupt(self) -> None:
        """What runs may finish; what waits for an episode is not to."""
        self._interrupted.set()
        self._stopping.set()
        self._pool.shutdown(cancel_futures=True)

    def _tried(self, call: Callable[[], T]) -> T:
        """What ``call`` returns in one of its tries."""
        for number in range(1, self._attempts + 1):
            try:
                with attempt(self._interrupted):
                    return call()
            except Exception as exc:
                if self._interrupted.is_set() or is_last(exc, number, self._attempts, "an episode"):
                    raise
                if self._stopping.wait(RetryPolicy().delay(number)):
                    raise
        raise AssertionError("there is at least 1 attempt")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.shutdown()
        else:
            self._interrupt()


def retry_with_backoff(
    max_retry: int = 3,
    backoff_fn: Callable[[int], float] | None = None,
    max_retry_attr: str | None = None,
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator that tries a function up to ``max_retry`` times.

    Args:
        max_retry: tries.
        backoff_fn: seconds to wait after so many failures, beginning with 0; default exponential with jitter.
        max_retry_attr: attribute of the first argument that has another number of tries.
    """

    def decorate(fn: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(fn)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            tries = getattr(args[0], max_retry_attr, None) if max_retry_attr and args else None
            attempts = max(1, tries if isinstance(tries, int) and tries > 0 else max_retry)
            for number in range(1, attempts + 1):
                try:
                    return fn(*args, **kwargs)
                except Exception as exc:
                    if is_last(exc, number, attempts, getattr(fn, "__name__", "a function")):
                        raise
                    time.sleep(backoff_fn(number - 1) if backoff_fn else RetryPolicy().delay(number))
            raise AssertionError("there is at least 1 attempt")

        return call

    return decorate
