"""Finished episodes from their end to the recorded step, as rows for the journal.

Invariant: each train episode that ended with a result is in exactly one count: waiting, in the batch that is out,
trained, dropped or quarantined; exactly one recorded step consumes a batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from swarm.job import TrainJob
from swarm.server.batching.collection import Collection
from swarm.server.batching.groups import Dropped, Failure
from swarm.server.journal.rows import (
    AgreementRow,
    BatchRow,
    CountsRow,
    NoAgreementsRow,
    Recovered,
    StateRow,
    StepRow,
)
from swarm.states import EpisodeEvent, EpisodeState, next_episode
from swarm.tokens import TrainBatch, Trajectory
from swarm.types import StepResult

logger = logging.getLogger(__name__)


class Batches:
    """The collection of one run after the other, with the counts of the current run.

    Args:
        job, client_timeout, clock: see :class:`Collection`.
        append: takes rows for the journal.
    """

    def __init__(
        self,
        job: TrainJob,
        append: Callable[..., None],
        client_timeout: float,
        clock: Callable[[], float],
    ) -> None:
        self._append = append
        self._client_timeout = client_timeout
        self._clock = clock
        self.run_id = ""
        self.collection = self._new_collection(job)
        self.quarantined = self.dropped = self.trained = 0

    def begin_run(self, run_id: str, job: TrainJob, reason: str, *, other_job: bool) -> int:
        """Drop what waits and what is out, and count anew for ``run_id``; returns how many episodes were dropped."""
        dropped = self.drop(self.collection.clear(reason))
        self._append(NoAgreementsRow())
        if other_job:
            self.collection = self._new_collection(job)
        self.quarantined = self.dropped = self.trained = 0
        self.run_id = run_id
        return dropped

    def restore(self, recovered: Recovered) -> None:
        """Take up, after a restart, what waits and what was out."""
        self.run_id = recovered.run_id
        self.quarantined, self.dropped, self.trained = recovered.quarantined, recovered.dropped, recovered.trained
        self.drop(
            self.collection.restore(recovered.finished, recovered.outstanding, recovered.losses, recovered.agreed)
        )

    def add(self, client_uuid: str, trajectory: Trajectory) -> None:
        """An episode has finished."""
        self.drop(self.collection.add(client_uuid, trajectory))

    def lose(self, task_id: str, *, quarantined: bool, alone: bool) -> None:
        """An episode has ended of which nothing is trained; ``alone``: its group may continue without it."""
        if quarantined:
            self.quarantined += 1
        else:
            self.dropped += 1
        self._count()
        if alone:
            self.drop(self.collection.lose(task_id))

    def agree(self, client_uuid: str) -> str:
        """The client has no more for the next batch; why that does not count, or an empty string."""
        reason = self.collection.agree(client_uuid)
        if not reason:
            self._append(AgreementRow(client_uuid))
        return reason

    def end_agreements(self) -> None:
        """The next batch is agreed on anew, see :meth:`Collection.end_agreements`."""
        self.collection.end_agreements()
        self._append(NoAgreementsRow())

    def take(self) -> TrainBatch:
        """The next batch; one whose step was not recorded comes again, as it was.

        Raises:
            StateError: no batch is ready, or one is out already.
        """
        again = self.collection.outstanding is not None
        batch = self.collection.take()
        if not again:
            state = next_episode(EpisodeState.FINISHED, EpisodeEvent.TAKE)
            self._append(BatchRow(batch), StateRow(_uuids(batch), state, batch.batch_id), NoAgreementsRow())
        return batch

    def confirm(self, result: StepResult) -> TrainBatch | None:
        """The step of the batch that waits for one is done: it is consumed. ``None`` if ``result`` names another."""
        batch = self.collection.confirm(result.batch_id)
        if batch is not None:
            uuids = _uuids(batch)
            self.trained += len(uuids)
            state = next_episode(EpisodeState.BATCHED, EpisodeEvent.STEP)
            self._append(StepRow(self.run_id, result), StateRow(uuids, state, step=result.step))
            self._count()
        return batch

    def fail(self, batch_id: str) -> Failure | None:
        """The trainer reported an error while it had this batch, which comes again or is dropped."""
        failure = self.collection.fail(batch_id)
        if failure is not None:
            self._append(BatchRow(failure.batch, failure.attempts))
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
            state = next_episode(one.state, EpisodeEvent.DROP)
            self._append(StateRow(one.episode_uuids, state, reason=one.reason, cause=one.cause))
            count += len(one.episode_uuids)
        if count:
            self.dropped += count
            self._count()
        if losses := self.collection.take_losses():
            self._append(*losses)
        return count

    def _count(self) -> None:
        self._append(CountsRow(self.run_id, self.trained, self.dropped, self.quarantined))

    def _new_collection(self, job: TrainJob) -> Collection:
        collection = Collection(job, self._client_timeout, self._clock)
        # a run begins before its engine rolls
        collection.follow(False)
        return collection


def _uuids(batch: TrainBatch) -> Sequence[str]:
    return [trajectory.episode_uuid for group in batch.groups for trajectory in group.trajectories]
