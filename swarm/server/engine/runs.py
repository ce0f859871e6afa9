"""The training run: its job, its pool and the steps it has done, from start to start of the engine.

Invariant: a run survives every crash, of the engine or of this server; only a stop on purpose, its last step or another
job ends it. What a run collected is never trained by another one that does not resume it. After a restart the pool is
as it was: waiting and outstanding episodes, claimed ones with their keys and calls, counts, and the memory of ends.
Idle time begins anew, wall-clock time continues.
"""

from __future__ import annotations

import logging
import sys
from collections import deque

from swarm.errors import ConfigError, ConflictError
from swarm.evidence.alarms import WatchRules
from swarm.job import TrainJob, dump_job, parse_job
from swarm.server.episodes.episode import new_uuid
from swarm.server.episodes.pool import EpisodePool
from swarm.server.journal.journal import Journal
from swarm.server.journal.rows import EvaluationRow, Recovered, RunRow, StepRow
from swarm.tokens import batch_metrics
from swarm.types import StepResult

logger = logging.getLogger(__name__)

#: recent steps that are remembered
MAX_STEPS = 1000


class TrainingRun:
    """The current run; there is none until a job was synced. :meth:`open` comes before everything else.

    Attributes:
        run_id: empty before the first.
        steps: the recent ones.
    """

    def __init__(self, client_timeout: float, watch: WatchRules) -> None:
        self._client_timeout = client_timeout
        self._watch = watch
        self._opened: Journal | None = None
        self.run_id = ""
        self._stopped = False
        #: the pool, if there is one
        self.found_pool: EpisodePool | None = None
        self.steps: deque[StepResult] = deque(maxlen=MAX_STEPS)

    def open(self, journal: Journal) -> Recovered:
        """Restore what ``journal`` holds, to which nothing has been appended yet, and append changes from now on.

        Raises:
            ConfigError: it is damaged, or its job is one that this version cannot read.
        """
        recovered = journal.recover()
        self.run_id, self._stopped = recovered.run_id, recovered.stopped
        self.steps.extend(recovered.steps)
        if recovered.job_yaml:
            job = _recovered_job(recovered.job_yaml)
            self.found_pool = EpisodePool(job, journal.append, self._client_timeout, self._watch)
            self.found_pool.restore(recovered)
        self._opened = journal
        return recovered

    @property
    def journal(self) -> Journal:
        """Where the run is written."""
        assert self._opened is not None, "open() comes first"
        return self._opened

    @property
    def has_job(self) -> bool:
        """Whether a job was synced, so that there are :attr:`job` and :attr:`pool`."""
        return self.found_pool is not None

    @property
    def job(self) -> TrainJob:
        """The synced job; raises like :attr:`pool`."""
        return self.pool.job

    @property
    def pool(self) -> EpisodePool:
        """The pool.

        Raises:
            ConflictError: there is no job yet.
        """
        if self.found_pool is None:
            raise ConflictError(
                "there is no training job: give one (`swarm-gateway swarm engine start JOB`, or POST "
                "/sync_train_config)",
                code="no_job",
            )
        return self.found_pool

    def sync(self, job: TrainJob, from_step: int | None = None) -> bool:
        """Use ``job`` from the next start on; returns whether another run began: it differs in more than ``resume``, or
        goes back to ``from_step``. Then the other run has the steps and evaluations up to there, and the rows of the
        one before stay as they are."""
        another = not self.has_job or job != self.job.model_copy(update={"resume": job.resume})
        if self.found_pool is None:
            self.found_pool = EpisodePool(job, self.journal.append, self._client_timeout, self._watch)
        if from_step is not None:
            another = True
            self._go_back(job, from_step)
        elif another:
            # of a run that goes on, the first weights that are served say up to where its versions are the same
            self._begin(job, "another job was synced", sys.maxsize if job.resume else 0)
        else:
            self.found_pool.continue_run(job)
        self._append_run()
        return another

    def start(self) -> TrainJob:
        """The engine starts; returns the job for it.

        A run that did not end on purpose continues, from its last checkpoint if it has one. After a run that was
        stopped or is finished, training starts from the first weights unless the job resumes: what was collected was
        sampled by weights of another lineage, so it is dropped and the history of steps begins anew.

        Raises:
            ConflictError: there is no job.
        """
        job = self.job
        if self._stopped:
            if job.resume:
                # other processes than before may use it, and nobody waits for the earlier ones
                self.pool.collection.end_agreements()
            else:
                self._begin(job, "another training run began")
            self._stopped = False
            self._append_run()
        # a trainer puts the checkpoints of earlier runs aside before its first step: after that all of them are of this
        # run, also that of a step whose trainer died before it reported the step
        if job.checkpoint_every and self.steps:
            return job.model_copy(update={"resume": True})
        return job

    def stop(self) -> None:
        """The run was stopped on purpose or has done all its steps."""
        if not self._stopped:
            self._stopped = True
            self._append_run()

    def step_done(self, result: StepResult) -> bool:
        """Record a finished step, which consumes its batch, with our own metrics; False if it names another batch."""
        if (batch := self.pool.collection.confirm(result.batch_id, result.step)) is None:
            complete = any(step.batch_id == result.batch_id for step in self.steps)
            what = "again reports" if complete else "reports, though it is not out,"
            logger.warning("step %d %s batch %r: nothing is counted", result.step, what, result.batch_id)
            return False
        # a deletion while it was trained may have left nothing of it to measure
        ours = batch_metrics(batch, result.step) if batch.groups else {}
        result = result.model_copy(update={"metrics": {**result.metrics, **ours}})
        self.journal.append(StepRow(self.run_id, result))
        self.steps.append(result)
        self.pool.stepped(list(self.steps))
        return True

    def _go_back(self, job: TrainJob, step: int) -> None:
        # of a step that was done twice, the later one led to what was saved
        steps = {done.step: done for done in self.steps if done.step <= step}
        measured = self.pool.evaluations.sums
        self._begin(job, f"the run went back to step {step}", step)
        evaluations = [EvaluationRow(self.run_id, at, sums.dump()) for at, sums in measured.items() if at <= step]
        self.pool.evaluations.restore(evaluations)
        self.steps.extend(steps[number] for number in sorted(steps))
        self.journal.append(*(StepRow(self.run_id, done) for done in self.steps), *evaluations)
        # no challenger is taken back again: its steps are none of now
        self.pool.watch.look(self.steps, self.pool.evaluations.results(), job)
        # whoever went back there knows of these alarms
        self.pool.watch.resume()

    def _begin(self, job: TrainJob, reason: str, from_step: int = 0) -> None:
        self.run_id = new_uuid()
        self.pool.begin_run(self.run_id, job, reason, from_step)
        self._stopped = False
        self.steps.clear()

    def _append_run(self) -> None:
        self.journal.append(RunRow(self.run_id, dump_job(self.job), self._stopped))


def _recovered_job(job_yaml: str) -> TrainJob:
    try:
        return parse_job(job_yaml, "the job in the journal")
    except ConfigError as exc:
        raise ConfigError(f"{exc.message}; go back to the version that wrote it, or use another run_dir") from exc
