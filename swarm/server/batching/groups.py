"""The groups that wait for a batch, and what became of episodes that wait no more.

Invariant: an episode that waits is in exactly one group, open or whole. Counts are kept per event.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from msgspec import structs

from swarm.job import TrainJob
from swarm.server.batching.methods import MIN_GROUP, FinishedGroup, Member
from swarm.server.batching.shares import Shares
from swarm.server.journal.rows import GroupRow
from swarm.states import EpisodeState
from swarm.tokens import TrainBatch, TrainGroup

#: Why finished episodes will never be trained; for counters.
DropCause = Literal["lost", "uninformative", "stale", "evicted", "failed", "cleared", "erased"]


@dataclass(frozen=True, slots=True)
class Dropped:
    """Finished episodes that will never be trained; ``state`` says whether they waited for a batch or were in one.

    ``client_uuids`` are their clients in the same order (empty where a restart forgot it); ``reason`` is for people.
    """

    episode_uuids: tuple[str, ...]
    client_uuids: tuple[str, ...]
    cause: DropCause
    reason: str
    state: EpisodeState = EpisodeState.FINISHED


@dataclass(frozen=True, slots=True)
class BatchFailure:
    """The trainer failed on ``batch`` for the ``attempts``-th time; it is the next batch again, unless ``dropped``."""

    batch: TrainBatch
    attempts: int
    dropped: Dropped | None


@dataclass(eq=False, slots=True)
class Outstanding:
    """A batch that was taken; ``back``: it waits to be taken again. ``client_uuids`` are of its episodes, in order."""

    batch: TrainBatch
    client_uuids: Sequence[str]
    attempts: int = 0
    back: bool = False

    def forget(self, episode_uuids: Container[str], reason: str) -> list[Dropped]:
        """Take out the groups that have one of these episodes."""
        kept: list[TrainGroup] = []
        clients, dropped, kept_clients = iter(self.client_uuids), list[Dropped](), list[str]()
        for group in self.batch.groups:
            names = tuple(trajectory.episode_uuid for trajectory in group.trajectories)
            theirs = tuple(islice(clients, len(names)))
            if any(name in episode_uuids for name in names):
                dropped.append(Dropped(names, theirs, "erased", reason, EpisodeState.BATCHED))
            else:
                kept.append(group)
                kept_clients += theirs
        self.batch, self.client_uuids = structs.replace(self.batch, groups=kept), kept_clients
        return dropped


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

    @property
    def whole_groups(self) -> int:
        return len(self.whole)

    def waiting(self) -> Iterator[FinishedGroup]:
        """The groups with episodes, whole ones first; not to be changed."""
        yield from self.whole.values()
        yield from (group for group in self.open.values() if group.members)

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
        members = self.remove(group)
        self.whole[group.number] = group
        self._count(group, 1)
        self.episodes += len(members)
        self.trainable += len(members)
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
        self.episodes -= len(group.members)
        self.trainable -= _trainable(len(group.members))
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
        gone = [group for group in self.waiting() if any(name in episode_uuids for name in group.names)]
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
        before = len(group.members)
        self._count(group, -1)
        group.members = members
        self._count(group, 1)
        self.episodes += len(members) - before
        self.trainable += _trainable(len(members)) - _trainable(before)

    def _count(self, group: FinishedGroup, sign: int) -> None:
        """Add to the counts, or subtract, what of a waiting ``group`` will not be too old after one more sync."""
        kept = sum(not self.is_old(member.oldest_version - 1) for member in group.members)
        closed = group.number in self.whole
        if closed and kept < len(group.members):
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


def dropped_from(members: Iterable[Member], cause: DropCause, reason: str) -> list[Dropped]:
    """What is dropped with these members: nothing, or one thing."""
    gone = list(members)
    episodes = tuple(member.trajectory.episode_uuid for member in gone)
    return [Dropped(episodes, tuple(member.client_uuid for member in gone), cause, reason)] if gone else []
