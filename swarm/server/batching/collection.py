"""``Collection``: finished episodes from their end to the recorded step, and the clients that they come from.

Invariant: each train episode that ended with a result is in exactly one count: waiting, in the batch that is out,
trained, dropped or quarantined; exactly one step consumes a batch. Each decision is appended to the journal as rows, in
the same turn of the event loop. Nothing here waits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from swarm.job import TrainJob
from swarm.protocol import EpisodeType, SwarmThrottlePolicy
from swarm.server.batching.clients import Client, Clients, RollingClock
from swarm.server.batching.groups import Dropped, Failure, GroupStore
from swarm.server.batching.shares import Shares, Throttle
from swarm.server.journal.rows import (
    AgreementRow,
    BatchRow,
    CountsRow,
    EndedHow,
    NoAgreementsRow,
    Recovered,
    StateRow,
)
from swarm.states import EpisodeEvent, EpisodeState, next_episode
from swarm.status import ClientRow
from swarm.tokens import TrainBatch, Trajectory

logger = logging.getLogger(__name__)

#: seconds without a sign of life after which nobody waits for a client
CLIENT_TIMEOUT = 300.0


class Collection:
    """Finished episodes and clients of one job.

    Args:
        job: sizes, collection method, staleness and cache bounds come from it.
        client_timeout: seconds without a sign of life after which nobody waits for a client; only time in which the
            engine rolls counts, see :meth:`follow`.
        clock: seconds, monotonic; all times here are on it.
        append: takes rows for the journal.
        run_id: the run that the counts are of.

    Attributes:
        groups: what waits for a batch, and the batch that is out; only what changes no row is called from outside.
        shares: the episodes that run.
    """

    def __init__(
        self,
        job: TrainJob,
        client_timeout: float = CLIENT_TIMEOUT,
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
        self.groups = GroupStore(job, self.shares)
        self._throttle = Throttle(job, self.shares, self._clients, client_timeout, rolling)
        self._someone_throttled = False

    def follow(self, rolling: bool) -> None:
        """Whether the engine rolls from now on, so that claims can be granted; it does at first."""
        self._rolling.follow(rolling)

    # ------------------------------------------------------------------ clients

    def seen(self, client_uuid: str, *, train: bool = False) -> None:
        """A sign of life: the client polled, ended or agreed; ``train``: it asks for train episodes or ends one.

        Call it when a request of the client arrives, not when a waiting claim is retried.
        """
        self._clients.seen(client_uuid, train=train)

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
        if not self.groups.method.by_agreement:
            self._clients.seen(client_uuid, train=True)
            return f"the batch does not wait for agreement: the job collects by {self._job.collection}"
        self._clients.agree(client_uuid)
        self._append(AgreementRow(client_uuid))
        return ""

    @property
    def in_vain(self) -> bool:
        """Whether the clients agree on an empty batch: no task has two finished episodes, and none runs."""
        if self.groups.trainable or self.shares.running or self.groups.outstanding:
            return False
        return self.groups.method.agreed(self._clients.any_agreed, self._clients.all_agreed)

    def end_agreements(self) -> None:
        """Count anew who takes part in the next batch and who agrees on it; what waits stays."""
        self._clients.end_agreements()
        self._append(NoAgreementsRow())

    def rows(self) -> list[ClientRow]:
        """One row per client that is remembered, last seen first."""
        now = self._clock()
        return [self._row(name, client, now) for name, client in self._clients.rows()]

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
        if self.groups.has_room(self.shares.running + count):
            return ""
        reason, dropped = self.groups.make_room(self.shares.running, count, self.ready)
        self._drop(dropped)
        return reason

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
        return self._drop(self.groups.add(client_uuid, trajectory))

    def lose(self, task_id: str, *, quarantined: bool = False, alone: bool = True) -> list[Dropped]:
        """An episode of this task ended with a result but without a trajectory; ``alone``: its group may continue.

        Where batches consist of whole groups, its group is dropped once ``num_repeat`` of its episodes have ended: the
        mean in the advantage would lack the lost answer.
        """
        if quarantined:
            self.quarantined += 1
        else:
            self.dropped += 1
        self._count()
        return self._drop(self.groups.lose(task_id)) if alone else []

    def advance(self, policy_version: int) -> list[Dropped]:
        """New weights are served: drop what waits and was sampled more than ``max_staleness`` versions before."""
        return self._drop(self.groups.advance(policy_version))

    def begin_run(self, run_id: str, reason: str) -> int:
        """Drop everything that waits and the batch that is out, and count anew; running episodes and clients stay.

        Returns how many episodes were dropped.
        """
        self.end_agreements()
        dropped = self._drop(self.groups.clear(reason))
        self.run_id = run_id
        self.trained = self.dropped = self.quarantined = 0
        return sum(len(one.episode_uuids) for one in dropped)

    def restore(self, recovered: Recovered) -> None:
        """Fill an empty collection after a restart, and drop what was still to be dropped when the server stopped."""
        self.run_id = recovered.run_id
        self.trained, self.dropped, self.quarantined = recovered.trained, recovered.dropped, recovered.quarantined
        out = recovered.outstanding
        dropped = self.groups.restore(out.batch, out.attempts) if out else []
        for client_uuid, trajectory in recovered.finished:
            if self.groups.method.by_agreement:
                # it may be about to continue: a batch that waits for all must not leave at the moment of the restart
                self._clients.take_part(client_uuid)
            else:
                self._clients.remember(client_uuid)
            dropped += self.groups.add(client_uuid, trajectory)
        for losses in recovered.losses:
            dropped += self.groups.restore_losses(losses)
        for client_uuid in recovered.agreed:
            self._clients.restore_agreement(client_uuid)
        self._drop(dropped)

    # ------------------------------------------------------------------ batches

    @property
    def ready(self) -> bool:
        """Whether :meth:`take` gives a batch now."""
        # it is read several times per claim and end, mostly for methods without agreement
        if not self.groups.method.by_agreement:
            return self.groups.ready()
        return self.groups.ready(self._clients.any_agreed, self._clients.all_agreed)

    @property
    def full(self) -> bool:
        """Whether another train episode would be sampled in vain while a batch is out."""
        return self.groups.full(self.shares.running, self._clients.any_agreed, self._clients.all_agreed)

    def next_change(self) -> float | None:
        """When, on the clock, :attr:`ready` or a refused :meth:`admit` may change as time passes."""
        if not (self.groups.method.by_agreement or self._someone_throttled):
            return None
        lapse = self._clients.next_lapse() if self.groups.method.by_agreement else None
        lift = self._throttle.next_lift() if self._someone_throttled else None
        first = min((time for time in (lapse, lift) if time is not None), default=None)
        return None if first is None else self._rolling.when(first)

    def take(self) -> TrainBatch:
        """The next batch; it is out until :meth:`confirm`, :meth:`fail` or :meth:`give_back`.

        A batch that came back is the next one, with the same id and content. A new batch ends the agreements.

        Raises:
            StateError: no batch is ready, or one is out.
        """
        fresh = self.groups.outstanding is None
        batch = self.groups.take(self._clients.any_agreed, self._clients.all_agreed)
        if fresh:
            state = next_episode(EpisodeState.FINISHED, EpisodeEvent.TAKE)
            self._append(BatchRow(batch), StateRow(_uuids(batch), state, batch.batch_id))
            self.end_agreements()
            self._someone_throttled = False
        return batch

    def confirm(self, batch_id: str, step: int = 0) -> TrainBatch | None:
        """Training step ``step`` of this batch is done: it is consumed, whether it is out or back.

        Returns the batch; ``None`` if ``batch_id`` names another.
        """
        taken = self.groups.confirm(batch_id)
        if taken is None:
            return None
        self._clients.count(taken.client_uuids, "trained")
        uuids = _uuids(taken.batch)
        self.trained += len(uuids)
        self._append(StateRow(uuids, next_episode(EpisodeState.BATCHED, EpisodeEvent.STEP), step=step))
        self._count()
        return taken.batch

    def fail(self, batch_id: str) -> Failure | None:
        """The trainer reported an error while it had this batch: it comes back, or is dropped after ``batch_attempts``
        failures; ``None`` if it is not the batch that was taken."""
        failure = self.groups.fail(batch_id)
        if failure is not None:
            self._append(BatchRow(failure.batch, failure.attempts))
            if failure.dropped is not None:
                self._drop([failure.dropped])
        return failure

    # ------------------------------------------------------------------ inside

    def _drop(self, dropped: list[Dropped]) -> list[Dropped]:
        """Count and record what will never be trained, and how the losses of groups changed."""
        for one in dropped:
            logger.warning("%d finished episodes are not trained: %s", len(one.episode_uuids), one.reason)
            self._clients.count(one.client_uuids, "dropped")
            state = next_episode(one.state, EpisodeEvent.DROP)
            self._append(StateRow(one.episode_uuids, state, reason=one.reason, cause=one.cause))
            self.dropped += len(one.episode_uuids)
        if dropped:
            self._count()
        if losses := self.groups.take_losses():
            self._append(*losses)
        return dropped

    def _count(self) -> None:
        self._append(CountsRow(self.run_id, self.trained, self.dropped, self.quarantined))

    def _row(self, client_uuid: str, client: Client, now: float) -> ClientRow:
        return ClientRow(
            client_uuid=client_uuid,
            active=self._clients.is_active(client_uuid),
            idle_seconds=0.0 if client.in_flight else now - client.last_seen,
            running=self.shares.running_of(client_uuid),
            claimed=client.claimed,
            ended=client.ended,
            aborted=client.aborted,
            timed_out=client.timed_out,
            waiting=self.shares.waiting_of(client_uuid),
            trained=client.trained,
            dropped=client.dropped,
            groups=self.shares.places(client_uuid),
            throttled=client.throttled,
            takes_part=client.takes_part,
            agreed=client.agreed,
        )


def _uuids(batch: TrainBatch) -> list[str]:
    return [trajectory.episode_uuid for group in batch.groups for trajectory in group.trajectories]
