"""Train on a dataset, from threads or on an event loop, with progress on stderr."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator
from contextlib import contextmanager

from swarm.client.asynchronous import AsyncSwarmClient
from swarm.client.episodes import each
from swarm.client.portal import BlockingCall, each_in_thread, in_thread
from swarm.client.sync import SwarmClient
from swarm.client.throttling import Throttle
from swarm.client.training_options import Progress, TrainOptions, TrainReport
from swarm.client.training_run import DatasetTraining, Execute
from swarm.client.wire import EpisodeEndpoint
from swarm.errors import ConfigError
from swarm.progress import reward
from swarm.types import Task, WorkflowOutput

Dataset = Iterable[Task] | Callable[[], Iterable[Task]]


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
    A server that is away is waited for, about half an hour.

    Args:
        dataset: tasks, or a function that gives them; for more than one epoch they must be readable again.
        client: of a server whose engine runs a job.
        num_repeat: episodes per task; default the job's. With fewer, epochs or clients have to make a group whole.
        epochs: passes over the dataset.
        total_steps: training steps after which it ends, at most and by default those that the job still has.
        max_parallel: episodes at once; default the job's slots.
        auto_retry: ``True`` tries an episode up to three times, a number that many times, ``False`` once.
        throttle_policy: as for :meth:`SwarmClient.begin_episode`; the task is filled in.
        progress: show steps, episodes and rewards on stderr.

    Raises:
        ConfigError: the dataset cannot be read once more for the next epoch.
        ConflictError: the server has no job.
        ExceptionGroup: all episodes failed; or as many as run at once did so in a row, and at least those of two tasks.
    """
    with _shown(progress) as show:
        options = TrainOptions(num_repeat, total_steps, max_parallel, auto_retry, throttle_policy, on_progress=show)
        here, execute = client.connection, in_thread(execute_agent)
        return BlockingCall(here, _trained(dataset, epochs, here.client, execute, options, each_in_thread)).result()


def begin_training(
    tasks: Iterable[Task],
    client: SwarmClient,
    execute_agent: Callable[[Task, EpisodeEndpoint], WorkflowOutput],
    options: TrainOptions,
) -> BlockingCall[TrainReport]:
    """The same as a call that another thread may cancel, which abandons workflows that run then. ``tasks`` are read
    once; its ``result`` raises like :func:`auto_train_with_dataset`."""
    here, execute = client.connection, in_thread(execute_agent, abandon=True)
    return BlockingCall(here, _trained(tasks, 1, here.client, execute, options, each_in_thread))


async def _trained(
    dataset: Dataset,
    epochs: int,
    client: AsyncSwarmClient,
    execute: Execute,
    options: TrainOptions,
    read: Callable[[Iterable[Task]], AsyncGenerator[Task]],
) -> TrainReport:
    return await DatasetTraining(await client.status(), options).run(client, read(_tasks_of(dataset, epochs)), execute)


def _tasks_of(dataset: Dataset, epochs: int) -> Iterator[Task]:
    for epoch in range(epochs):
        tasks = dataset() if callable(dataset) else dataset
        if epoch == 0 and epochs > 1 and iter(tasks) is tasks and not callable(dataset):
            raise ConfigError("the dataset can be read only once; for several epochs give a list or a function")
        yield from tasks


async def auto_train_with_dataset_async(
    dataset: Dataset,
    client: AsyncSwarmClient,
    execute_agent: Execute,
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
    with _shown(progress) as show:
        options = TrainOptions(num_repeat, total_steps, max_parallel, auto_retry, throttle_policy, on_progress=show)
        return await _trained(dataset, epochs, client, execute_agent, options, each)


@contextmanager
def _shown(wanted: bool) -> Generator[Callable[[Progress], None]]:
    """A callback that shows progress on stderr inside the block, if ``wanted``."""
    if not wanted:
        yield lambda progress: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("step {task.completed:g}/{task.total:g}"), BarColumn(), TextColumn("{task.description}"))
    with Bars(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as bars:
        row = bars.add_task("")

        def show(progress: Progress) -> None:
            mean = "" if progress.mean_reward is None else f", mean reward {reward(progress.mean_reward)}"
            text = f"{progress.finished} episodes{mean}, {progress.failed} failed"
            done, total = progress.step - progress.first_step, progress.last_step - progress.first_step
            bars.update(row, completed=done, total=total, description=text)

        yield show
