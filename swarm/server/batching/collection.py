"""``Collection``: what the pool asks about finished episodes, the clients they come from, and the next batch.

Invariant: as in the parts it puts together, :mod:`~swarm.server.batching.groups` (every trajectory in one place),
:mod:`~swarm.server.batching.clients` and :mod:`~swarm.server.batching.throttle`. Pure logic on one event loop:
nothing here waits, writes or logs; whatever is dropped is returned, so that the caller can record and count it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from swarm.job import TrainJob
from swarm.protocol import ClientRow, EpisodeType, SwarmThrottlePolicy
from swarm.server.batching.clients import Client, Clients, RollingClock
from swarm.server.batching.groups import Dropped, Failure, GroupStore
from swarm.server.batching.methods import Group
from swarm.server.batching.shares import Shares
from swarm.server.batching.throttle import Throttle
from swarm.server.journal.rows import BatchRow, EndedHow, GroupRow
from swarm.tokens import TrainBatch, Trajectory

#: seconds without a sign of life after which nobody waits for a client
CLIENT_TIMEOUT = 300.0


@dataclass(frozen=True, slots=True)
class Admission:
    """Whether a claim may go on now (``reason`` is empty) or has to wait, and which finished episodes had to go to
    make room for it."""

    reason: str = ""
    dropped: tuple[Dropped, ...] = ()

    @property
    def granted(self) -> bool:
        return not self.reason


_GRANTED = Admission()


class Collection:
    """Finished episodes and clients of one job.

    Args:
        job: sizes, collection method, staleness and cache bounds come from it.
        client_timeout: seconds without a sign of life after which nobody waits for a client; only those count in which
            the engine rolls, see :meth:`follow`.
        clock: seconds, monotonic; of all times here.
    """

    def __init__(
        self,
        job: TrainJob,
        client_timeout: float = CLIENT_TIMEOUT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job = job
        self._clock = clock
        self._rolling = rolling = RollingClock(clock)
        self._clients = Clients(client_timeout, rolling, clock)
        self._shares = Shares(job.num_repeat, client_timeout, rolling)
        self._groups = GroupStore(job, self._shares)
        self._by_agreement = self._groups.by_agreement
        self._throttle = Throttle(job, self._shares, self._clients, client_timeout, rolling)
        self._someone_throttled = False

    def follow(self, rolling: bool) -> None:
        """Whether the engine rolls (claims can be granted) from now on; it does at first."""
        self._rolling.follow(rolling)

    # ------------------------------------------------------------------ clients

    def seen(self, client_uuid: str, *, train: bool = False) -> None:
        """A sign of life: the client polled, ended or agreed; ``train``: it asks for train episodes or ends one.

        Call it when a request of the client arrives, not when a waiting claim is tried again.
        """
        self._clients.seen(client_uuid, train=train)

    def begin_call(self, client_uuid: str) -> None:
        """An LLM call of the client starts; the client counts as active until :meth:`end_call` and a while after."""
        self._clients.begin_call(client_uuid, train=self._shares.running_of(client_uuid) > 0)

    def end_call(self, client_uuid: str) -> None:
        """An LLM call of the client is over, whatever came of it."""
        self._clients.end_call(client_uuid, train=self._shares.running_of(client_uuid) > 0)

    def agree(self, client_uuid: str) -> str:
        """The client has no more for the current batch; returns why that does not count, or an empty string.

        It does not count when the job collects by another method. While no task has two finished episodes it counts
        and waits; see :attr:`in_vain`.
        """
        if not self._by_agreement:
            self._clients.seen(client_uuid, train=True)
            return f"the batch does not wait for agreement: the job collects by {self._job.collection}"
        self._clients.agree(client_uuid)
        return ""

    @property
    def by_agreement(self) -> bool:
        """Whether clients say when a batch is complete."""
        return self._by_agreement

    @property
    def in_vain(self) -> bool:
        """Whether the clients agree on a batch of nothing: no task has two finished episodes, and none runs."""
        if not self._by_agreement or self._groups.trainable or self._shares.running or self._groups.outstanding:
            return False
        everyone = self._job.collection == "all_clients_agree_sync_weight"
        return self._clients.all_agreed if everyone else self._clients.any_agreed

    def end_agreements(self) -> None:
        """Who takes part in the next batch, and who agrees on it, is counted anew; what waits stays."""
        self._clients.end_agreements()

    def rows(self) -> list[ClientRow]:
        """One row per client that is remembered, last seen first."""
        now = self._clock()
        return [self._row(name, client, now) for name, client in self._clients.rows()]

    # ------------------------------------------------------------------ claims

    def admit(
        self, client_uuid: str, episode_type: EpisodeType, count: int, policy: SwarmThrottlePolicy | None
    ) -> Admission:
        """Whether a claim of ``count`` episodes may be granted now; ask only once ``count`` slots are free.

        It waits while its client has its share of the batch (the policy), or while the cache of finished episodes is
        full and a batch is ready or out. A full cache with no batch in sight loses its oldest incomplete group, or,
        where clients agree on the batch, makes one of what there is: :attr:`ready` may be true afterwards. A claim that
        was refused must be tried again at :meth:`next_change` at the latest.
        """
        if episode_type == "eval":
            return _GRANTED
        refusal = self._throttle.refusal(client_uuid, count, policy) if policy else ""
        self._clients.throttled(client_uuid, bool(refusal))
        if refusal:
            self._someone_throttled = True
            return Admission(refusal)
        if self._groups.has_room(self._shares.running + count):
            return _GRANTED
        reason, dropped = self._groups.make_room(self._shares.running, count, self.ready)
        return Admission(reason, tuple(self._counted(dropped)))

    def has_room(self, count: int) -> bool:
        """Whether ``count`` more train episodes may begin without anything being dropped for them."""
        return self._groups.has_room(self._shares.running + count)

    def claimed(self, client_uuid: str, episode_type: EpisodeType, task_hint: str = "", count: int = 1) -> None:
        """``count`` episodes were given to the client, at the claim or (once each) in recovery.

        ``task_hint`` is the policy's ``current_task_id``, or empty.
        """
        train = episode_type == "train"
        self._clients.seen(client_uuid, train=train).claimed += count
        if train:
            self._shares.claimed(client_uuid, task_hint, count)

    def released(self, client_uuid: str, episode_type: EpisodeType, task_hint: str, how: EndedHow) -> None:
        """One episode that :meth:`claimed` told of is over; call it before :meth:`add` or :meth:`lose`."""
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
            self._shares.released(client_uuid, task_hint)

    # ------------------------------------------------------------------ finished episodes

    def add(self, client_uuid: str, trajectory: Trajectory) -> list[Dropped]:
        """Add one finished episode; returns what was dropped by that, itself perhaps among it."""
        return self._counted(self._groups.add(client_uuid, trajectory))

    def lose(self, task_id: str) -> list[Dropped]:
        """Tell that an episode of this task ended with a result but without a trajectory.

        Where batches consist of whole groups, its group is dropped once ``num_repeat`` of its episodes have ended: an
        advantage over what is left would compare against a mean that the lost answer is not in.
        """
        return self._counted(self._groups.lose(task_id))

    def advance(self, policy_version: int) -> list[Dropped]:
        """New weights are served: drop what waits and was sampled more than ``max_staleness`` versions before."""
        return self._counted(self._groups.advance(policy_version))

    def clear(self, reason: str) -> list[Dropped]:
        """Drop everything that waits and the batch that is out; running episodes and clients stay."""
        self._clients.end_agreements()
        return self._counted(self._groups.clear(reason))

    def restore(
        self,
        finished: Iterable[tuple[str, Trajectory]],
        outstanding: BatchRow | None,
        losses: Iterable[GroupRow] = (),
        agreed: Iterable[str] = (),
    ) -> list[Dropped]:
        """Fill an empty collection after a restart, with (client, trajectory) oldest first.

        Returns what is dropped by that: decisions that the restart came in between of.
        """
        dropped = self._groups.restore(outstanding.batch, outstanding.attempts) if outstanding else []
        for client_uuid, trajectory in finished:
            if self._by_agreement:
                # it may be about to go on, and a batch that waits for all must not leave in the moment of the restart
                self._clients.take_part(client_uuid)
            else:
                self._clients.remember(client_uuid)
            dropped += self._groups.add(client_uuid, trajectory)
        for one in losses:
            dropped += self._groups.restore_losses(one)
        for client_uuid in agreed:
            self._clients.restore_agreement(client_uuid)
        return self._counted(dropped)

    def take_losses(self) -> list[GroupRow]:
        """What has become, since this was asked last, of groups that lack members which can never come."""
        return self._groups.take_losses()

    # ------------------------------------------------------------------ batches

    @property
    def ready(self) -> bool:
        """Whether :meth:`take` gives a batch now."""
        # asked several times per claim and end, mostly by methods for which it does not matter who agrees
        if not self._by_agreement:
            return self._groups.ready()
        return self._groups.ready(self._clients.any_agreed, self._clients.all_agreed)

    def seal(self) -> None:
        """The batch is decided: it stays :attr:`ready` until it is taken, whoever else turns up meanwhile."""
        self._groups.seal()

    def next_change(self) -> float | None:
        """When, on the clock, :attr:`ready` or a refused :meth:`admit` may turn by the passing of time alone."""
        if not (self._by_agreement or self._someone_throttled):
            return None
        lapse = self._clients.next_lapse() if self._by_agreement else None
        lift = self._throttle.next_lift() if self._someone_throttled else None
        first = min((time for time in (lapse, lift) if time is not None), default=None)
        return None if first is None else self._rolling.when(first)

    def take(self) -> TrainBatch:
        """The next batch; it is out until :meth:`confirm`, :meth:`fail` or :meth:`give_back`.

        A batch that came back is the next one, with the same id and content. A new batch ends the agreements.

        Raises:
            StateError: no batch is ready, or one is out.
        """
        fresh = self._groups.outstanding is None
        batch = self._groups.take(self._clients.any_agreed, self._clients.all_agreed)
        if fresh:
            self._clients.end_agreements()
            self._someone_throttled = False
        return batch

    def confirm(self, batch_id: str) -> TrainBatch | None:
        """The batch that ``batch_id`` names, now trained and gone, whether out or back; ``None`` if it is another."""
        taken = self._groups.confirm(batch_id)
        if taken is None:
            return None
        self._clients.count(taken.client_uuids, "trained")
        return taken.batch

    def fail(self, batch_id: str) -> Failure | None:
        """The trainer reported an error while it had this batch: it comes back, or is dropped after ``batch_attempts``
        failures; ``None`` if it is not the one that was taken."""
        failure = self._groups.fail(batch_id)
        if failure is not None and failure.dropped is not None:
            self._counted([failure.dropped])
        return failure

    def give_back(self) -> bool:
        """The batch that is out was not trained, without evidence against it: it comes back; False if none is out."""
        return self._groups.give_back()

    # ------------------------------------------------------------------ counts

    @property
    def outstanding(self) -> TrainBatch | None:
        """The batch that was taken and neither confirmed nor dropped, out or back."""
        return self._groups.outstanding

    @property
    def completed_groups(self) -> int:
        """Whole groups (of ``num_repeat`` episodes) that wait for a batch."""
        return self._groups.whole_groups

    @property
    def episodes(self) -> int:
        """Finished episodes that wait for a batch; those of :attr:`outstanding` do not."""
        return self._groups.episodes

    @property
    def running(self) -> int:
        """Train episodes that are claimed now."""
        return self._shares.running

    def tasks(self) -> dict[str, int]:
        """Finished episodes that wait, by task, complete groups first."""
        return self._groups.tasks()

    def waiting(self) -> Iterator[Group]:
        """The groups that wait for a batch, complete ones first; not to be changed."""
        return self._groups.waiting()

    # ------------------------------------------------------------------ inside

    def _counted(self, dropped: list[Dropped]) -> list[Dropped]:
        for one in dropped:
            self._clients.count(one.client_uuids, "dropped")
        return dropped

    def _row(self, client_uuid: str, client: Client, now: float) -> ClientRow:
        return ClientRow(
            client_uuid=client_uuid,
            active=self._clients.is_active(client_uuid),
            idle_seconds=0.0 if client.in_flight else now - client.last_seen,
            running=self._shares.running_of(client_uuid),
            claimed=client.claimed,
            ended=client.ended,
            aborted=client.aborted,
            timed_out=client.timed_out,
            waiting=self._shares.waiting_of(client_uuid),
            trained=client.trained,
            dropped=client.dropped,
            groups=self._shares.places(client_uuid),
            throttled=client.throttled,
            takes_part=client.takes_part,
            agreed=client.agreed,
        )
