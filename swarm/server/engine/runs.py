"""The training run: its job, its pool and the steps it has done, from start to start of the engine.

Invariant: a run goes on through every crash, of the engine or of this server; only a stop on purpose, its last step or
another job ends it. What a run collected is never trained by another one that does not resume it.
"""

from __future__ import annotations

import logging
from collections import deque

from swarm.errors import ConflictError
from swarm.job import TrainJob, dump_job
from swarm.server.episodes.episode import new_uuid
from swarm.server.episodes.pool import EpisodePool
from swarm.server.journal.rows import RunRow
from swarm.server.metrics import batch_metrics
from swarm.server.recovery import JournalPort, recover
from swarm.types import StepResult

logger = logging.getLogger(__name__)

#: recent steps that are remembered
MAX_STEPS = 1000


class TrainingRun:
    """The current run; there is none until a job was synced.

    Args:
        journal: what it holds is taken up, and it is told what changes.
        client_timeout: see :class:`EpisodePool`.

    Raises:
        ConfigError: the journal is damaged, or its job is one that this version cannot read.
    """

    def __init__(self, journal: JournalPort, client_timeout: float) -> None:
        before = recover(journal, client_timeout)
        self._journal = journal
        self._client_timeout = client_timeout
        self._run_id = before.run_id
        self._stopped = before.stopped
        self._job = before.job
        self._pool = before.pool
        self.steps: deque[StepResult] = deque(before.steps, maxlen=MAX_STEPS)
        #: what claims with a key got, by client and key
        self.claims = before.claims

    @property
    def has_job(self) -> bool:
        """Whether a job was synced, so that there are :attr:`job` and :attr:`pool`."""
        return self._pool is not None

    @property
    def job(self) -> TrainJob:
        """The synced job.

        Raises:
            ConflictError: there is none yet.
        """
        if self._job is None:
            raise _no_job()
        return self._job

    @property
    def found_pool(self) -> EpisodePool | None:
        """The pool, if there is one."""
        return self._pool

    @property
    def pool(self) -> EpisodePool:
        """The pool; raises like :attr:`job`."""
        if self._pool is None:
            raise _no_job()
        return self._pool

    def sync(self, job: TrainJob) -> bool:
        """Take ``job`` for the next start; whether another run began, because it differs in more than ``resume``."""
        another = self._job is None or job != self._job.model_copy(update={"resume": job.resume})
        if self._pool is None:
            self._pool = EpisodePool(job, self._journal.append, self._client_timeout)
        if another:
            self._begin(job, "another job was synced")
        else:
            self._pool.continue_run(job)
        self._job = job
        self._append_run()
        return another

    def start(self) -> TrainJob:
        """The engine starts: the job as it is to run it.

        A run that did not end on purpose goes on, from its last checkpoint if it has one. After one that was stopped or
        is finished, unless the job resumes, training starts from its first weights: what was collected was sampled by
        weights of another lineage, so it is dropped and the history of steps begins anew.

        Raises:
            ConflictError: there is no job.
        """
        job = self.job
        if self._stopped:
            if job.resume:
                # other processes than before may use it, and nobody waits for the earlier ones
                self.pool.batches.end_agreements()
            else:
                self._begin(job, "another training run began")
            self._stopped = False
            self._append_run()
        # a checkpoint in the folder may be of an earlier run: only one that this run must have written counts
        save_freq = job.overrides.get("trainer.save_freq", job.save_freq)
        if isinstance(save_freq, int) and 0 < save_freq <= max((step.step for step in self.steps), default=0):
            return job.model_copy(update={"resume": True})
        return job

    def stop(self) -> None:
        """The run was stopped on purpose or has done all its steps."""
        if not self._stopped:
            self._stopped = True
            self._append_run()

    def step_done(self, result: StepResult) -> bool:
        """Record a finished step, with our own metrics of its batch, which is consumed; False: nothing is counted."""
        batch = self.pool.collection.outstanding
        if batch is None or batch.batch_id != result.batch_id:
            known = any(step.batch_id == result.batch_id for step in self.steps)
            what = "again reports" if known else "reports, though it is not out,"
            logger.warning("step %d %s batch %r: nothing is counted", result.step, what, result.batch_id)
            return False
        result = result.model_copy(update={"metrics": {**result.metrics, **batch_metrics(batch)}})
        self.pool.batches.confirm(result)
        self.steps.append(result)
        return True

    def _begin(self, job: TrainJob, reason: str) -> None:
        self._run_id = new_uuid()
        if dropped := self.pool.begin_run(self._run_id, job, reason):
            logger.warning("dropped %d finished episodes: %s", dropped, reason)
        self._stopped = False
        self.steps.clear()

    def _append_run(self) -> None:
        self._journal.append(RunRow(self._run_id, dump_job(self.job), self._stopped))


def _no_job() -> ConflictError:
    return ConflictError("there is no training job: POST /sync_train_config first", code="no_job")
