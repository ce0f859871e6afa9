"""Train on a dataset: every task as often as a group needs it, for some epochs, until the steps are done.

Invariant: an episode is counted once, as finished or as failed; when the last step is done nothing new is begun and
what runs may finish.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator
from contextlib import contextmanager

from swarm.client.asynchronous import AsyncSwarmClient
from swarm.client.claiming import Throttle, ThrottleSchedule, as_policy
from swarm.client.episodes import attempts_of, with_retries_async
from swarm.client.portal import Call, in_thread
from swarm.client.sync import SwarmClient
from swarm.client.wire import EpisodeEndpoint, RetryPolicy
from swarm.errors import ConfigError, ConflictError
from swarm.protocol import ServerStatus
from swarm.types import Model, Task, WorkflowOutput

#: Most episodes at once by default: in threads, each has one.
MAX_PARALLEL = 256

Dataset = Iterable[Task] | Callable[[], Iterable[Task]]


class TrainReport(Model):
    """The outcome of a training: episodes, their mean reward, and the global steps at its start and end."""

    finished: int
    failed: int
    mean_reward: float | None
    first_step: int
    last_step: int


def auto_train_with_dataset(
    dataset: Dataset,
    client: SwarmClient,
    execute_agent: Callable[[Task, EpisodeEndpoint], WorkflowOutput],
    *,
    num_repeat: int | None = None,
    epochs: int = 1,
    total_steps: int | None = None,
    max_parallel: int | None = None,
    auto_retry: bool | int = True,
    throttle_policy: Throttle | None = None,
    progress: bool = True,
) -> TrainReport:
    """Run ``execute_agent(task, api)`` in an episode for each task, ``num_repeat`` times, and hand in what it returns.

    Args:
        dataset: tasks, or a function that gives them; for more than one epoch they must be readable again.
        client: of a server whose engine runs a job.
        num_repeat: episodes per task; default the job's.
        epochs: passes over the dataset.
        total_steps: training steps after which it ends; default what the job still has.
        max_parallel: episodes at once; default the job's slots.
        auto_retry: ``True`` tries an episode up to three times, a number that many times, ``False`` once.
        throttle_policy: as for :meth:`SwarmClient.begin_episode`; the task is filled in.
        progress: show steps, episodes and rewards on stderr.

    Raises:
        ConfigError: the dataset cannot be read once more for the next epoch.
        ConflictError: the server has no job.
        ExceptionGroup: as many episodes as run at once failed, and none worked.
    """
    here = client.connection

    async def train() -> TrainReport:
        training = _Training(await here.client.status(), num_repeat, total_steps, max_parallel)
        tasks = _repeated(dataset, epochs, training.num_repeat)
        take = in_thread(lambda: next(tasks, None))
        return await training.run(here.client, take, in_thread(execute_agent), auto_retry, throttle_policy, progress)

    return Call(here.portal, train()).result()


async def auto_train_with_dataset_async(
    dataset: Dataset,
    client: AsyncSwarmClient,
    execute_agent: Callable[[Task, EpisodeEndpoint], Awaitable[WorkflowOutput]],
    *,
    num_repeat: int | None = None,
    epochs: int = 1,
    total_steps: int | None = None,
    max_parallel: int | None = None,
    auto_retry: bool | int = True,
    throttle_policy: Throttle | None = None,
    progress: bool = True,
) -> TrainReport:
    """:func:`auto_train_with_dataset` on an event loop."""
    training = _Training(await client.status(), num_repeat, total_steps, max_parallel)
    tasks = _repeated(dataset, epochs, training.num_repeat)

    async def take() -> Task | None:
        return next(tasks, None)

    return await training.run(client, take, execute_agent, auto_retry, throttle_policy, progress)


class _Training:
    """The episodes of one training, and their counts."""

    def __init__(
        self, status: ServerStatus, num_repeat: int | None, total_steps: int | None, max_parallel: int | None
    ) -> None:
        job = status.job
        if job is None:
            raise ConflictError("the swarm server has no job: auto_sync_train_config_and_start_engine first")
        self.num_repeat = num_repeat or job.num_repeat
        self._max_parallel = max_parallel or min(job.slots, MAX_PARALLEL)
        self._first = self._step = status.engine.global_step
        self._last = job.total_training_steps if total_steps is None else self._first + total_steps
        self._stopping = self._step >= self._last
        self._claiming: set[asyncio.Task[None]] = set()
        self._finished = 0
        self._rewards = 0.0
        self._failures = 0
        self._errors: list[Exception] = []
        self._show: Callable[[], None] = lambda: None

    async def run(
        self,
        client: AsyncSwarmClient,
        take: Callable[[], Awaitable[Task | None]],
        execute: Callable[[Task, EpisodeEndpoint], Awaitable[WorkflowOutput]],
        auto_retry: bool | int,
        throttle: Throttle | None,
        progress: bool,
    ) -> TrainReport:
        """Run an episode for each task that ``take`` returns, until it returns none or the last step is done."""
        free = asyncio.Semaphore(self._max_parallel)
        attempts, policy = attempts_of(auto_retry), RetryPolicy()
        running: set[asyncio.Task[None]] = set()

        async def episode(task: Task) -> float:
            current = asyncio.current_task()
            assert current is not None
            self._claiming.add(current)
            try:
                if self._stopping:
                    raise asyncio.CancelledError
                uuid, api = await client.begin_episode(throttle_policy=_for_task(throttle, task))
            finally:
                self._claiming.discard(current)
            output = await execute(task, api)
            await client.end_episode(task, uuid, output)
            return output.reward

        async def work(task: Task) -> None:
            try:
                self._count(
                    await with_retries_async(lambda: client.run_tracked(episode(task)), attempts, policy, task.task_id)
                )
            except Exception as exc:
                self._count_failure(exc)
            finally:
                free.release()

        with self._shown(progress):
            async with client.watching_status(self._observe):
                try:
                    while await free.acquire() and not self._stopping and (task := await take()) is not None:
                        running.add(started := asyncio.create_task(work(task)))
                        started.add_done_callback(running.discard)
                    await _all_done(running)
                except asyncio.CancelledError:
                    for one in running:
                        one.cancel()
                    raise
                except Exception:
                    # the dataset failed: what runs may finish
                    self._stop()
                    raise
                finally:
                    await _all_done(running)
        if self._failures and not self._finished:
            raise ExceptionGroup(f"all {self._failures} episodes failed", self._errors)
        return TrainReport(
            finished=self._finished,
            failed=self._failures,
            mean_reward=self._rewards / self._finished if self._finished else None,
            first_step=self._first,
            last_step=self._step,
        )

    def _stop(self) -> None:
        """Begin no more episodes, and give up the claims that wait."""
        self._stopping = True
        for claiming in self._claiming:
            claiming.cancel()

    def _count(self, reward: float) -> None:
        self._finished += 1
        self._rewards += reward
        self._show()

    def _count_failure(self, error: Exception) -> None:
        self._failures += 1
        if len(self._errors) < self._max_parallel:
            self._errors.append(error)
        self._show()
        if not self._finished and self._failures >= self._max_parallel:
            self._stop()

    async def _observe(self, status: ServerStatus) -> None:
        self._step = max(self._step, status.engine.global_step)
        self._show()
        if self._step >= self._last:
            self._stop()

    @contextmanager
    def _shown(self, wanted: bool) -> Generator[None]:
        """Show the counts on stderr inside the block, if ``wanted``."""
        if not wanted:
            yield
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("step {task.completed:g}/{task.total:g}"), BarColumn(), TextColumn("{task.description}"))
        with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as bar:
            row = bar.add_task("", total=self._last - self._first)

            def show() -> None:
                reward = f", mean reward {self._rewards / self._finished:.3f}" if self._finished else ""
                text = f"{self._finished} episodes{reward}, {self._failures} failed"
                bar.update(row, completed=self._step - self._first, description=text)

            self._show = show
            show()
            yield


async def _all_done(tasks: set[asyncio.Task[None]]) -> None:
    while tasks:
        await asyncio.wait(tasks)


def _repeated(dataset: Dataset, epochs: int, num_repeat: int) -> Iterator[Task]:
    for epoch in range(epochs):
        tasks = dataset() if callable(dataset) else dataset
        if epoch == 0 and epochs > 1 and iter(tasks) is tasks and not callable(dataset):
            raise ConfigError("the dataset can be read only once; for several epochs give a list or a function")
        for task in tasks:
            for _ in range(num_repeat):
                yield task


def _for_task(throttle: Throttle | None, task: Task) -> Throttle | None:
    policy = as_policy(throttle)
    if isinstance(policy, ThrottleSchedule):
        return policy.for_task(task.task_id)
    return None if policy is None else policy.model_copy(update={"current_task_id": task.task_id})
