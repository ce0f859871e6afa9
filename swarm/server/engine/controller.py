"""Drives the engine's state, and with it the run, its pool and its batches.

Invariant: the pool follows each change of the engine's state in the same turn of the event loop; a batch is on disk
before the engine gets it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from swarm.errors import ConflictError, UnavailableError
from swarm.job import TrainJob
from swarm.link.messages import RolloutReady
from swarm.server.config import ServerConfig
from swarm.server.engine.requests import EpisodeRequests, Served
from swarm.server.engine.runs import MAX_STEPS, JournalPort, TrainingRun
from swarm.states import EngineEvent, EngineState, Trainer
from swarm.status import EngineFailure, ServerStatus
from swarm.tokens import Sampled, TrainBatch
from swarm.types import EvalResult, StepResult

logger = logging.getLogger(__name__)

#: how long a step waits for running episodes, where neither the job nor the server says
POST_ROLLING_SECONDS = 30.0


class Controller(EpisodeRequests):
    """The engine's state and everything that depends on it.

    Args:
        config: timeouts come from it.

    :meth:`open` comes before everything else.
    """

    def __init__(self, config: ServerConfig) -> None:
        super().__init__()
        self._config = config
        #: the batch that this trainer was given last: its next request names it, a repeated one does not
        self._given = ""
        #: when, on the monotonic clock; ``None`` once its step is done, or it is this trainer's no more
        self._given_at: float | None = None
        #: whether this engine has answered a call
        self._answered = False
        #: deaths that a refused request explains, and that are not yet counted as such
        self._explained = 0

    def open(self, journal: JournalPort) -> None:
        """Restore what ``journal`` holds, and append changes to it from now on.

        Raises:
            ConfigError: it is damaged, or its job is one that this version cannot read.
        """
        self._run = TrainingRun(journal, self._config.client_timeout)
        self._opened = journal
        if self.has_job:
            self._detail = "the server was restarted"
        self.claims.restore(self._run.claims)

    # ------------------------------------------------------------------ what is

    @property
    def global_step(self) -> int:
        if self._served is None and self._run is not None and self._run.steps:
            return self._run.steps[-1].step
        return self.policy_version

    def status(self, steps: int = MAX_STEPS) -> ServerStatus:
        """Everything, with at most the last ``steps`` steps."""
        return ServerStatus(
            engine=self.engine_status(),
            boot_stage=self.boot_stage,
            engine_seconds=self.seconds_in_state,
            serving=None if self._served is None else "always" if self.states.always else "between_steps",
            training_seconds=time.monotonic() - self._given_at if self._given_at is not None else None,
            engine_changes=self._changes,
            weight_syncs=self._weight_syncs,
            engine_pid=self.engine_pid,
            engine_failure=self.failure,
            waiting_claims=len(self.claims),
            last_lines=self.last_lines,
            warnings=list(self.warnings),
            model=self.job.model_name if self.has_job else "",
            pool=self._pool.information() if self._pool else None,
            steps=list(self._training.steps)[-steps:] if steps else [],
            evaluations=self._pool.evaluations.results()
            if steps and self._pool and self._pool.evaluations.sums
            else [],
            code=self.code,
            job=self.job if self.has_job else None,
            resolved_config=self.resolved_config,
        )

    # ------------------------------------------------------------------ runs

    def sync_job(self, job: TrainJob, from_step: int | None = None) -> bool:
        """See :meth:`TrainingRun.sync`.

        Raises:
            ConflictError: the engine is not OFFLINE.
        """
        if self.state is not EngineState.OFFLINE:
            raise ConflictError(
                f"the engine is {self.state}: stop it (POST /stop_engine) before you change its configuration",
                code="engine_not_offline",
            )
        if new_run := self._training.sync(job, from_step):
            self.resolved_config = self.failure = None
        self._detail = "ready to start"
        self._changed.notify()
        return new_run

    def boot(self) -> TrainJob:
        """OFFLINE → BOOTING; returns the job for the engine, see :meth:`TrainingRun.start`.

        Raises:
            ConflictError: there is no job.
            StateError: the engine is not OFFLINE.
        """
        self.states.after(EngineEvent.BOOT)
        job = self._training.start()
        self.boot_stage, self.last_lines, self.code = "starting", [], None
        self.warnings.clear()
        self._given, self._given_at = "", None
        self._answered = False
        self._happen(EngineEvent.BOOT, "starting the engine process")
        return job

    @property
    def run_id(self) -> str:
        """The training run; empty before the first."""
        return self._training.run_id

    def run_stopped(self) -> None:
        """The run was stopped on purpose or has done all its steps; the next start begins another, see :meth:`boot`."""
        self.failure = None
        if self.has_job:
            self._training.stop()

    # ------------------------------------------------------------------ engine

    def rollout_ready(self, message: RolloutReady) -> TrainBatch | None:
        """vLLM serves with the weights that ``message`` names, and the trainer wants a batch: → ROLLING.

        Returns ``None``, except for a repetition of a request that was answered: then its batch, in case the answer
        was lost.
        """
        outstanding = self.pool.collection.groups.outstanding
        if message.last_batch != self._given:
            logger.warning("the engine asks again for the batch of step %d, which it was given", message.next_step)
            return None if self._given_at is None else outstanding
        self._served = Served(
            tuple(message.addresses), message.model, message.policy_version, self._engine_gone, message.stays_awake
        )
        self.states = self.states._replace(always=message.serving == "always")
        self.pool.collection.advance(message.policy_version)
        if self.states.trainer is Trainer.COMPUTING and self._given_at is None and outstanding is not None:
            # the batch waits for the disk: if it were taken back now, the engine would get it twice
            logger.warning("the engine asks again for the batch of step %d, which is on its way", message.next_step)
            return None
        self._given_at = None
        if self._take_back():
            logger.warning("the engine asks for a batch without having done its step: the batch is sent again")
        self.boot_stage = ""
        over = message.next_step > self.job.total_training_steps
        if self.states.trainer is (Trainer.AWAY if over else Trainer.IDLE):
            # it repeats what it said
            self.pool_changed()
        elif over:
            self._happen(EngineEvent.LEAVE, "all steps are done; serving goes on")
        else:
            self._happen(EngineEvent.ASK, f"collecting the batch of step {message.next_step}")
        self._collected.notify()
        return None

    def weight_sync_begins(self) -> None:
        """vLLM pauses for new weights, and keeps what it samples: ROLLING → WEIGHT_SYNCING."""
        self._happen(EngineEvent.SYNC, "transferring the weights" if self.state is EngineState.ROLLING else "")

    def weights_synced(self, policy_version: int, sampled: Sampled | None = None) -> None:
        """vLLM has the weights of ``policy_version``: WEIGHT_SYNCING → ROLLING, unless another trainer boots.

        ``sampled`` is as in :class:`~swarm.link.messages.WeightsSynced`.
        """
        if self._served is None or self.state not in (EngineState.WEIGHT_SYNCING, EngineState.BOOTING):
            return
        self.syncs.finish(policy_version, sampled)
        self._served = replace(self._served, policy_version=policy_version)
        self.pool.collection.advance(policy_version)
        if self.state is EngineState.WEIGHT_SYNCING:
            self._happen(EngineEvent.SYNCED, f"serving the weights of step {policy_version}")

    async def next_batch(self) -> TrainBatch:
        """Wait until the engine asks for a batch and there is one, and take it.

        Where episodes run between steps only: through ROLLING_POST → WEIGHT_SYNCING. The batch is returned once it is
        on disk that it is out, however long that takes.
        """
        pool = self.pool
        while True:
            await self._collected.until(lambda: self.states.trainer is Trainer.IDLE and pool.collection.ready)
            if self.states.always:
                break
            pool.collection.groups.seal()
            self._happen(EngineEvent.CLOSE, "the batch is complete; running episodes may finish")
            timeout = self._post_rolling_timeout
            if not await self._collected.until(lambda: not pool.running or not pool.collection.ready, timeout):
                logger.warning("%d episodes did not finish within %s s", len(pool.running), timeout)
            if pool.collection.ready:
                break
            # the batch had come back, and its step was reported after all
            self._happen(EngineEvent.REOPEN, "collecting the next batch: the one before is trained")
        batch = pool.collection.take()
        self._happen(EngineEvent.TAKE, "" if self.states.always else "training on the batch")
        await self._on_disk()
        self._given, self._given_at = batch.batch_id, time.monotonic()
        self._detail = "training on the batch"
        return batch

    def take_evaluations(self) -> list[EvalResult]:
        """What was evaluated since the last call, for the trainer's loggers."""
        return self._pool.evaluations.take_changed() if self._pool is not None else []

    def step_done(self, result: StepResult) -> None:
        """Record a finished step in any state, see :meth:`TrainingRun.step_done`."""
        if self._training.step_done(result):
            self._given_at = None
            if self.failure is not None:
                # the engine did a step before it died, so this death is the first in a row
                dead = self.state is EngineState.OFFLINE
                explained = min(1, self.failure.explained)
                self.failure = self.failure.model_copy(update={"count": 1, "explained": explained}) if dead else None
            self._changed.notify()
            # the next batch may be ready now
            self._tell_collected()

    def engine_failed(self, error: str) -> None:
        """The engine reported an error: if it had a batch, that is evidence against the batch.

        Call it once no more messages of that engine can arrive: the batch's step may be among the last ones.
        """
        if self._given_at is not None and (failure := self.pool.collection.fail(self._given)) is not None:
            logger.warning(
                "the trainer failed on batch %s for the %d. time (%s): it is %s",
                self._given,
                failure.attempts,
                error,
                "dropped" if failure.dropped else "tried again",
            )
        self._given_at = None

    def trainer_died(self, error: str) -> TrainJob:
        """The trainer is gone, and vLLM serves on: → BOOTING. Returns the job for another trainer.

        Running calls and episodes go on; nothing is claimed until the other trainer asks for its batch. Call it once no
        more messages of the dead one can arrive.
        """
        self.died(f"the trainer failed: {error}")
        self.engine_failed(error)
        self._given = ""
        self._take_back()
        self.boot_stage = "starting another trainer"
        detail = f"the trainer failed: {error}; vLLM serves on, untrained, until another trainer is ready"
        self._happen(EngineEvent.DIE, detail)
        return self._training.start()

    def died(self, reason: str, *, wrong_config: bool = False, cause: str = "", counts: bool = True) -> None:
        """Count a death of the engine before it goes :meth:`offline`; a step or a stop on purpose resets the count.

        ``cause`` is as in :class:`~swarm.link.messages.Finished`. An engine that found no room on the disk is no death
        that ``counts``: it may be started as often as it takes until there is room.
        """
        before, explained = self.failure, self._explained
        self._explained = 0
        count = max(1, (before.count if before is not None else 0) + counts)
        again = before is not None and before.cause == cause and not self._answered
        self.failure = EngineFailure(
            reason=f"{reason} (of a request that is refused from now on)" if explained else reason,
            count=count,
            wrong_config=wrong_config,
            cause=cause,
            explained=min(count, explained + (before.explained if before is not None else 0)),
            # one that dies of requests, and not of every request, is not given up
            repeated=bool(cause) and again and not explained and not (before is not None and before.explained),
        )

    def death_explained(self, deaths: int) -> None:
        """A request is refused from now on, at which the engine died so often; the last of these deaths may be counted
        by now, or not yet."""
        failure = self.failure
        if failure is None or self.state is not EngineState.OFFLINE:
            self._explained += deaths
            return
        explained = min(failure.count, failure.explained + deaths)
        self.failure = failure.model_copy(update={"explained": explained, "repeated": False})
        self._changed.notify()

    def answered(self) -> None:
        """vLLM has answered a call."""
        self._answered = True

    def offline(self, reason: str, last_lines: Sequence[str] = ()) -> None:
        """Any state → OFFLINE: the batch that is out will be sent again, running episodes wait for another engine."""
        self._serve_no_more()
        self.engine_pid = self.code = None
        self.boot_stage = ""
        self.last_lines = list(last_lines)
        self._take_back()
        self._happen(EngineEvent.STOP, reason)

    def close(self) -> None:
        """Answer everyone who waits, and let nobody wait again: the server shuts down."""
        self._closing = True
        self.claims.close()
        self._changed.notify()

    # ------------------------------------------------------------------ inside

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
                return await self.synced()
            except UnavailableError as exc:
                self._detail = f"the batch waits for the disk: {exc.message}"
                logger.error("%s", self._detail)

    def _happen(self, event: EngineEvent, detail: str) -> None:
        was_syncing = self.state is EngineState.WEIGHT_SYNCING
        self._follow(event, detail)
        if was_syncing and self.state is not EngineState.WEIGHT_SYNCING and self.pool.collection.groups.by_agreement:
            self.agreement_over = time.monotonic()
        if self._pool is not None:
            self._pool.follow(self.states)
        self.pool_changed()

    def _take_back(self) -> bool:
        return self._pool is not None and self._pool.collection.groups.give_back()
