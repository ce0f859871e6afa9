"""``Collection``: what the pool asks about finished episodes, the clients they come from, and the next batch.

Invariant: as in the parts it puts together, :mod:`~swarm.server.collecting.groups` (every trajectory in one place),
:mod:`~swarm.server.collecting.clients` and :mod:`~swarm.server.collecting.throttle`. Pure logic on one event loop:
nothing here waits, writes or logs; whatever is dropped is returned, so that the caller can record and count it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from swarm.job import TrainJob
from swarm.protocol import ClientRow, EpisodeType, SwarmThrottlePolicy
from swarm.server.collecting.groups import Dropped, Failure
from swarm.server.journal.records import EndedHow, OutstandingBatch
from swarm.types import TrainBatch, Trajectory

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


class Collection:
    """Finished episodes and clients of one job.

    Args:
        job: sizes, collection method, staleness and cache bounds come from it.
        client_timeout: seconds without a sign of life after which nobody waits for a client.
        clock: seconds, monotonic; of all times here.
    """

    def __init__(
        self,
        job: TrainJob,
        client_timeout: float = CLIENT_TIMEOUT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        raise NotImplementedError

    # ------------------------------------------------------------------ clients

    def seen(self, client_uuid: str, *, train: bool = False) -> None:
        """A sign of life: the client polled, ended or agreed; ``train``: it asks for train episodes or ends one.

        Call it when a request of the client arrives, not when a waiting claim is tried again.
        """
        raise NotImplementedError

    def begin_call(self, client_uuid: str) -> None:
        """An LLM call of the client starts; the client counts as active until :meth:`end_call` and a while after."""
        raise NotImplementedError

    def end_call(self, client_uuid: str) -> None:
        """An LLM call of the client is over, whatever came of it."""
        raise NotImplementedError

    def agree(self, client_uuid: str) -> str:
        """The client has no more for the current batch; returns why that does not count, or an empty string.

        It does not count when the job collects by another method, or while there is nothing to train.
        """
        raise NotImplementedError

    def rows(self) -> list[ClientRow]:
        """One row per client that is remembered, last seen first."""
        raise NotImplementedError

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
        raise NotImplementedError

    def claimed(self, client_uuid: str, episode_type: EpisodeType, task_hint: str = "", count: int = 1) -> None:
        """``count`` episodes were given to the client, at the claim or (once each) in recovery.

        ``task_hint`` is the policy's ``current_task_id``, or empty.
        """
        raise NotImplementedError

    def released(self, client_uuid: str, episode_type: EpisodeType, task_hint: str, how: EndedHow) -> None:
        """One episode that :meth:`claimed` told of is over; call it before :meth:`add` or :meth:`lose`."""
        raise NotImplementedError

    # ------------------------------------------------------------------ finished episodes

    def add(self, client_uuid: str, trajectory: Trajectory) -> list[Dropped]:
        """Add one finished episode; returns what was dropped by that, itself perhaps among it."""
        raise NotImplementedError

    def lose(self, task_id: str) -> list[Dropped]:
        """Tell that an episode of this task ended with a result but without a trajectory.

        Where batches consist of whole groups, its group is dropped once ``num_repeat`` of its episodes have ended: an
        advantage over what is left would compare against a mean that the lost answer is not in.
        """
        raise NotImplementedError

    def advance(self, policy_version: int) -> list[Dropped]:
        """New weights are served: drop what waits and was sampled more than ``max_staleness`` versions before."""
        raise NotImplementedError

    def clear(self, reason: str) -> list[Dropped]:
        """Drop everything that waits and the batch that is out; running episodes and clients stay."""
        raise NotImplementedError

    def restore(
        self, finished: Iterable[tuple[str, Trajectory]], outstanding: OutstandingBatch | None
    ) -> list[Dropped]:
        """Fill an empty collection after a restart, with (client, trajectory) oldest first.

        Returns what is dropped by that: decisions that the restart came in between of.
        """
        raise NotImplementedError

    # ------------------------------------------------------------------ batches

    @property
    def ready(self) -> bool:
        """Whether :meth:`take` gives a batch now."""
        raise NotImplementedError

    def next_change(self) -> float | None:
        """When, on the clock, :attr:`ready` or a refused :meth:`admit` may turn by the passing of time alone."""
        raise NotImplementedError

    def take(self) -> TrainBatch:
        """The next batch; it is out until :meth:`confirm`, :meth:`fail` or :meth:`give_back`.

        A batch that came back is the next one, with the same id and content. A new batch ends the agreements.

        Raises:
            StateError: no batch is ready, or one is out.
        """
        raise NotImplementedError

    def confirm(self, batch_id: str) -> TrainBatch | None:
        """The batch that ``batch_id`` names, now trained and gone, whether out or back; ``None`` if it is another."""
        raise NotImplementedError

    def fail(self, batch_id: str) -> Failure | None:
        """The trainer reported an error while this batch was out: it comes back, or is dropped after
        ``batch_attempts`` failures; ``None`` if it is not the one that is out."""
        raise NotImplementedError

    def give_back(self) -> bool:
        """The batch that is out was not trained, without evidence against it: it comes back; False if none is out."""
        raise NotImplementedError

    # ------------------------------------------------------------------ counts

    @property
    def outstanding(self) -> TrainBatch | None:
        """The batch that was taken and neither confirmed nor dropped, out or back."""
        raise NotImplementedError

    @property
    def completed_groups(self) -> int:
        """Whole groups (of ``num_repeat`` episodes) that wait for a batch."""
        raise NotImplementedError

    @property
    def episodes(self) -> int:
        """Finished episodes that wait for a batch; those of :attr:`outstanding` do not."""
        raise NotImplementedError

    @property
    def running(self) -> int:
        """Train episodes that are claimed now."""
        raise NotImplementedError

    def tasks(self) -> dict[str, int]:
        """Finished episodes that wait, by task, complete groups first."""
        raise NotImplementedError
