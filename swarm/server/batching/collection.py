"""``Collection``: finished episodes from their end to the recorded step, and the clients that they come from.

Invariant: each train episode that ended with a result is in exactly one count: waiting, in the batch that is out,
trained, dropped or quarantined; exactly one step consumes a batch. Each decision is appended to the journal as rows, in
the same turn of the event loop. Nothing here waits.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Container, Iterable

from swarm.errors import StateError
from swarm.job import TrainJob
from swarm.protocol import EpisodeType, SwarmThrottlePolicy
from swarm.server.batching.clients import Clients, RollingClock
from swarm.server.batching.groups import BatchFailure, DropCause, Dropped, Outstanding, WaitingGroups, dropped_from
from swarm.server.batching.methods import MIN_GROUP, FinishedGroup, Member, Tally, method_of
from swarm.server.batching.shares import Shares, Throttle, client_rows
from swarm.server.journal.rows import AgreementRow, BatchRow, CountsRow, EndedHow, NoAgreementsRow, Recovered, StateRow
from swarm.states import EpisodeEvent, EpisodeState, next_episode
from swarm.status import ClientRow
from swarm.tokens import TrainBatch, Trajectory

logger = logging.getLogger(__name__)


class Collection:
    """Finished episodes and clients of one job.

    Args:
        client_timeout: seconds without a sign of life after which nobody waits for a client; only time in which the
            engine rolls counts, see :meth:`follow`.
        run_id: the run that the counts are of.

    Attributes:
        method: says when there is a batch.
        groups: what waits for one; only read from outside.
        shares: the episodes that run.
        bound: finished and running train episodes at most; a batch and all slots fit, or collecting could deadlock.
    """

    def __init__(
        self,
        job: TrainJob,
        client_timeout: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
        append: Callable[..., None] = lambda *rows: None,
        run_id: str = "",
    ) -> None:
        self._job = job
        self._append = append
        self.run_id = run_id
        #: episodes of the run so far
        self.trained = self.dropped = self.quarantined = 0
        self._clock = clock
        self._rolling = rolling = RollingClock(clock)
        self._clients = Clients(client_timeout, rolling, clock)
        self.shares = Shares(job.num_repeat, client_timeout, rolling)
        self.method = method_of(job.collection, job.batch_size, job.num_repeat)
        self.bound = max(job.max_cached_episodes, job.batch_size * job.num_repeat + job.slots)
        self.groups = WaitingGroups(job, self.shares, self.bound)
        self._taken: Outstanding | None = None
        self._cache_full = False  # it counts as an agreement: nobody could collect more
        self._throttle = Throttle(job, self.shares, self._clients, client_timeout, rolling)
        self._someone_throttled = False

    def follow(self, rolling: bool) -> None:
        """Whether the engine rolls from now on, so that claims can be granted; it does at first."""
        self._rolling.follow(rolling)

    # ------------------------------------------------------------------ clients

    def seen(self, client_uuid: str, *, train: bool = False, task_hint: str = "") -> None:
        """A sign of life: the client polled, ended or agreed; ``train``: it asks for train episodes, of the task of
        ``task_hint``, or ends one.

        Call it when a request of the client arrives, not when a waiting claim is retried.
        """
        self._clients.seen(client_uuid, train=train)
        if train and task_hint:
            self.shares.asked(client_uuid, task_hint)

    def begin_call(self, client_uuid: str) -> None:
        """An LLM call of the client starts; the client is active until :meth:`end_call` and for a while after."""
        self._clients.begin_call(client_uuid, train=self.shares.running_of(client_uuid) > 0)

    def end_call(self, client_uuid: str) -> None:
        """An LLM call of the client is over, whatever its result."""
        self._clients.end_call(client_uuid, train=self.shares.running_of(client_uuid) > 0)

    def agree(self, client_uuid: str) -> str:
        """The client has no more for the current batch; returns why that does not count, or an empty string.

        It does not count if the job collects by another method. While no task has two finished episodes it counts, and
        waits: see :attr:`in_vain`.
        """
        if not self.method.by_agreement:
            self._clients.seen(client_uuid, train=True)
            return f"the batch does not wait for agreement: the job collects by {self._job.collection}"
        self._clients.agree(client_uuid)
        self._append(AgreementRow(client_uuid))
        return ""

    @property
    def in_vain(self) -> bool:
        """Whether the clients agree on an empty batch: no task has two finished episodes, and none runs."""
        if self.groups.trainable or self.shares.running or self._taken:
            return False
        return self.method.agreed(self._clients.any_agreed, self._clients.all_agreed)

    def end_agreements(self) -> None:
        """Count anew who takes part in the next batch and who agrees on it; what waits stays."""
        self._clients.end_agreements()
        self._append(NoAgreementsRow())

    def rows(self) -> list[ClientRow]:
        """One row for each of :meth:`Clients.rows`."""
        return client_rows(self._clients, self.shares, self._clock())

    @property
    def silent_clients(self) -> int:
        """How many are remembered and not active."""
        return self._clients.silent

    # ------------------------------------------------------------------ claims

    def admit(self, client_uuid: str, episode_type: EpisodeType, count: int, policy: SwarmThrottlePolicy | None) -> str:
        """Why a claim of ``count`` episodes must wait, or an empty string; ask only once ``count`` slots are free.

        It waits while its client has its share of the batch (the policy), or while the cache of finished episodes is
        full and a batch is ready or out. A full cache with no batch in sight drops its oldest incomplete group, or,
        where clients agree on the batch, makes a batch of what there is: :attr:`ready` may be true afterwards. A claim
        that was refused must be retried at :meth:`next_change` at the latest.
        """
        if episode_type == "eval":
            return ""
        refusal = self._throttle.refusal(client_uuid, count, policy) if policy else ""
        self._clients.throttled(client_uuid, bool(refusal))
        if refusal:
            self._someone_throttled = True
            return refusal
        excess = self.groups.episodes + self.shares.running + count - self.bound
        if excess <= 0:
            return ""
        finished = f"{self.groups.episodes} finished episodes"
        reason = f"{finished} wait for a batch (max_cached_episodes); they are trained first"
        if self.ready or self._taken is not None:
            return reason
        if self.method.by_agreement and self.groups.trainable >= self._job.batch_size * self._job.num_repeat:
            self._cache_full = True
            return reason
        # no batch could use these groups as they are
        gone = self.groups.evict(excess, self._job.num_repeat if self.method.whole_groups else MIN_GROUP)
        self._drop(dropped_from(gone, "evicted", f"more than {self.bound} episodes were finished or running"))
        return reason if len(gone) < excess else ""

    def claimed(self, client_uuid: str, episode_type: EpisodeType, task_hint: str = "", count: int = 1) -> None:
        """The client got ``count`` episodes; ``task_hint`` is the policy's ``current_task_id``, or empty.

        After a restart, call it once for each running episode.
        """
        train = episode_type == "train"
        self._clients.seen(client_uuid, train=train).claimed += count
        if train:
            self.shares.claimed(client_uuid, task_hint, count)

    def released(self, client_uuid: str, episode_type: EpisodeType, task_hint: str, how: EndedHow) -> None:
        """One episode that was :meth:`claimed` is over; call it before :meth:`add` or :meth:`lose`."""
        train = episode_type == "train"
        if how == "ended":
            self._clients.seen(client_uuid, train=train).ended += 1
        elif how == "aborted":
            self._clients.seen(client_uuid, train=train).aborted += 1
        elif how != "engine":
            self._clients.count([client_uuid], "timed_out")
        if train and how in ("ended", "aborted"):
            self._clients.take_part(client_uuid)
        if train:
            self.shares.released(client_uuid, task_hint)

    # ------------------------------------------------------------------ finished episodes

    def add(self, client_uuid: str, trajectory: Trajectory) -> list[Dropped]:
        """Add one finished episode; returns what was dropped because of it, perhaps itself."""
        return self._drop(self._added(client_uuid, trajectory))

    def lose(self, task_id: str, *, quarantined: bool = False, alone: bool = True) -> list[Dropped]:
        """An episode of this task ended with a result but without a trajectory; ``alone``: its group may continue.

        Where batches consist of whole groups, its group is dropped once ``num_repeat`` of its episodes have ended: the
        mean in the advantage would lack the lost answer. The other methods train on what there is.
        """
        self.quarantined += quarantined
        self.dropped += not quarantined
        self._count()
        if not (alone and self.method.whole_groups):
            return []
        return self._drop(self._settled(self.groups.lack(task_id)))

    def advance(self, policy_version: int) -> list[Dropped]:
        """New weights are served: drop what waits and was sampled more than ``max_staleness`` versions before."""
        gone = self.groups.expire(policy_version)
        self._cache_full = self._cache_full and not gone
        return self._drop(self._stale(gone))

    def begin_run(self, run_id: str, reason: str) -> int:
        """Drop everything that waits and the batch that is out, and count anew; running episodes and clients stay.

        Returns how many episodes were dropped.
        """
        self.end_agreements()
        dropped = self._drop(self._discarded("cleared", reason) + dropped_from(self.groups.clear(), "cleared", reason))
        self._cache_full = False
        self.run_id = run_id
        self.trained = self.dropped = self.quarantined = 0
        return sum(len(group.episode_uuids) for group in dropped)

    def forget(self, episode_uuids: Container[str], reason: str) -> None:
        """Train none of these any more, nor their groups. A trainer that has the batch may use them still; the batch
        that is sent again does not have them."""
        dropped = dropped_from(self.groups.forget(episode_uuids), "erased", reason)
        self._cache_full = self._cache_full and not dropped
        if self._taken is not None and (out := self._taken.forget(episode_uuids, reason)):
            self._append(BatchRow(self._taken.batch, self._taken.attempts))
            self._is_empty()
            dropped += out
        self._drop(dropped)

    def restore(self, recovered: Recovered) -> None:
        """Fill an empty collection after a restart, and drop what was still to be dropped when the server stopped."""
        self.run_id = recovered.run_id
        self.trained, self.dropped, self.quarantined = recovered.trained, recovered.dropped, recovered.quarantined
        if (out := recovered.outstanding) is not None:
            self._taken = Outstanding(out.batch, [""] * len(out.batch.trajectories), out.attempts, back=True)
        dropped = self._given_up()
        for client_uuid, trajectory in recovered.finished:
            if self.method.by_agreement:
                # it may be about to continue: a batch that waits for all must not leave at the moment of the restart
                self._clients.take_part(client_uuid)
            else:
                self._clients.remember(client_uuid)
            dropped += self._added(client_uuid, trajectory)
        for losses in recovered.losses:
            dropped += self._settled(self.groups.restore_losses(losses))
        for client_uuid in recovered.agreed:
            self._clients.restore_agreement(client_uuid)
        self._drop(dropped)

    # ------------------------------------------------------------------ batches

    @property
    def outstanding(self) -> TrainBatch | None:
        """The batch that was taken, whether it is out or back."""
        return self._taken.batch if self._taken else None

    @property
    def ready(self) -> bool:
        """Whether :meth:`take` gives a batch now."""
        if self._taken is not None:
            return self._taken.back
        return self.method.ready(self._tally(self.groups.whole_groups, self.groups.trainable))

    @property
    def full(self) -> bool:
        """Whether another train episode would be sampled in vain while a batch is out.

        What waits, without what will be too old, makes the next batch already; or, where the batch has a size, what
        waits and runs fills the ``max_staleness`` batches that still come in time.
        """
        whole, trainable, episodes = self.groups.tally_after_sync
        if self.method.ready(self._tally(whole, trainable)):
            return True
        batches = self._job.max_staleness
        if batches is None or self.method.by_agreement:
            return False
        return episodes + self.shares.running >= batches * self._job.batch_size * self._job.num_repeat

    def next_change(self) -> float | None:
        """When, on the clock, :attr:`ready` or a refused :meth:`admit` may change as time passes."""
        lapse = self._clients.next_lapse() if self.method.by_agreement else None
        lift = self._throttle.next_lift() if self._someone_throttled else None
        first = min((time for time in (lapse, lift) if time is not None), default=None)
        return None if first is None else self._rolling.when(first)

    def seal(self) -> None:
        """The batch is decided: as with a full cache, it stays ready even if another client disagrees."""
        # a batch that came back was decided when it was first taken, which says nothing about the groups behind it
        self._cache_full = self._cache_full or self._taken is None

    def take(self) -> TrainBatch:
        """The next batch; it is out until :meth:`confirm`, :meth:`fail` or :meth:`give_back`.

        A batch that came back is the next one, with the same id and content. A new batch ends the agreements.

        Raises:
            StateError: no batch is ready, or one is out.
        """
        if self._taken is not None and self._taken.back:
            self._taken.back = False
            return self._taken.batch
        if not self.ready:
            episodes, whole = self.groups.episodes, self.groups.whole_groups
            raise StateError(f"no batch is ready: {episodes} episodes, {whole} whole groups wait")
        trainable = [group for group in self.groups.waiting() if len(group.members) >= MIN_GROUP]
        groups = self.method.select(self.groups.whole.values(), sorted(trainable, key=lambda group: group.number))
        batch = TrainBatch(batch_id=uuid.uuid4().hex, groups=[group.train_group() for group in groups])
        self._taken = Outstanding(batch, [m.client_uuid for group in groups for m in self.groups.remove(group)])
        self._cache_full = self._someone_throttled = False
        state = next_episode(EpisodeState.FINISHED, EpisodeEvent.TAKE)
        self._append(BatchRow(batch), StateRow(_uuids(batch), state, batch.batch_id))
        self.end_agreements()
        return batch

    def give_back(self) -> bool:
        """The batch that is out was not trained, for no fault of its own: it is the next one again."""
        if self._taken is None or self._taken.back:
            return False
        self._taken.back = True
        return not self._is_empty()

    def confirm(self, batch_id: str, step: int = 0) -> TrainBatch | None:
        """Training step ``step`` of this batch is done: it is consumed, whether it is out or back.

        Returns the batch; ``None`` if ``batch_id`` names another.
        """
        if (taken := self._named(batch_id)) is None:
            return None
        self._taken = None
        self._clients.count(taken.client_uuids, "trained")
        uuids = _uuids(taken.batch)
        self.trained += len(uuids)
        self._append(StateRow(uuids, next_episode(EpisodeState.BATCHED, EpisodeEvent.STEP), step=step))
        self._count()
        return taken.batch

    def fail(self, batch_id: str) -> BatchFailure | None:
        """The trainer reported an error while it had this batch: it comes back, or is dropped after ``batch_attempts``
        failures; ``None`` if it is not the batch that was taken."""
        if (taken := self._named(batch_id)) is None:
            return None
        taken.attempts += 1
        taken.back = True
        self._append(BatchRow(taken.batch, taken.attempts))
        self._is_empty()
        dropped = self._drop(self._given_up())
        return BatchFailure(taken.batch, taken.attempts, dropped[0] if dropped else None)

    def _tally(self, whole_groups: int, trainable_episodes: int) -> Tally:
        # it is made several times per claim and end, mostly for methods without agreement
        asked = self.method.by_agreement
        any_agreed, all_agreed = asked and self._clients.any_agreed, asked and self._clients.all_agreed
        return Tally(whole_groups, trainable_episodes, any_agreed, all_agreed, self._cache_full)

    def _added(self, client_uuid: str, trajectory: Trajectory) -> list[Dropped]:
        member = Member(client_uuid, trajectory, min([t.min_policy_version for t in trajectory.timelines]))
        if self.groups.is_old(member.oldest_version):
            return self._stale([member])
        return self._settled(self.groups.join(member))

    def _settled(self, group: FinishedGroup) -> list[Dropped]:
        """What is dropped of an open group if all its episodes have ended; it is whole then, or gone."""
        if len(group.members) + group.lost < self._job.num_repeat:
            return []
        if group.lost:
            lost = f"{group.lost} of {self._job.num_repeat} episodes of task {group.task_id!r} cannot be trained"
            return dropped_from(self.groups.remove(group), "lost", lost)
        if objection := self.method.objection(group):
            return dropped_from(self.groups.remove(group), "uninformative", objection)
        self.groups.complete(group)
        return []

    def _stale(self, members: Iterable[Member]) -> list[Dropped]:
        reason = f"sampled more than {self._job.max_staleness} weight syncs before version {self.groups.version}"
        return dropped_from(members, "stale", reason)

    def _is_empty(self) -> bool:
        """Whether the batch that came back has nothing left: there is none then."""
        if self._taken is None or not self._taken.back or self._taken.batch.groups:
            return False
        self._taken = None
        return True

    def _named(self, batch_id: str) -> Outstanding | None:
        return self._taken if self._taken and self._taken.batch.batch_id == batch_id else None

    def _given_up(self) -> list[Dropped]:
        if self._taken is None or self._taken.attempts < self._job.batch_attempts:
            return []
        return self._discarded("failed", f"the trainer failed on its batch {self._taken.attempts} times")

    def _discarded(self, cause: DropCause, reason: str) -> list[Dropped]:
        """The batch that was taken, if there is one, is gone."""
        if (taken := self._taken) is None:
            return []
        self._taken = None
        return [Dropped(_uuids(taken.batch), tuple(taken.client_uuids), cause, reason, EpisodeState.BATCHED)]

    def _drop(self, dropped: list[Dropped]) -> list[Dropped]:
        """Count and record what will never be trained, and how the losses of groups changed."""
        for group in dropped:
            logger.warning("%d finished episodes are not trained: %s", len(group.episode_uuids), group.reason)
            self._clients.count(group.client_uuids, "dropped")
            state = next_episode(group.state, EpisodeEvent.DROP)
            self._append(StateRow(group.episode_uuids, state, reason=group.reason, cause=group.cause))
            self.dropped += len(group.episode_uuids)
        if dropped:
            self._count()
        if changed := self.groups.changed_losses:
            self._append(*changed.values())
            changed.clear()
        return dropped

    def _count(self) -> None:
        self._append(CountsRow(self.run_id, self.trained, self.dropped, self.quarantined))


def _uuids(batch: TrainBatch) -> tuple[str, ...]:
    return tuple(trajectory.episode_uuid for trajectory in batch.trajectories)
