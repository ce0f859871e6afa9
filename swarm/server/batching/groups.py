"""Finished episodes, collected by task into groups and by groups into batches.

Invariant: every trajectory is in exactly one place (an open group, a whole group, or the batch that is out), leaves it
only into a batch, by a confirmed step or as :class:`Dropped`, and is never in two batches. Counts are kept per event.
"""

from __future__ import annotations

import uuid
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from swarm.errors import StateError
from swarm.job import TrainJob
from swarm.server.batching.methods import MIN_GROUP, Group, Member, Tally, method_of
from swarm.server.batching.shares import Shares
from swarm.server.journal.rows import GroupRow
from swarm.states import EpisodeState
from swarm.tokens import TrainBatch, Trajectory

#: Why finished episodes will never be trained; for counters.
DropCause = Literal["lost", "uninformative", "stale", "evicted", "failed", "cleared"]


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
class Failure:
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


class GroupStore:
    """Groups of ``num_repeat`` episodes per task, batches by the job's collection method.

    Args:
        job: sizes, method and bounds come from it.
        shares: learns which clients' episodes wait.
    """

    def __init__(self, job: TrainJob, shares: Shares) -> None:
        self._job = job
        self.method = method_of(job.collection, job.batch_size, job.num_repeat)
        self._shares = shares
        #: finished and running train episodes at most; a batch and all slots must fit, or collecting could deadlock
        self.bound = max(job.max_cached_episodes, job.batch_size * job.num_repeat + job.slots)
        self._version = 0
        self._numbers = 0
        self._open: dict[str, Group] = {}
        self._whole: dict[int, Group] = {}
        #: groups with losses and no trajectory yet: they will be dropped once whole
        self._losses: OrderedDict[str, Group] = OrderedDict()
        #: changed losses by task since :meth:`take_losses`
        self._lost: dict[str, GroupRow] = {}
        #: waiting episodes in groups of at least two
        self.trainable = 0
        #: whole groups, episodes in groups of at least two, and all episodes that will not be too old after one more
        #: sync
        self._lasting = (0, 0, 0)
        self._cache_full = False
        self._taken: Outstanding | None = None
        #: finished episodes that wait for a batch
        self.episodes = 0

    # ------------------------------------------------------------------ what is

    @property
    def outstanding(self) -> TrainBatch | None:
        return self._taken.batch if self._taken else None

    @property
    def whole_groups(self) -> int:
        return len(self._whole)

    def ready(self, any_agreed: bool = False, all_agreed: bool = False) -> bool:
        """Whether :meth:`take` gives a batch, with these agreements."""
        if self._taken is not None:
            return self._taken.back
        return self.method.ready(Tally(len(self._whole), self.trainable, any_agreed, all_agreed, self._cache_full))

    def full(self, running: int, any_agreed: bool = False, all_agreed: bool = False) -> bool:
        """Whether another train episode beside ``running`` ones would be sampled in vain while a batch is out.

        What waits, without what will be too old, makes the next batch already; or, where the batch has a size, what
        waits and runs fills the ``max_staleness`` batches that still come in time.
        """
        whole, trainable, episodes = self._lasting
        if self.method.ready(Tally(whole, trainable, any_agreed, all_agreed, self._cache_full)):
            return True
        batches = self._job.max_staleness
        if batches is None or self.method.by_agreement:
            return False
        return episodes + running >= batches * self._job.batch_size * self._job.num_repeat

    def waiting(self) -> Iterator[Group]:
        """The groups that wait for a batch, whole ones first; not to be changed."""
        yield from self._whole.values()
        yield from self._open.values()

    def tasks(self) -> dict[str, int]:
        """Finished episodes that wait, by task, whole groups first."""
        counts: Counter[str] = Counter()
        for group in self.waiting():
            counts[group.task_id] += len(group.members)
        return dict(counts)

    # ------------------------------------------------------------------ finished episodes

    def add(self, client_uuid: str, trajectory: Trajectory) -> list[Dropped]:
        """Add one finished episode; returns what was dropped because of it, perhaps itself."""
        member = Member(client_uuid, trajectory, min([t.min_policy_version for t in trajectory.timelines]))
        if self._stale(member):
            return [_dropped([member], "stale", self._stale_reason())]
        task_id = trajectory.task_id
        group = self._open.get(task_id) or self._losses.pop(task_id, None) or self._new_group(task_id)
        self._open[task_id] = group
        self._count(group, -1)
        group.members.append(member)
        self._count(group, 1)
        self.episodes += 1
        self.trainable += _trainable(len(group.members)) - _trainable(len(group.members) - 1)
        self._shares.joined(client_uuid, task_id)
        return self._settle(group)

    def lose(self, task_id: str) -> list[Dropped]:
        """An episode of this task ended with a result but without a trajectory.

        Where batches consist of whole groups, its group is dropped once ``num_repeat`` of its episodes have ended: the
        mean in the advantage would lack the lost answer. The other methods train on what there is.
        """
        if not self.method.whole_groups:
            return []
        group = self._open.get(task_id) or self._losses.get(task_id)
        if group is None:
            group = self._losses[task_id] = self._new_group(task_id)
            if len(self._losses) > self.bound:
                self._forget_losses(self._losses.popitem(last=False)[1])
        group.lost += 1
        self._lost[task_id] = GroupRow(task_id, group.lost, group.version)
        return self._settle(group)

    def take_losses(self) -> list[GroupRow]:
        """The losses of groups that changed since the last call."""
        if not self._lost:
            return []
        lost, self._lost = self._lost, {}
        return list(lost.values())

    def advance(self, policy_version: int) -> list[Dropped]:
        """New weights are served: drop whole groups with an episode that is too old, and old episodes of open groups.

        A version from the future (the engine began anew) is not old, and the batch that is out is exempt.
        """
        self._version = policy_version
        if self._job.max_staleness is None:
            return []
        self._lasting = (0, 0, 0)
        for group in self.waiting():
            self._count(group, 1)
        gone: list[Member] = []
        for group in [g for g in self._whole.values() if any(map(self._stale, g.members))]:
            gone += self._remove(group)
        for group in [g for g in self._open.values() if any(map(self._stale, g.members))]:
            gone += self._shrink(group)
        for group in [g for g in self._losses.values() if self._old(g.version)]:
            self._forget_losses(self._losses.pop(group.task_id))
        if not gone:
            return []
        self._cache_full = False
        return [_dropped(gone, "stale", self._stale_reason())]

    def has_room(self, running: int) -> bool:
        """Whether what waits leaves room for so many ``running`` train episodes."""
        return self.episodes + running <= self.bound

    def make_room(self, running: int, count: int, ready: bool) -> tuple[str, list[Dropped]]:
        """Why ``count`` more train episodes may not begin beside ``running`` ones (or an empty string), and what was
        dropped to make room for them.

        While there is a batch (``ready``, or one is out) they wait. Otherwise the oldest group that no batch could use
        is dropped: ``bound`` guarantees that there is one, unless all that waits lacks only an agreement.
        """
        if self.has_room(running + count):
            return "", []
        reason = f"{self.episodes} finished episodes wait for a batch (max_cached_episodes); they are trained first"
        if ready or self._taken is not None:
            return reason, []
        if self.method.by_agreement and self.trainable >= self._job.batch_size * self._job.num_repeat:
            self._cache_full = True
            return reason, []
        gone: list[Member] = []
        for group in self._useless():
            gone += self._remove(group)
            if self.episodes + running + count <= self.bound:
                break
        dropped = (
            [_dropped(gone, "evicted", f"more than {self.bound} episodes were finished or running")] if gone else []
        )
        return (reason if self.episodes + running + count > self.bound else ""), dropped

    def clear(self, reason: str) -> list[Dropped]:
        """Drop everything that waits, and the batch that is out."""
        dropped = [self._discard("cleared", reason)] if self._taken else []
        gone = [member for group in list(self.waiting()) for member in self._remove(group)]
        while self._losses:
            self._forget_losses(self._losses.popitem()[1])
        self._cache_full = False
        return [*dropped, _dropped(gone, "cleared", reason)] if gone else dropped

    # ------------------------------------------------------------------ batches

    def seal(self) -> None:
        """The batch is decided: as with a full cache, it stays ready even if another client disagrees."""
        # a batch that came back was decided when it was first taken, which says nothing about the groups behind it
        self._cache_full = self._cache_full or self._taken is None

    def take(self, any_agreed: bool = False, all_agreed: bool = False) -> TrainBatch:
        """The next batch, out until :meth:`confirm`, :meth:`fail` or :meth:`give_back`; one that came back, as it was.

        Raises:
            StateError: no batch is ready, or one is out.
        """
        if self._taken is not None:
            if not self._taken.back:
                raise StateError(f"batch {self._taken.batch.batch_id} is still out")
            self._taken.back = False
            return self._taken.batch
        if not self.ready(any_agreed, all_agreed):
            raise StateError(f"no batch is ready: {self.episodes} episodes, {len(self._whole)} whole groups wait")
        trainable = [group for group in self.waiting() if len(group.members) >= MIN_GROUP]
        groups = self.method.select(self._whole.values(), sorted(trainable, key=lambda group: group.number))
        batch = TrainBatch(batch_id=uuid.uuid4().hex, groups=[group.train_group() for group in groups])
        self._taken = Outstanding(batch, [m.client_uuid for group in groups for m in self._remove(group)])
        self._cache_full = False
        return batch

    def confirm(self, batch_id: str) -> Outstanding | None:
        """The batch that ``batch_id`` names, now trained and gone; ``None`` if it is not the one that was taken."""
        taken = self._named(batch_id)
        if taken is not None:
            self._taken = None
        return taken

    def fail(self, batch_id: str) -> Failure | None:
        """The trainer reported an error while it had this batch; ``None`` if it is not the one that was taken."""
        taken = self._named(batch_id)
        if taken is None:
            return None
        taken.attempts += 1
        taken.back = True
        return Failure(taken.batch, taken.attempts, self._give_up())

    def give_back(self) -> bool:
        """The batch that is out was not trained, for no fault of its own: it is the next one again."""
        if self._taken is None or self._taken.back:
            return False
        self._taken.back = True
        return True

    def restore(self, batch: TrainBatch, attempts: int) -> list[Dropped]:
        """The batch that was out when the server stopped comes back, or is dropped if that was still to be done."""
        clients = [""] * sum(len(group.trajectories) for group in batch.groups)
        self._taken = Outstanding(batch, clients, attempts, back=True)
        dropped = self._give_up()
        return [dropped] if dropped else []

    def restore_losses(self, losses: GroupRow) -> list[Dropped]:
        """Restore the losses of a group after a restart; its members, if any, are here already."""
        group = self._open.get(losses.task_id)
        if group is None:
            group = self._losses[losses.task_id] = self._new_group(losses.task_id)
        group.lost, group.version = losses.lost, losses.version
        return self._settle(group)

    # ------------------------------------------------------------------ inside

    def _forget_losses(self, group: Group) -> None:
        self._lost[group.task_id] = GroupRow(group.task_id, 0, group.version)

    def _new_group(self, task_id: str) -> Group:
        self._numbers += 1
        return Group(self._numbers, task_id, self._version)

    def _settle(self, group: Group) -> list[Dropped]:
        """Close the group if all its episodes have ended."""
        if len(group.members) + group.lost < self._job.num_repeat:
            return []
        members = self._remove(group)
        if group.lost:
            lost = f"{group.lost} of {self._job.num_repeat} episodes of task {group.task_id!r} cannot be trained"
            return [_dropped(members, "lost", lost)] if members else []
        if objection := self.method.objection(group):
            return [_dropped(members, "uninformative", objection)]
        self._whole[group.number] = group
        self._count(group, 1)
        self.episodes += len(members)
        self.trainable += len(members)
        self._shares.completed(group.clients)
        return []

    def _remove(self, group: Group) -> list[Member]:
        """Take the group out of the place where it waits."""
        self._count(group, -1)
        if self._whole.pop(group.number, None) is not None:
            self._shares.left(group.clients)
        else:
            self._open.pop(group.task_id, None)
            self._losses.pop(group.task_id, None)
            if group.lost:
                self._forget_losses(group)
            self._shares.parted(group.clients, group.task_id)
        self.episodes -= len(group.members)
        self.trainable -= _trainable(len(group.members))
        return group.members

    def _shrink(self, group: Group) -> list[Member]:
        """Take the old episodes out of an open group, and the group with the last of them."""
        old = [member for member in group.members if self._stale(member)]
        if len(old) == len(group.members):
            return self._remove(group)
        self._count(group, -1)
        group.members = [member for member in group.members if not self._stale(member)]
        self._count(group, 1)
        self.episodes -= len(old)
        self.trainable -= _trainable(len(old) + len(group.members)) - _trainable(len(group.members))
        self._shares.parted([member.client_uuid for member in old], group.task_id)
        return old

    def _count(self, group: Group, sign: int) -> None:
        """Add to the counts, or subtract, what of a waiting ``group`` will not be too old after one more sync."""
        kept = sum(not self._old(member.oldest_version - 1) for member in group.members)
        closed = group.number in self._whole
        if closed and kept < len(group.members):
            kept = 0
        whole, trainable, episodes = self._lasting
        self._lasting = (
            whole + sign * (closed and kept > 0),
            trainable + sign * _trainable(kept),
            episodes + sign * kept,
        )

    def _useless(self) -> list[Group]:
        """Open groups that cannot go into a batch as they are, oldest first."""
        groups = self._open.values()
        return list(groups) if self.method.whole_groups else [g for g in groups if len(g.members) < MIN_GROUP]

    def _old(self, version: int) -> bool:
        return self._job.max_staleness is not None and self._version - version > self._job.max_staleness

    def _stale(self, member: Member) -> bool:
        return self._old(member.oldest_version)

    def _stale_reason(self) -> str:
        return f"sampled more than {self._job.max_staleness} weight syncs before version {self._version}"

    def _named(self, batch_id: str) -> Outstanding | None:
        return self._taken if self._taken and self._taken.batch.batch_id == batch_id else None

    def _give_up(self) -> Dropped | None:
        if self._taken is None or self._taken.attempts < self._job.batch_attempts:
            return None
        return self._discard("failed", f"the trainer failed on its batch {self._taken.attempts} times")

    def _discard(self, cause: DropCause, reason: str) -> Dropped:
        assert self._taken is not None
        taken, self._taken = self._taken, None
        episodes = (t.episode_uuid for group in taken.batch.groups for t in group.trajectories)
        return Dropped(tuple(episodes), tuple(taken.client_uuids), cause, reason, EpisodeState.BATCHED)


def _trainable(episodes: int) -> int:
    """How many of a group of ``episodes`` could be trained."""
    return episodes if episodes >= MIN_GROUP else 0


def _dropped(members: Iterable[Member], cause: DropCause, reason: str) -> Dropped:
    gone = list(members)
    episodes = tuple(member.trajectory.episode_uuid for member in gone)
    return Dropped(episodes, tuple(member.client_uuid for member in gone), cause, reason)
