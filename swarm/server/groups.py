"""Finished episodes, collected by task into groups and by groups into batches.

Invariant: every trajectory is in exactly one place (a partial group, a complete one, or the batch that is out), and a
batch leaves for good only when its step is confirmed.
"""

from __future__ import annotations

import uuid
from collections import Counter, deque
from dataclasses import dataclass, field

from swarm.errors import StateError
from swarm.types import TrainBatch, TrainGroup, Trajectory

#: ended episodes of partial groups kept at most; beyond it the oldest partial group goes
MAX_PARTIAL_EPISODES = 9999


@dataclass
class _Partial:
    finished: list[Trajectory] = field(default_factory=list[Trajectory])
    lost: int = 0

    @property
    def ended(self) -> int:
        return len(self.finished) + self.lost


class GroupStore:
    """Groups of ``num_repeat`` episodes per task, batches of ``batch_size`` groups, first complete first out."""

    def __init__(self, batch_size: int, num_repeat: int, max_partial_episodes: int = MAX_PARTIAL_EPISODES) -> None:
        self._batch_size = batch_size
        self._num_repeat = num_repeat
        self._limit = max_partial_episodes
        self._partial: dict[str, _Partial] = {}
        self._complete: deque[TrainGroup] = deque()
        self._outstanding: TrainBatch | None = None

    @property
    def ready(self) -> bool:
        """Whether there are groups for a whole batch."""
        return len(self._complete) >= self._batch_size

    @property
    def completed_groups(self) -> int:
        return len(self._complete)

    @property
    def episodes(self) -> int:
        """Finished episodes that wait for a batch."""
        return sum(self.tasks().values())

    def tasks(self) -> dict[str, int]:
        """Finished episodes by task, complete groups first."""
        counts: Counter[str] = Counter()
        for group in self._complete:
            counts[group.task_id] += len(group.trajectories)
        for task_id, partial in self._partial.items():
            if partial.finished:
                counts[task_id] += len(partial.finished)
        return dict(counts)

    def add(self, trajectory: Trajectory) -> int:
        """Add one finished episode; returns how many finished episodes were dropped by that (see :meth:`lose`)."""
        partial = self._partial.setdefault(trajectory.task_id, _Partial())
        partial.finished.append(trajectory)
        return self._settle(trajectory.task_id, partial)

    def lose(self, task_id: str) -> int:
        """Tell that an episode of this task ended without a trajectory.

        Its group is dropped once ``num_repeat`` of its episodes have ended: an advantage over what is left would
        compare against a mean that the lost answer is not in. Returns how many finished episodes went with it.
        """
        partial = self._partial.setdefault(task_id, _Partial())
        partial.lost += 1
        return self._settle(task_id, partial)

    def take(self) -> TrainBatch:
        """The next batch; it stays out until :meth:`confirm` or :meth:`give_back`.

        Raises:
            StateError: there is no whole batch, or one is out already.
        """
        if self._outstanding is not None:
            raise StateError(f"batch {self._outstanding.batch_id} is still out")
        if not self.ready:
            raise StateError(f"only {len(self._complete)} of {self._batch_size} groups are complete")
        groups = [self._complete.popleft() for _ in range(self._batch_size)]
        self._outstanding = TrainBatch(batch_id=uuid.uuid4().hex, groups=groups)
        return self._outstanding

    def confirm(self, batch_id: str) -> TrainBatch | None:
        """The batch that ``batch_id`` names, now trained and gone; ``None`` if it is not the one that is out."""
        batch = self._outstanding
        if batch is None or batch.batch_id != batch_id:
            return None
        self._outstanding = None
        return batch

    def give_back(self) -> int:
        """Put the batch whose step died back to the front; returns how many groups that were."""
        if self._outstanding is None:
            return 0
        groups, self._outstanding = self._outstanding.groups, None
        self._complete.extendleft(reversed(groups))
        return len(groups)

    def clear(self) -> int:
        """Forget all groups, those of a batch that is out too; returns how many finished episodes were dropped."""
        self.give_back()
        dropped = self.episodes
        self._complete.clear()
        self._partial.clear()
        return dropped

    def _settle(self, task_id: str, partial: _Partial) -> int:
        if partial.ended < self._num_repeat:
            return self._evict()
        del self._partial[task_id]
        if partial.lost:
            return len(partial.finished)
        self._complete.append(TrainGroup(task_id=task_id, trajectories=partial.finished))
        return 0

    def _evict(self) -> int:
        dropped = 0
        while sum(partial.ended for partial in self._partial.values()) > self._limit:
            oldest = next(iter(self._partial))
            dropped += len(self._partial.pop(oldest).finished)
        return dropped
