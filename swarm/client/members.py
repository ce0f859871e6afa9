"""The episodes to come of a training: every task as often as a group needs it, for some epochs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from swarm.errors import ConfigError
from swarm.types import Task, WorkflowOutput

Dataset = Iterable[Task] | Callable[[], Iterable[Task]]


class Shuffle:
    """The rewards of one task's episodes, permuted once each is there or has failed for good."""

    def __init__(self, size: int) -> None:
        self._size = self._missing = size
        self._rewards: dict[int, float] = {}
        self._given: dict[int, float] = {}
        self._complete = asyncio.Event()

    async def given(self, place: int, output: WorkflowOutput) -> WorkflowOutput:
        """``output`` with the reward of one of the episodes; a repetition gets the same one again."""
        if place not in self._rewards:
            self._rewards[place] = output.reward
            self._left()
        await self._complete.wait()
        return output.model_copy(update={"reward": self._given[place]})

    def leave(self, place: int) -> None:
        """The episode is over, maybe without a reward, or is never begun."""
        if place not in self._rewards and not self._complete.is_set():
            self._left()

    def leave_after(self, place: int) -> None:
        """No episode behind ``place`` is begun."""
        for later in range(place + 1, self._size):
            self.leave(later)

    def _left(self) -> None:
        self._missing -= 1
        if not self._missing:
            values = list(self._rewards.values())
            self._given = dict(zip(self._rewards, random.sample(values, len(values)), strict=True))
            self._complete.set()


@dataclass(frozen=True)
class Member:
    """One episode to come: its task, and its place among those of the task."""

    task: Task
    place: int
    shuffle: Shuffle | None = None


def members_of(dataset: Dataset, epochs: int, num_repeat: int, *, shuffled: bool) -> Iterator[Member]:
    """Each episode to come.

    Raises:
        ConfigError: the dataset cannot be read once more for the next epoch.
    """
    for epoch in range(epochs):
        tasks = dataset() if callable(dataset) else dataset
        if epoch == 0 and epochs > 1 and iter(tasks) is tasks and not callable(dataset):
            raise ConfigError("the dataset can be read only once; for several epochs give a list or a function")
        for task in tasks:
            shuffle = Shuffle(num_repeat) if shuffled else None
            for place in range(num_repeat):
                yield Member(task, place, shuffle)
