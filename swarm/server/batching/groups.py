"""The groups that wait for a batch, and the collection methods: when there is a batch, and which groups go into it.

Invariant: an episode that waits is in exactly one group, open or whole. A batch never holds a group of one episode
(compared with itself alone it has no advantage, hence no gradient), and :meth:`Method.select` gives at least one group
whenever :meth:`Method.ready` says so. Counts are kept per event.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from msgspec import structs

from swarm.job import CollectionMethod, TrainJob
from swarm.server.batching.clients import Clients
from swarm.server.batching.shares import Shares
from swarm.server.journal.rows import BatchRow, GroupRow
from swarm.tokens import TrainBatch, TrainGroup, Trajectory

#: episodes that a group needs to compare them with each other
MIN_GROUP = 2


class Member(NamedTuple):
    """One finished episode, and its client (empty where a restart forgot it); ``oldest_version`` is of the weights that
    sampled its oldest token."""

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

    def has(self, episode_uuids: Container[str]) -> bool:
        """Whether one of its members is one of these episodes."""
        return any(member.trajectory.episode_uuid in episode_uuids for member in self.members)

    def train_group(self) -> TrainGroup:
        return TrainGroup(task_id=self.task_id, trajectories=[member.trajectory for member in self.members])


@dataclass(eq=False, slots=True)
class Outstanding:
    """A batch that was taken, and its groups; ``back``: it waits to be taken again, after so many failed
    ``attempts``."""

    batch: TrainBatch
    groups: list[FinishedGroup]
    attempts: int = 0
    back: bool = False

    @classmethod
    def restored(cls, row: BatchRow) -> Outstanding:
        """What a restart left of it: it is back, and nobody knows its clients."""
        groups = [
            FinishedGroup(0, group.task_id, 0, [Member("", trajectory, 0) for trajectory in group.trajectories])
            for group in row.batch.groups
        ]
        return cls(row.batch, groups, row.attempts, back=True)

    @property
    def members(self) -> list[Member]:
        """Of all its groups, in order."""
        return [member for group in self.groups for member in group.members]

    def forget(self, episode_uuids: Container[str]) -> list[Member]:
        """Take out the groups that have one of these episodes; returns their members."""
        gone = [group for group in self.groups if group.has(episode_uuids)]
        self.groups = [group for group in self.groups if not group.has(episode_uuids)]
        self.batch = structs.replace(self.batch, groups=[group.train_group() for group in self.groups])
        return [member for group in gone for member in group.members]


class WaitingGroups:
    """Finished episodes by task.

    Args:
        shares: learns which clients' episodes wait.
        most_open: open groups, beyond which the first goes that has losses only.

    Attributes:
        open: groups that lack episodes, by task; one may have losses only, and will be dropped once whole.
        whole: the others, by number, in the order of their completion.
        changed_losses: rows of the groups whose losses changed, by task; whoever writes them clears it.
        version: of the weights that are served.
        episodes: how many wait.
        trainable: those in groups of at least two.
        tally_after_sync: of what will not be too old after one more sync: whole groups, episodes in groups of at
            least two, and all episodes.
    """

    def __init__(self, job: TrainJob, shares: Shares, most_open: int) -> None:
        self._max_staleness = job.max_staleness
        self._shares = shares
        self._most_open = most_open
        self._numbers = 0
        self.open: dict[str, FinishedGroup] = {}
        self.whole: dict[int, FinishedGroup] = {}
        self.changed_losses: dict[str, GroupRow] = {}
        self.version = self.episodes = self.trainable = 0
        self.tally_after_sync = (0, 0, 0)

    def waiting(self) -> Iterator[FinishedGroup]:
        """The groups with episodes, whole ones first; not to be changed."""
        yield from self.whole.values()
        yield from (group for group in self.open.values() if group.members)

    def oldest_trainable(self) -> list[FinishedGroup]:
        """The groups that could be trained, oldest first."""
        trainable = [group for group in self.waiting() if len(group.members) >= MIN_GROUP]
        return sorted(trainable, key=lambda group: group.number)

    def tasks(self) -> dict[str, int]:
        """Finished episodes that wait, by task, whole groups first."""
        counts: Counter[str] = Counter()
        for group in self.waiting():
            counts[group.task_id] += len(group.members)
        return dict(counts)

    def is_old(self, version: int) -> bool:
        """Whether a token of ``version`` is too old to be trained."""
        return self._max_staleness is not None and self.version - version > self._max_staleness

    # ------------------------------------------------------------------ changes

    def join(self, member: Member) -> FinishedGroup:
        """The open group of a finished episode, which is in it from now on."""
        task_id = member.trajectory.task_id
        group = self._of(task_id)
        if not group.members:
            # what waits is in the order of its first members
            self.open[task_id] = self.open.pop(task_id)
        self._hold(group, [*group.members, member])
        self._shares.joined(member.client_uuid, task_id)
        return group

    def lack(self, task_id: str) -> FinishedGroup:
        """The group of a task one episode of which has no trajectory."""
        group = self._of(task_id)
        group.lost += 1
        self.changed_losses[task_id] = GroupRow(task_id, group.lost, group.version)
        if len(self.open) > self._most_open:
            empty = (other for other in self.open.values() if not other.members and other is not group)
            if (first := next(empty, None)) is not None:
                self.remove(first)
        return group

    def restore_losses(self, row: GroupRow) -> FinishedGroup:
        """The group of ``row`` after a restart; its members, if any, are here already."""
        group = self._of(row.task_id)
        group.lost, group.version = row.lost, row.version
        return group

    def complete(self, group: FinishedGroup) -> None:
        """An open group has all its episodes."""
        self.remove(group)
        self.whole[group.number] = group
        self._count(group, 1)
        self._shares.completed(group.clients)

    def remove(self, group: FinishedGroup) -> list[Member]:
        """The members of a group that waits no more."""
        self._count(group, -1)
        if self.whole.pop(group.number, None) is not None:
            self._shares.left(group.clients)
        else:
            del self.open[group.task_id]
            if group.lost:
                self.changed_losses[group.task_id] = GroupRow(group.task_id, 0, group.version)
            self._shares.parted(group.clients, group.task_id)
        return group.members

    def evict(self, least: int, whole: int) -> list[Member]:
        """Members of the oldest open groups that have fewer than ``whole``, at ``least`` so many if there are."""
        gone: list[Member] = []
        for group in list(self.open.values()):
            if len(gone) < least and 0 < len(group.members) < whole:
                gone += self.remove(group)
        return gone

    def forget(self, episode_uuids: Container[str]) -> list[Member]:
        """Members of the groups that have one of these."""
        gone = [group for group in self.waiting() if group.has(episode_uuids)]
        return [member for group in gone for member in self.remove(group)]

    def clear(self) -> list[Member]:
        """All that waited; losses are forgotten, too."""
        return [member for group in [*self.whole.values(), *self.open.values()] for member in self.remove(group)]

    def expire(self, version: int) -> list[Member]:
        """What waits no more as weights of ``version`` are served: whole groups with an episode that is too old, and
        old episodes of open groups. A version from the future (the engine began anew) is not old."""
        self.version = version
        if self._max_staleness is None:
            return []
        self.episodes = self.trainable = 0
        self.tally_after_sync = (0, 0, 0)
        for group in self.waiting():
            self._count(group, 1)
        gone: list[Member] = []
        for group in list(self.waiting()):
            old = [member for member in group.members if self.is_old(member.oldest_version)]
            young = [member for member in group.members if not self.is_old(member.oldest_version)]
            if old and (group.number in self.whole or not young):
                gone += self.remove(group)
            elif old:
                self._hold(group, young)
                self._shares.parted([member.client_uuid for member in old], group.task_id)
                gone += old
        for group in [group for group in self.open.values() if not group.members and self.is_old(group.version)]:
            self.remove(group)
        return gone

    def _of(self, task_id: str) -> FinishedGroup:
        """The open group of a task, which may be a new one."""
        if (group := self.open.get(task_id)) is None:
            self._numbers += 1
            group = self.open[task_id] = FinishedGroup(self._numbers, task_id, self.version)
        return group

    def _hold(self, group: FinishedGroup, members: list[Member]) -> None:
        """Let an open group have these members."""
        self._count(group, -1)
        group.members = members
        self._count(group, 1)

    def _count(self, group: FinishedGroup, sign: int) -> None:
        """Add a waiting ``group`` to the counts, or subtract it: what there is, and what of it will not be too old
        after one more sync."""
        size = len(group.members)
        self.episodes += sign * size
        self.trainable += sign * _trainable(size)
        kept = sum(not self.is_old(member.oldest_version - 1) for member in group.members)
        closed = group.number in self.whole
        if closed and kept < size:
            kept = 0
        whole, trainable, episodes = self.tally_after_sync
        self.tally_after_sync = (
            whole + sign * (closed and kept > 0),
            trainable + sign * _trainable(kept),
            episodes + sign * kept,
        )


def _trainable(episodes: int) -> int:
    """How many of a group of ``episodes`` could be trained."""
    return episodes if episodes >= MIN_GROUP else 0


class Tally(NamedTuple):
    """What waits: whole groups, and episodes in groups of at least two; ``agreed``: the clients agree to train on it,
    or nobody could collect more."""

    whole_groups: int
    trainable_episodes: int
    agreed: bool


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

    def agreed(self, clients: Clients) -> bool:
        """Whether the clients' agreement completes the batch."""
        return False

    def ready(self, tally: Tally) -> bool:
        """Whether there is a batch."""
        raise NotImplementedError

    def select(self, groups: WaitingGroups) -> list[FinishedGroup]:
        """The groups of the batch, once there is one."""
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

    def select(self, groups: WaitingGroups) -> list[FinishedGroup]:
        return list(islice(groups.whole.values(), self.batch_size))


@dataclass(frozen=True)
class EnoughEpisodes(Method):
    """Groups that hold ``episodes`` episodes together, oldest first; one group at most goes beyond that number."""

    episodes: int

    def ready(self, tally: Tally) -> bool:
        return tally.trainable_episodes >= self.episodes

    def select(self, groups: WaitingGroups) -> list[FinishedGroup]:
        chosen: list[FinishedGroup] = []
        missing = self.episodes
        for group in groups.oldest_trainable():
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

    def agreed(self, clients: Clients) -> bool:
        return clients.all_agreed if self.everyone else clients.any_agreed

    def ready(self, tally: Tally) -> bool:
        return tally.trainable_episodes > 0 and tally.agreed

    def select(self, groups: WaitingGroups) -> list[FinishedGroup]:
        return groups.oldest_trainable()


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
