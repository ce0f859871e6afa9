"""Drives the engine's state, and with it the run, its pool and its batches.

Invariant: the pool follows each change of the engine's state in the same turn of the event loop; a batch is on disk
before the engine gets it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from swarm.errors import UnavailableError
from swarm.evidence.learning import learning_of
from swarm.job import TrainJob
from swarm.link.messages import RolloutReady
from swarm.server.config import ServerConfig
from swarm.server.engine.board import EngineBoard
from swarm.server.engine.requests import EpisodeRequests
from swarm.server.engine.runs import MAX_STEPS, TrainingRun
from swarm.server.episodes.pool import EpisodePool
from swarm.server.journal.journal import Journal
from swarm.states import EngineEvent, EngineState, TrainerState
from swarm.status import EngineStatus, ServerStatus
from swarm.subjects import Deletions
from swarm.tokens import Sampled, TrainBatch
from swarm.types import EvalResult, StepResult

logger = logging.getLogger(__name__)

#: how long a step waits for running episodes, where neither the job nor the server says
POST_ROLLING_SECONDS = 30.0


class Controller:
    """The engine, the episodes that it serves, and the run that it trains; :meth:`open` comes before all else."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self.engine = EngineBoard()
        self.run = TrainingRun(config.client_timeout, config.watch)
        self.episodes = EpisodeRequests(self.run, self.engine)
        #: the batch that this trainer was given last: its next request names it, a repeated one does not
        self._batch_out = ""
        #: when, on the monotonic clock; ``None`` once its step is done, or it is this trainer's no more
        self._batch_out_since: float | None = None

    def open(self, journal: Journal) -> None:
        """See :meth:`TrainingRun.open`."""
        recovered = self.run.open(journal)
        self.episodes.deletions = Deletions(recovered.tombstones)
        if self.has_job:
            self.engine.detail = "the server was restarted"
        self.episodes.claims.restore(recovered.claims)

    # ------------------------------------------------------------------ what is

    @property
    def has_job(self) -> bool:
        """Whether a job was synced, so that there are :attr:`job` and :attr:`pool`."""
        return self.run.has_job

    @property
    def job(self) -> TrainJob:
        """The synced job; raises :class:`ConflictError` if there is none yet."""
        return self.run.job

    @property
    def pool(self) -> EpisodePool:
        """The pool; raises like :attr:`job`."""
        return self.run.pool

    def engine_status(self) -> EngineStatus:
        """The engine in AgentJet's words; its step is the one that vLLM serves, or the run's last."""
        engine = self.engine
        step = engine.policy_version
        if engine.serving is None and self.run.steps:
            step = self.run.steps[-1].step
        return EngineStatus(engine_status=engine.state, engine_status_detail=engine.detail, global_step=step)

    def status(self, steps: int = MAX_STEPS) -> ServerStatus:
        """Everything, with at most the last ``steps`` steps."""
        engine, pool = self.engine, self.run.found_pool
        evaluations = pool.evaluations.results() if pool and pool.evaluations.sums else []
        alarms = pool.watch.alarms if pool else []
        # kept for the last words of an engine that is gone
        batch_since = None if engine.state is EngineState.OFFLINE else self._batch_out_since
        return ServerStatus(
            engine=self.engine_status(),
            boot_stage=engine.boot_stage,
            engine_seconds=engine.seconds_in_state,
            serving=engine.serving,
            training_seconds=None if batch_since is None else time.monotonic() - batch_since,
            engine_changes=engine.changes,
            weight_syncs=engine.weight_syncs,
            engine_pid=engine.pid,
            engine_failure=engine.failure,
            waiting_claims=len(self.episodes.claims),
            last_lines=engine.last_lines,
            warnings=list(engine.warnings),
            model=self.job.model_name if self.has_job else "",
            pool=pool.information() if pool else None,
            steps=list(self.run.steps)[-steps:] if steps else [],
            evaluations=evaluations if steps else [],
            comparisons=pool.comparisons.statuses(pool.stages.counts) if pool and pool.comparisons.followed else [],
            alarms=alarms,
            learning=learning_of(self.run.steps, evaluations, alarms),
            stages=[stage.shown for stage in pool.stages.current] if pool else [],
            stage_changes=pool.stages.changes if pool else 0,
            code=engine.code,
            job=self.job if self.has_job else None,
            resolved_config=engine.resolved_config,
        )

    # ------------------------------------------------------------------ runs

    def sync_job(self, job: TrainJob, from_step: int | None = None) -> bool:
        """See :meth:`TrainingRun.sync`.

        Raises:
            ConflictError: the engine is not OFFLINE.
        """
        self.engine.check_offline("change its configuration")
        if new_run := self.run.sync(job, from_step):
            self.engine.resolved_config = self.engine.failure = None
        self.engine.detail = "ready to start"
        self.engine.changed.notify()
        return new_run

    def boot(self) -> TrainJob:
        """OFFLINE → BOOTING; returns the job for the engine, see :meth:`TrainingRun.start`.

        Raises:
            ConflictError: there is no job.
            StateError: the engine is not OFFLINE.
        """
        self.engine.states.after(EngineEvent.BOOT)
        job = self.run.start()
        self.engine.begin()
        self._batch_out, self._batch_out_since = "", None
        self._happen(EngineEvent.BOOT, "starting the engine process")
        return job

    def run_stopped(self) -> None:
        """The run was stopped on purpose or has done all its steps; the next start begins another, see :meth:`boot`."""
        self.engine.failure = None
        if self.has_job:
            self.run.stop()

    # ------------------------------------------------------------------ engine

    def rollout_ready(self, message: RolloutReady) -> TrainBatch | None:
        """vLLM serves with the weights that ``message`` names, and the trainer wants a batch: → ROLLING.

        Returns ``None``, except for a repetition of a request that was answered: then its batch, in case the answer
        was lost.
        """
        outstanding = self.pool.collection.outstanding
        if message.last_batch != self._batch_out:
            logger.warning("the engine asks again for the batch of step %d, which it was given", message.next_step)
            return None if self._batch_out_since is None else outstanding
        self.engine.serve(message)
        self.pool.advance(message.policy_version)
        if (
            self.engine.states.trainer is TrainerState.COMPUTING
            and self._batch_out_since is None
            and outstanding is not None
        ):
            # the batch waits for the disk: if it were taken back now, the engine would get it twice
            logger.warning("the engine asks again for the batch of step %d, which is on its way", message.next_step)
            return None
        self._batch_out_since = None
        if self._take_back():
            logger.warning("the engine asks for a batch without having done its step: the batch is sent again")
        self.engine.boot_stage = ""
        over = message.next_step > self.job.total_training_steps
        if self.engine.states.trainer is (TrainerState.AWAY if over else TrainerState.IDLE):
            # it repeats what it said
            self.episodes.pool_changed()
        elif over:
            self._happen(EngineEvent.LEAVE, "all steps are done; serving goes on")
        else:
            self._happen(EngineEvent.ASK, f"collecting the batch of step {message.next_step}")
        self.episodes.collected.notify()
        return None

    def weight_sync_begins(self) -> None:
        """vLLM pauses for new weights, and keeps what it samples: ROLLING → WEIGHT_SYNCING."""
        self._happen(EngineEvent.SYNC, "transferring the weights" if self.engine.state is EngineState.ROLLING else "")

    def weights_synced(self, policy_version: int, sampled: Sampled | None = None) -> None:
        """vLLM has the weights of ``policy_version``: WEIGHT_SYNCING → ROLLING, unless another trainer boots.

        ``sampled`` is as in :class:`~swarm.link.messages.WeightsSynced`.
        """
        if self.engine.serving is None or self.engine.state not in (EngineState.WEIGHT_SYNCING, EngineState.BOOTING):
            return
        self.engine.serve_version(policy_version, sampled)
        self.pool.advance(policy_version)
        if self.engine.state is EngineState.WEIGHT_SYNCING:
            self._happen(EngineEvent.SYNCED, f"serving the weights of step {policy_version}")

    async def next_batch(self) -> TrainBatch:
        """Wait until the engine asks for a batch and there is one, and take it.

        Where episodes run between steps only: through ROLLING_POST → WEIGHT_SYNCING. The batch is returned once it is
        on disk that it is out, however long that takes.
        """
        pool = self.pool
        while True:
            await self.episodes.collected.until(
                lambda: (
                    self.engine.states.trainer is TrainerState.IDLE
                    and pool.collection.ready
                    and not pool.training_waits
                )
            )
            if self.engine.states.always:
                break
            pool.collection.seal()
            self._happen(EngineEvent.CLOSE, "the batch is complete; running episodes may finish")
            timeout = self._post_rolling_timeout
            if not await self.episodes.collected.until(lambda: not pool.running or not pool.collection.ready, timeout):
                logger.warning("%d episodes did not finish within %s s", len(pool.running), timeout)
            if pool.collection.ready:
                break
            # the batch had come back, and its step was reported after all
            self._happen(EngineEvent.REOPEN, "collecting the next batch: the one before is trained")
        batch = pool.collection.take()
        self._happen(EngineEvent.TAKE, "" if self.engine.states.always else "training on the batch")
        await self._on_disk()
        self._batch_out, self._batch_out_since = batch.batch_id, time.monotonic()
        self.engine.computes()
        return batch

    def take_evaluations(self) -> list[EvalResult]:
        """What was evaluated since the last call, for the trainer's loggers."""
        return self.pool.evaluations.take_changed() if self.has_job else []

    @property
    def newest_step(self) -> int:
        """The latest step that the run has done, also if its weights were lost with the engine; 0 before the first."""
        return max((step.step for step in self.run.steps), default=0)

    def step_done(self, result: StepResult) -> None:
        """Record a finished step in any state, see :meth:`TrainingRun.step_done`."""
        if self.run.step_done(result):
            self._batch_out_since = None
            self.engine.stepped()
            # the next batch may be ready now
            self.episodes.tell_collected()

    def engine_failed(self, error: str) -> None:
        """The engine reported an error: if it had a batch, that is evidence against the batch.

        Call it once no more messages of that engine can arrive: the batch's step may be among the last ones.
        """
        if self._batch_out_since is not None:
            self.pool.collection.fail(self._batch_out, error)
        self._batch_out_since = None

    def trainer_died(self, error: str) -> TrainJob:
        """The trainer is gone, and vLLM serves on: → BOOTING. Returns the job for another trainer.

        Running calls and episodes go on; nothing is claimed until the other trainer asks for its batch. Call it once no
        more messages of the dead one can arrive.
        """
        self.engine.died(f"the trainer failed: {error}")
        self.engine_failed(error)
        self._batch_out = ""
        self._take_back()
        self.engine.boot_stage = "starting another trainer"
        detail = f"the trainer failed: {error}; vLLM serves on, untrained, until another trainer is ready"
        self._happen(EngineEvent.DIE, detail)
        return self.run.start()

    def offline(self, reason: str, last_lines: Sequence[str] = ()) -> None:
        """Any state → OFFLINE: the batch that is out will be sent again, running episodes wait for another engine."""
        self.engine.end(last_lines)
        self._take_back()
        self._happen(EngineEvent.STOP, reason)

    def close(self) -> None:
        """Answer everyone who waits, and let nobody wait again: the server shuts down."""
        self.episodes.claims.close()
        self.engine.close()
        if (pool := self.run.found_pool) is not None:
            pool.stages.changed.notify()

    @property
    def _post_rolling_timeout(self) -> float | None:
        """Seconds for which a step waits for running episodes; ``None``: each has its own idle timeout and its cap."""
        for seconds in (self.job.post_rolling_timeout, self._config.post_rolling_timeout):
            if seconds is not None:
                return seconds
        return None if self.job.dialect == "agentjet" else POST_ROLLING_SECONDS

    async def _on_disk(self) -> None:
        while True:
            try:
                return await self.episodes.synced()
            except UnavailableError as exc:
                self.engine.detail = f"the batch waits for the disk: {exc.message}"
                logger.error("%s", self.engine.detail)

    def _happen(self, event: EngineEvent, detail: str) -> None:
        before = self.engine.state
        self.engine.follow(event, detail)
        synced = before is EngineState.WEIGHT_SYNCING and self.engine.state is not before
        if synced and self.pool.collection.method.by_agreement:
            self.episodes.agreement_over = time.monotonic()
        if self.has_job:
            self.pool.follow(self.engine.states)
        self.episodes.pool_changed()

    def _take_back(self) -> bool:
        return self.has_job and self.pool.collection.give_back()
