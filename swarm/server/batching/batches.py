"""Finished episodes from their end to the recorded step, as the journal is told of them.

Invariant: each train episode that ended with a result is in exactly one count: waiting, in the batch that is out,
trained, dropped or quarantined; a batch is consumed by exactly one recorded step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from swarm.job import TrainJob
from swarm.server.batching import Collection, Dropped, Failure
from swarm.server.journal.records import (
    AgreementsEnded,
    BatchFailed,
    BatchTaken,
    ClientAgreed,
    EpisodesDropped,
    Recovered,
    StepRecorded,
)
from swarm.tokens import TrainBatch, Trajectory
from swarm.types import StepResult

logger = logging.getLogger(__name__)


class Batches:
    """The collection of one run after the other, with the counts of the current one.

    Args:
        job, client_timeout, clock: see :class:`Collection`.
        append: takes records for the journal.
    """

    def __init__(
        self, job: TrainJob, append: Callable[..., None], client_timeout: float, clock: Callable[[], float]
    ) -> None:
        self._append = append
        self._client_timeout = client_timeout
        self._clock = clock
        self.collection = self._new_collection(job)
        self.quarantined = self.dropped = self.trained = 0

    def begin_run(self, job: TrainJob, reason: str, *, anew: bool) -> int:
        """Drop what waits, and what is out; returns how many episodes that were. ``anew``: the job is another one."""
        dropped = self.drop(self.collection.clear(reason))
        if anew:
            self.collection = self._new_collection(job)
        self.quarantined = self.dropped = self.trained = 0
        return dropped

    def restore(self, recovered: Recovered) -> None:
        """Fill in, after a restart, what waits and what was out."""
        self.quarantined, self.dropped, self.trained = recovered.quarantined, recovered.dropped, recovered.trained
        self.drop(
            self.collection.restore(recovered.finished, recovered.outstanding, recovered.losses, recovered.agreed)
        )

    def add(self, client_uuid: str, trajectory: Trajectory) -> None:
        """An episode has finished."""
        self.drop(self.collection.add(client_uuid, trajectory))

    def lose(self, task_id: str, *, quarantined: bool, alone: bool) -> None:
        """An episode has ended of which nothing is trained; ``alone``: its group may go on without it."""
        if quarantined:
            self.quarantined += 1
        else:
            self.dropped += 1
        if alone:
            self.drop(self.collection.lose(task_id))

    def agree(self, client_uuid: str) -> str:
        """The client has no more for the next batch; why that does not count, or an empty string."""
        reason = self.collection.agree(client_uuid)
        if not reason:
            self._append(ClientAgreed(client_uuid))
        return reason

    def end_agreements(self) -> None:
        """The next batch is agreed on anew, see :meth:`Collection.end_agreements`."""
        self.collection.end_agreements()
        self._append(AgreementsEnded())

    def take(self) -> TrainBatch:
        """The next batch; one whose step was not recorded comes again, as it was.

        Raises:
            StateError: no batch is ready, or one is out already.
        """
        again = self.collection.outstanding is not None
        batch = self.collection.take()
        if not again:
            self._append(BatchTaken(batch))
        return batch

    def confirm(self, result: StepResult) -> TrainBatch | None:
        """The step of the batch that waits for one is done: it is consumed. ``None`` if ``result`` names another."""
        batch = self.collection.confirm(result.batch_id)
        if batch is not None:
            self.trained += sum(len(group.trajectories) for group in batch.groups)
            self._append(StepRecorded(result))
        return batch

    def fail(self, batch_id: str) -> Failure | None:
        """The trainer reported an error while it had this batch, which comes again or is dropped."""
        failure = self.collection.fail(batch_id)
        if failure is not None:
            self._append(BatchFailed(batch_id, failure.attempts))
            if failure.dropped is not None:
                self.drop([failure.dropped])
        return failure

    def advance(self, policy_version: int) -> int:
        """New weights are served: drop what they make stale; returns how many episodes."""
        return self.drop(self.collection.advance(policy_version))

    def drop(self, dropped: Iterable[Dropped]) -> int:
        """Count and record what will never be trained, and how that changed its groups; returns how many episodes."""
        count = 0
        for one in dropped:
            logger.warning("%d finished episodes are not trained: %s", len(one.episode_uuids), one.reason)
            self._append(EpisodesDropped(one.episode_uuids, one.reason, one.cause))
            count += len(one.episode_uuids)
        self.dropped += count
        if losses := self.collection.take_losses():
            self._append(*losses)
        return count

    def _new_collection(self, job: TrainJob) -> Collection:
        collection = Collection(job, self._client_timeout, self._clock)
        # a run begins before its engine rolls
        collection.follow(False)
        return collection
