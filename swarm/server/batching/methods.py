"""The collection methods: when there is a batch, and which groups go into it.

Invariant: a batch never holds a group of one episode (compared with itself alone it has no advantage, hence no
gradient), and :meth:`Method.select` gives at least one group whenever :meth:`Method.ready` says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from swarm.job import CollectionMethod
from swarm.tokens import TrainGroup, Trajectory

#: episodes that a group needs to compare them with each other
MIN_GROUP = 2


class Member(NamedTuple):
    """One finished episode; ``oldest_version`` is of the weights that sampled its oldest token."""

    client_uuid: str
    trajectory: Trajectory
    oldest_version: int


@dataclass(eq=False, slots=True)
class FinishedGroup:
    """Finished episodes of one task. ``number`` orders groups by when they were begun; ``version`` is the policy
    version then; ``lost`` counts episodes that ended without a trajectory."""

    number: int
    task_id: str
    version: int
    members: list[Member] = field(default_factory=list[Member])
    lost: int = 0

    @property
    def clients(self) -> list[str]:
        """The client of each member."""
        return [member.client_uuid for member in self.members]

    @property
    def names(self) -> list[str]:
        """The episode of each member."""
        return [member.trajectory.episode_uuid for member in self.members]

    def train_group(self) -> TrainGroup:
        return TrainGroup(task_id=self.task_id, trajectories=[member.trajectory for member in self.members])


class Tally(NamedTuple):
    """What waits: whole groups, episodes in groups of at least two; and who agrees to train on it."""

    whole_groups: int
    trainable_episodes: int
    any_agreed: bool
    all_agreed: bool
    cache_full: bool


class Method:
    """One collection method of one job.

    Attributes:
        whole_groups: whether a batch consists of groups of ``num_repeat`` only; else of all that have two episodes.
        by_agreement: whether clients say when the batch is complete.
    """

    whole_groups = by_agreement = False

    def objection(self, group: FinishedGroup) -> str:
        """Why a whole group is not worth training, or an empty string."""
        return ""

    def ready(self, tally: Tally) -> bool:
        """Whether there is a batch."""
        raise NotImplementedError

    def agreed(self, any_agreed: bool, all_agreed: bool) -> bool:
        """Whether the clients' agreement completes the batch."""
        return False

    def select(self, whole: Iterable[FinishedGroup], trainable: Iterable[FinishedGroup]) -> Sequence[FinishedGroup]:
        """The groups of the batch: of ``whole`` ones in the order of their completion, or of all ``trainable`` ones,
        oldest first."""
        raise NotImplementedError


@dataclass(frozen=True)
class EnoughTasks(Method):
    """``batch_size`` whole groups, first complete first in; with ``informative`` only groups whose rewards differ."""

    batch_size: int
    informative: bool
    whole_groups = True

    def objection(self, group: FinishedGroup) -> str:
        first, *others = (member.trajectory.reward for member in group.members)
        credited = any(member.trajectory.credit for member in group.members)
        if self.informative and not credited and all(reward == first for reward in others):
            return f"all {len(group.members)} episodes of task {group.task_id!r} have the reward {first:g}"
        return ""

    def ready(self, tally: Tally) -> bool:
        return tally.whole_groups >= self.batch_size

    def select(self, whole: Iterable[FinishedGroup], trainable: Iterable[FinishedGroup]) -> Sequence[FinishedGroup]:
        return list(islice(whole, self.batch_size))


@dataclass(frozen=True)
class EnoughEpisodes(Method):
    """Groups that hold ``episodes`` episodes together, oldest first; one group at most goes beyond that number."""

    episodes: int

    def ready(self, tally: Tally) -> bool:
        return tally.trainable_episodes >= self.episodes

    def select(self, whole: Iterable[FinishedGroup], trainable: Iterable[FinishedGroup]) -> Sequence[FinishedGroup]:
        chosen: list[FinishedGroup] = []
        missing = self.episodes
        for group in trainable:
            if missing <= 0:
                break
            chosen.append(group)
            missing -= len(group.members)
        return chosen


@dataclass(frozen=True)
class Agreement(Method):
    """Every group of at least two, once any client agrees or ``everyone`` who is active does.

    A full cache counts as agreement: nobody could collect more, and waiting on would be for ever.
    """

    everyone: bool
    by_agreement = True

    def agreed(self, any_agreed: bool, all_agreed: bool) -> bool:
        return all_agreed if self.everyone else any_agreed

    def ready(self, tally: Tally) -> bool:
        agreed = self.agreed(tally.any_agreed, tally.all_agreed)
        return tally.trainable_episodes > 0 and (agreed or tally.cache_full)

    def select(self, whole: Iterable[FinishedGroup], trainable: Iterable[FinishedGroup]) -> Sequence[FinishedGroup]:
        return list(trainable)


def method_of(collection: CollectionMethod, batch_size: int, num_repeat: int) -> Method:
    """The method that ``TrainJob.collection`` names."""
    match collection:
        case "finish_enough_tasks":
            return EnoughTasks(batch_size, informative=False)
        case "finish_enough_non_dummy_tasks":
            return EnoughTasks(batch_size, informative=True)
        case "finish_enough_episodes":
            return EnoughEpisodes(batch_size * num_repeat)
        case "any_client_agree_sync_weight":
            return Agreement(everyone=False)
        case "all_clients_agree_sync_weight":
            return Agreement(everyone=True)
