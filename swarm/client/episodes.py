"""Episodes in the hands of user code: the objects of the context managers, and many tasks run with retries.

Invariant: a run of user code that fails or forgets leaves no episode open; no task is tried more often than its cap.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

from swarm.client.wire import EpisodeEndpoint, EpisodeGroup, RetryPolicy
from swarm.errors import AuthenticationError, ConfigError, StateError, UnavailableError
from swarm.types import Task, WorkflowOutput

logger = logging.getLogger(__name__)

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

#: How often ``auto_retry=True`` tries one task.
_DEFAULT_ATTEMPTS = 3
#: A retry cannot help against these.
_FINAL = (ConfigError, AuthenticationError)


class AsyncEpisode:
    """One claimed episode inside :meth:`AsyncSwarmClient.episode`.

    Attributes:
        ended: its result was handed in: it is not aborted when its block is left.
    """

    def __init__(
        self, endpoint: EpisodeEndpoint, end: Callable[[Task | str, str, WorkflowOutput], Awaitable[str]]
    ) -> None:
        self.endpoint = endpoint
        self.episode_uuid = endpoint.episode_uuid
        self.base_url = endpoint.base_url
        self.api_key = endpoint.api_key
        self.ended = False
        self._end = end

    async def end(self, task: Task | str, workflow_output: WorkflowOutput) -> str:
        """Hand in the result; see :meth:`AsyncSwarmClient.end_episode`.

        Raises:
            StateError: it has ended already.
        """
        if self.ended:
            raise StateError(f"episode {self.episode_uuid} has been ended already")
        dropped = await self._end(task, self.episode_uuid, workflow_output)
        self.ended = True
        return dropped


class AsyncGroup:
    """The episodes of one task inside :meth:`AsyncSwarmClient.group`; attributes as of :class:`AsyncEpisode`."""

    def __init__(
        self, episodes: EpisodeGroup, end: Callable[[Task | str, Mapping[str, WorkflowOutput]], Awaitable[str]]
    ) -> None:
        self.episodes = episodes
        self.base_url = episodes.base_url
        self.api_key = episodes.api_key
        self.ended = False
        self._end = end

    async def end(self, task: Task | str, outputs: Mapping[str, WorkflowOutput]) -> str:
        """Hand in the results by episode; see :meth:`AsyncSwarmClient.end_group`.

        Raises:
            StateError: they have ended already.
        """
        if self.ended:
            raise StateError(f"group {self.episodes.group_uuid}".rstrip() + " has been ended already")
        dropped = await self._end(task, outputs)
        self.ended = True
        return dropped


def sweep(
    items: Iterable[ItemT],
    func: Callable[[ItemT], ResultT],
    max_workers: int,
    attempts: int,
    policy: RetryPolicy,
    stopping: threading.Event,
) -> list[ResultT | None]:
    """Call ``func`` with each item in at most ``max_workers`` threads, reading the items as threads come free.

    ``stopping`` is set when this ends early (Ctrl-C, or the iterator fails): nothing new begins then, and what runs
    may finish.

    Returns:
        Results in the order of the items, ``None`` if an item failed for good (logged).

    Raises:
        ExceptionGroup: every item failed.
    """
    numbered = enumerate(items)
    reading = threading.Lock()
    outcomes = _Outcomes[ResultT]()

    def take() -> tuple[int, ItemT] | None:
        with reading:
            return None if stopping.is_set() else next(numbered, None)

    def work() -> None:
        while (entry := take()) is not None:
            index, item = entry
            try:
                outcomes.results[index] = with_retries(
                    lambda item=item: func(item), attempts, policy, stopping, f"task {index}"
                )
            except Exception as exc:
                outcomes.errors[index] = exc

    with ThreadPoolExecutor(max_workers, thread_name_prefix="episodes") as pool:
        workers = [pool.submit(work) for _ in range(max_workers)]
        try:
            wait(workers, return_when=FIRST_EXCEPTION)
        finally:
            stopping.set()
    for worker in workers:
        worker.result()
    return outcomes.in_order()


async def sweep_async(
    items: Iterable[ItemT],
    func: Callable[[ItemT], Awaitable[ResultT]],
    max_workers: int,
    attempts: int,
    policy: RetryPolicy,
) -> list[ResultT | None]:
    """:func:`sweep` on an event loop, with at most ``max_workers`` calls at once; cancelled, it cancels what runs."""
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
        # the next item is read when there is room for it: there may be no end of them
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


def attempts_of(auto_retry: bool | int) -> int:
    """How often a task is tried: ``True`` three times, a number that many times, ``False`` once."""
    return _DEFAULT_ATTEMPTS if auto_retry is True else max(1, int(auto_retry))


def with_retries(
    func: Callable[[], ResultT], attempts: int, policy: RetryPolicy, stopping: threading.Event, name: str = "a task"
) -> ResultT:
    """Return what ``func`` returns in one of ``attempts`` tries, or raise its last error; no more once ``stopping`` is
    set."""
    for attempt in range(1, attempts + 1):
        try:
            return func()
        except Exception as exc:
            if is_stop(exc) or _is_last(exc, attempt, attempts, name) or stopping.wait(policy.delay(attempt)):
                raise
    raise AssertionError("attempts is at least 1")


async def with_retries_async(
    func: Callable[[], Awaitable[ResultT]], attempts: int, policy: RetryPolicy, name: str = "a task"
) -> ResultT:
    """:func:`with_retries` on an event loop."""
    for attempt in range(1, attempts + 1):
        try:
            return await func()
        except Exception as exc:
            if _is_last(exc, attempt, attempts, name):
                raise
            await asyncio.sleep(policy.delay(attempt))
    raise AssertionError("attempts is at least 1")


def is_stop(exc: Exception) -> bool:
    """Whether something failed only because its run is being stopped."""
    return isinstance(exc, UnavailableError) and exc.code == "run_stopped"


def _is_last(exc: Exception, attempt: int, attempts: int, name: str) -> bool:
    if attempt >= attempts or isinstance(exc, _FINAL):
        logger.error("%s failed for good after %d tries", name, attempt, exc_info=exc)
        return True
    logger.warning("%s failed (try %d of %d): %s", name, attempt, attempts, exc)
    return False
