"""``Collection``: finished episodes from their end to the recorded step, and the clients that they come from.

Invariant: each train episode that ended with a result is in exactly one count: waiting, in the batch that is out,
trained, dropped or quarantined; exactly one step consumes a batch. Each decision is appended to the journal as rows, in
the same turn of the event loop. Nothing here waits.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Literal

from swarm.errors import StateError
from swarm.job import TrainJob
from swarm.protocol import EpisodeType, SwarmThrottlePolicy
from swarm.server.batching.clients import Clients, RollingClock
from swarm.server.batching.groups import (
    MIN_GROUP,
    FinishedGroup,
    Member,
    Outstanding,
    Tally,
    WaitingGroups,
    method_of,
)
from swarm.server.batching.shares import Shares, Throttle, client_rows
from swarm.server.journal.rows import AgreementRow, BatchRow, CountsRow, EndedHow, NoAgreementsRow, Recovered, StateRow
from swarm.states import EpisodeState
from swarm.status import ClientRow
from swarm.tokens import TrainBatch, Trajectory

logger = logging.getLogger(__name__)

#: Why finished episodes will never be trained; for counters.
DropCause = Literal["lost", "uninformative", "stale", "evicted", "failed", "cleared", "erased"]


class Collection:
    """Finished episodes and clients of one job.

    Args:
        client_timeout: seconds without a sign of life after which nobody waits for a client; only time in which the
            engine rolls counts, see :meth:`follow`.
        run_id: the run that the counts are of.
        before: the collection of the job before, whose clients go on.

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
        before: Collection | None = None,
    ) -> None:
        self._job = job
        self._append = append
        self.run_id = run_id
        #: episodes of the run so far
        self.trained = self.dropped = self.quarantined = 0
        self._clock = clock
        self._rolling = rolling = RollingClock(clock) if before is None else before._rolling
        self._clients = Clients(client_timeout, rolling, clock) if before is None else before._clients
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
        self._clients.seen(client_uuid, train=self.shares.running_of(client_uuid) > 0).in_flight += 1

    def end_call(self, client_uuid: str) -> None:
        """An LLM call of the client is over, whatever its result."""
        self._clients.seen(client_uuid, train=self.shares.running_of(client_uuid) > 0).in_flight -= 1

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
        return self.method.agreed(self._clients)

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
        self._drop(gone, "evicted", f"more than {self.bound} episodes were finished or running")
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

    def add(self, client_uuid: str, trajectory: Trajectory) -> None:
        """Add one finished episode; something may be dropped because of it, perhaps itself."""
        member = Member(client_uuid, trajectory, min([t.min_policy_version for t in trajectory.timelines]))
        if self.groups.is_old(member.oldest_version):
            self._drop_stale([member])
        else:
            self._settle(self.groups.join(member))

    def lose(self, task_id: str, *, quarantined: bool = False, alone: bool = True) -> None:
        """An episode of this task ended with a result but without a trajectory; ``alone``: its group may continue.

        Where batches consist of whole groups, its group is dropped once ``num_repeat`` of its episodes have ended: the
        mean in the advantage would lack the lost answer. The other methods train on what there is.
        """
        self.quarantined += quarantined
        self.dropped += not quarantined
        self._count()
        if alone and self.method.whole_groups:
            self._settle(self.groups.lack(task_id))
            self._record_losses()

    def advance(self, policy_version: int) -> None:
        """New weights are served: drop what waits and was sampled more than ``max_staleness`` versions before."""
        gone = self.groups.expire(policy_version)
        self._cache_full = self._cache_full and not gone
        self._drop_stale(gone)

    def begin_run(self, run_id: str, reason: str) -> None:
        """Drop everything that waits and the batch that is out, and count anew; running episodes and clients stay."""
        self.end_agreements()
        self._discard("cleared", reason)
        self._drop(self.groups.clear(), "cleared", reason)
        self._cache_full = False
        self.run_id = run_id
        self.trained = self.dropped = self.quarantined = 0

    def forget(self, episode_uuids: Container[str], reason: str) -> None:
        """Train none of these any more, nor their groups. A trainer that has the batch may use them still; the batch
        that is sent again does not have them."""
        gone = self.groups.forget(episode_uuids)
        self._cache_full = self._cache_full and not gone
        self._drop(gone, "erased", reason)
        if self._taken is not None and (out := self._taken.forget(episode_uuids)):
            self._append(BatchRow(self._taken.batch, self._taken.attempts))
            self._is_empty()
            self._drop(out, "erased", reason)

    def restore(self, recovered: Recovered) -> None:
        """Fill an empty collection after a restart, and drop what was still to be dropped when the server stopped."""
        self.run_id = recovered.run_id
        self.trained, self.dropped, self.quarantined = recovered.trained, recovered.dropped, recovered.quarantined
        if (out := recovered.outstanding) is not None:
            self._taken = Outstanding.restored(out)
        self._give_up()
        for client_uuid, trajectory in recovered.finished:
            if self.method.by_agreement:
                # it may be about to continue: a batch that waits for all must not leave at the moment of the restart
                self._clients.take_part(client_uuid)
            else:
                self._clients.remember(client_uuid)
            self.add(client_uuid, trajectory)
        for losses in recovered.losses:
            self._settle(self.groups.restore_losses(losses))
        for client_uuid in recovered.agreed:
            self._clients.restore_agreement(client_uuid)

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
        return self.method.ready(self._tally(len(self.groups.whole), self.groups.trainable))

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
            episodes, whole = self.groups.episodes, len(self.groups.whole)
            raise StateError(f"no batch is ready: {episodes} episodes, {whole} whole groups wait")
        groups = self.method.select(self.groups)
        batch = TrainBatch(batch_id=uuid.uuid4().hex, groups=[group.train_group() for group in groups])
        self._taken = Outstanding(batch, groups)
        for group in groups:
            self.groups.remove(group)
        self._cache_full = self._someone_throttled = False
        self._append(BatchRow(batch), StateRow(_uuids(batch), EpisodeState.BATCHED, batch.batch_id))
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
        self._clients.count((member.client_uuid for member in taken.members), "trained")
        uuids, tokens = _uuids(taken.batch), _sampled_tokens(taken.members)
        self.trained += len(uuids)
        self._append(StateRow(uuids, EpisodeState.TRAINED, step=step, tokens=tokens))
        self._count()
        return taken.batch

    def fail(self, batch_id: str, error: str) -> None:
        """The trainer reported ``error`` while it had this batch: it comes back, or is dropped after ``batch_attempts``
        failures; nothing happens if it is not the batch that was taken."""
        if (taken := self._named(batch_id)) is None:
            return
        taken.attempts += 1
        taken.back = True
        self._append(BatchRow(taken.batch, taken.attempts))
        what = "dropped" if taken.attempts >= self._job.batch_attempts else "tried again"
        logger.warning(
            "the trainer failed on batch %s for the %d. time (%s): it is %s", batch_id, taken.attempts, error, what
        )
        self._is_empty()
        self._give_up()

    def _tally(self, whole_groups: int, trainable_episodes: int) -> Tally:
        agreed = self._cache_full or self.method.agreed(self._clients)
        return Tally(whole_groups, trainable_episodes, agreed)

    def _settle(self, group: FinishedGroup) -> None:
        """An open group is whole if all its episodes have ended, or gone."""
        if len(group.members) + group.lost < self._job.num_repeat:
            return
        if group.lost:
            lost = f"{group.lost} of {self._job.num_repeat} episodes of task {group.task_id!r} cannot be trained"
            self._drop(self.groups.remove(group), "lost", lost)
        elif objection := self.method.objection(group):
            self._drop(self.groups.remove(group), "uninformative", objection)
        else:
            self.groups.complete(group)

    def _drop_stale(self, members: Sequence[Member]) -> None:
        reason = f"sampled more than {self._job.max_staleness} weight syncs before version {self.groups.version}"
        self._drop(members, "stale", reason)

    def _is_empty(self) -> bool:
        """Whether the batch that came back has nothing left: there is none then."""
        if self._taken is None or not self._taken.back or self._taken.batch.groups:
            return False
        self._taken = None
        return True

    def _named(self, batch_id: str) -> Outstanding | None:
        return self._taken if self._taken and self._taken.batch.batch_id == batch_id else None

    def _give_up(self) -> None:
        if self._taken is not None and self._taken.attempts >= self._job.batch_attempts:
            self._discard("failed", f"the trainer failed on its batch {self._taken.attempts} times")

    def _discard(self, cause: DropCause, reason: str) -> None:
        """The batch that was taken, if there is one, is gone."""
        if (taken := self._taken) is not None:
            self._taken = None
            self._drop(taken.members, cause, reason)

    def _drop(self, members: Sequence[Member], cause: DropCause, reason: str) -> None:
        """Count and record what will never be trained, if there is something: what waited, or was in a batch."""
        if members:
            logger.warning("%d finished episodes are not trained: %s", len(members), reason)
            self._clients.count((member.client_uuid for member in members), "dropped")
            uuids = tuple(member.trajectory.episode_uuid for member in members)
            tokens = _sampled_tokens(members)
            self._append(StateRow(uuids, EpisodeState.DROPPED, reason=reason, cause=cause, tokens=tokens))
            self.dropped += len(uuids)
            self._count()
        self._record_losses()

    def _record_losses(self) -> None:
        """Record how the losses of groups changed."""
        if changed := self.groups.changed_losses:
            self._append(*changed.values())
            changed.clear()

    def _count(self) -> None:
        self._append(CountsRow(self.run_id, self.trained, self.dropped, self.quarantined))


def _sampled_tokens(members: Iterable[Member]) -> int:
    return sum(member.trajectory.sampled_tokens for member in members)


def _uuids(batch: TrainBatch) -> tuple[str, ...]:
    return tuple(trajectory.episode_uuid for trajectory in batch.trajectories)
