"""Episodes in the hands of user code: the objects of the context managers, and many tasks run with retries.

Invariant: a run of user code that fails or forgets leaves no episode open; no task is tried more often than its cap.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from typing import TypeVar

from swarm.client.calls import OpenClaims
from swarm.client.wire import EpisodeEndpoint, EpisodeGroup, RetryPolicy
from swarm.errors import AuthenticationError, ConfigError, RequestError, StateError, UnavailableError
from swarm.types import Task, WorkflowOutput

logger = logging.getLogger(__name__)

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

#: How often ``auto_retry=True`` tries one task.
_DEFAULT_ATTEMPTS = 3
#: A retry cannot help against these.
_FINAL = (ConfigError, AuthenticationError)


class UserRun:
    """User code under way: the episodes of ``client`` that it has begun and not ended, and its claims, at whichever
    client.

    A context variable names the run, so each thread and task has its own, and a call that a thread makes on the event
    loop counts for the thread's run.
    """

    def __init__(self, client: object) -> None:
        self.client = client
        self.loop = asyncio.get_running_loop()
        self.episodes: set[str] = set()
        self.claims = OpenClaims()

    def stop(self) -> None:
        """End its claims with the code ``run_stopped``."""
        stopped = "the run that this episode is part of is being stopped"
        self.claims.end(lambda: UnavailableError(stopped, code="run_stopped"))


current_run: ContextVar[UserRun | None] = ContextVar("run", default=None)


class AllFailedError(ExceptionGroup[Exception]):
    """Every task of a run failed."""


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

    async def end(self, task: Task | str, outputs: Sequence[WorkflowOutput]) -> str:
        """Hand in a result for each of ``episodes``, in their order; see :meth:`AsyncSwarmClient.end_group`.

        Raises:
            RequestError: there are more or fewer results than episodes.
            StateError: they have ended already.
        """
        if self.ended:
            raise StateError(f"group {self.episodes.group_uuid}".rstrip() + " has been ended already")
        if len(outputs) != len(self.episodes):
            raise RequestError(f"{len(outputs)} results for {len(self.episodes)} episodes", param="outputs")
        dropped = await self._end(task, dict(zip(self.episodes.episode_uuids, outputs, strict=True)))
        self.ended = True
        return dropped


async def each(items: Iterable[ItemT]) -> AsyncGenerator[ItemT]:
    """``items`` for ``async for``."""
    for item in items:
        yield item


async def sweep(
    items: AsyncGenerator[ItemT], func: Callable[[int, ItemT], Awaitable[ResultT]], max_workers: int
) -> list[ResultT | None]:
    """Call ``func`` with the index of each item and the item, at most ``max_workers`` at once.

    The next item is read when there is room for it: there may be no end of them. If reading fails, what runs may
    finish; cancelled, this cancels what runs.

    Returns:
        Results in the order of the items, ``None`` if an item failed.

    Raises:
        AllFailedError: every item failed.
        RequestError: ``max_workers`` is below 1.
    """
    if max_workers < 1:
        raise RequestError(f"max_workers is {max_workers}: give 1 or more")
    results: dict[int, ResultT] = {}
    #: none once an item has succeeded: with their frames they would fill the memory
    errors: list[Exception] = []
    broken: Exception | None = None
    count = done = failed = 0
    free = asyncio.Semaphore(max_workers)

    async def work(index: int, item: ItemT) -> None:
        nonlocal done, failed
        try:
            result = await func(index, item)
            done += 1
            errors.clear()
            # a training has none, and goes on for weeks
            if result is not None:
                results[index] = result
        except Exception as exc:
            failed += 1
            if not done:
                errors.append(exc)
        finally:
            free.release()

    async with aclosing(items), asyncio.TaskGroup() as group:
        try:
            await free.acquire()
            async for item in items:
                group.create_task(work(count, item))
                count += 1
                await free.acquire()
        except Exception as exc:
            logger.error("the tasks cannot be read; %d are still running: %s", count - done - failed, exc)
            broken = exc
    if broken is not None:
        raise broken
    if errors:
        raise AllFailedError(f"all {len(errors)} tasks failed", errors)
    return [results.get(index) for index in range(count)]


async def own_errors(work: Awaitable[ResultT]) -> ResultT:
    """What user code returns; where it raises a ``CancelledError`` though nobody cancelled this task (it awaited one
    that was), that is an error like others."""
    try:
        return await work
    except asyncio.CancelledError as exc:
        if (task := asyncio.current_task()) is None or task.cancelling():
            raise
        raise RuntimeError("CancelledError was raised, and nobody cancelled the call") from exc


def attempts_of(auto_retry: bool | int) -> int:
    """How often a task is tried: ``True`` three times, a number that many times, ``False`` once."""
    return _DEFAULT_ATTEMPTS if auto_retry is True else max(1, int(auto_retry))


async def with_retries(
    func: Callable[[], Awaitable[ResultT]], attempts: int, policy: RetryPolicy, name: str
) -> ResultT:
    """Return what ``func`` returns in one of ``attempts`` tries, or raise its last error (logged)."""
    for attempt in range(1, attempts + 1):
        try:
            return await func()
        except Exception as exc:
            if is_last(exc, attempt, attempts, name):
                raise
            await asyncio.sleep(policy.delay(attempt))
    raise AssertionError("attempts is at least 1")


async def run_each(
    run_tracked: Callable[[Awaitable[ResultT]], Awaitable[ResultT]],
    tasks: AsyncGenerator[ItemT],
    func: Callable[[ItemT], Awaitable[ResultT]],
    max_workers: int,
    auto_retry: bool | int,
    policy: RetryPolicy,
) -> list[ResultT | None]:
    """:meth:`AsyncSwarmClient.run_episodes_until_all_complete` with the client's ``run_tracked``."""
    attempts = attempts_of(auto_retry)

    async def run_task(number: int, task: ItemT) -> ResultT:
        return await with_retries(lambda: run_tracked(own_errors(func(task))), attempts, policy, f"task {number}")

    return await sweep(tasks, run_task, max_workers)


def is_last(exc: Exception, attempt: int, attempts: int, name: str) -> bool:
    """Whether the error of this attempt is final; logs it."""
    if attempt >= attempts or isinstance(exc, _FINAL):
        logger.error("%s failed for good after %d tries", name, attempt, exc_info=exc)
        return True
    logger.warning("%s failed (try %d of %d): %s", name, attempt, attempts, exc)
    return False
