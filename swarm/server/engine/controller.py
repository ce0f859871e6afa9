"""Where the engine's state, the pool, waiting callers and the journal meet.

Invariant: the pool follows each change of the engine's state in the same turn of the event loop; what a caller is told
here by an ``async`` method is on disk by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from swarm.errors import ConflictError, RequestError, UnavailableError
from swarm.job import TrainJob
from swarm.link.messages import RolloutReady
from swarm.protocol import (
    NO_EPISODES,
    POST_ROLLING,
    SYNCING,
    AgreeSyncWeightResponse,
    EngineFailure,
    EpisodeEnd,
    ServerStatus,
)
from swarm.server.concurrency import Signal
from swarm.server.config import ServerConfig
from swarm.server.engine.board import EngineBoard, Serving
from swarm.server.engine.runs import MAX_STEPS, TrainingRun
from swarm.server.episodes.claims import ClaimQueue, WaitingClaim
from swarm.server.episodes.episode import ClaimWish, Grant, Refusal
from swarm.server.episodes.pool import EpisodePool
from swarm.server.journal.journal import OnDisk
from swarm.server.journal.rows import Ending
from swarm.server.recovery import JournalPort
from swarm.states import EngineState, check_engine
from swarm.tokens import TrainBatch
from swarm.types import StepResult

logger = logging.getLogger(__name__)

#: records that wait for the disk, beyond which claims are refused: what is running may still end
MAX_PENDING = 20_000
#: the clock is looked at no more often for what turns by the passing of time alone
_SHORTEST_PAUSE = 0.02
_IN_VAIN = "no task has two finished episodes: nothing is trained, and what waits goes on waiting"
#: between two looks whether a batch has got to the disk, each of which waits itself
_DISK_PAUSE = 0.2


class Controller(EngineBoard):
    """The engine's state and everything that hangs on it.

    Args:
        config: timeouts come from it.

    :meth:`open` comes before everything else.
    """

    def __init__(self, config: ServerConfig) -> None:
        super().__init__()
        self._config = config
        self._opened: JournalPort | None = None
        self._collected = Signal()
        self._watching = math.inf
        self._look_again = asyncio.Event()
        #: the batch that this engine has now, and the last one that it was given
        self._sent = self._given = ""
        self._run: TrainingRun | None = None
        #: when (monotonic) the last sync that clients agreed to ended, or they agreed in vain
        self.agreement_over = -math.inf
        self.claims = ClaimQueue(lambda: self._pool)

    def open(self, journal: JournalPort) -> None:
        """Take up what ``journal`` holds, and tell it from now on what changes.

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
    def has_job(self) -> bool:
        """Whether a job was synced, so that there are :attr:`job` and :attr:`pool`."""
        return self._run is not None and self._run.has_job

    @property
    def job(self) -> TrainJob:
        """The synced job.

        Raises:
            ConflictError: there is none yet.
        """
        return self._training.job

    @property
    def pool(self) -> EpisodePool:
        """The pool; raises like :attr:`job`."""
        return self._training.pool

    @property
    def global_step(self) -> int:
        if self._serving is None and self._run is not None and self._run.steps:
            return self._run.steps[-1].step
        return self.policy_version

    def status(self, steps: int = MAX_STEPS) -> ServerStatus:
        """Everything, with at most the last ``steps`` steps."""
        return ServerStatus(
            engine=self.engine_status(),
            boot_stage=self.boot_stage,
            engine_seconds=self.seconds_in_state,
            engine_changes=self._changes,
            weight_syncs=self._weight_syncs,
            engine_pid=self.engine_pid,
            engine_failure=self.failure,
            waiting_claims=len(self.claims),
            last_lines=self.last_lines,
            model=self.job.model_name if self.has_job else "",
            pool=self._pool.information() if self._pool else None,
            steps=list(self._training.steps)[-steps:] if steps else [],
            job=self.job if self.has_job else None,
            resolved_config=self.resolved_config,
        )

    async def synced(self) -> None:
        """Return when everything that has happened so far is on disk.

        Raises:
            UnavailableError: the disk did not take it in time (``journal_unavailable``); it happened nevertheless.
        """
        await self._journal.synced()

    @property
    def unhindered(self) -> bool:
        """Whether a claim may be granted in this moment: there is a job, none waits, and the disk keeps up."""
        return self._pool is not None and not len(self.claims) and not self.journal_behind

    @property
    def journal_behind(self) -> bool:
        """Whether so much waits for the disk that claims are refused."""
        return self._journal.pending > MAX_PENDING

    def on_disk(self, told: OnDisk) -> None:
        """Call ``told`` as :meth:`synced` returns or raises."""
        self._journal.on_disk(told)

    # ------------------------------------------------------------------ runs

    def sync_job(self, job: TrainJob) -> None:
        """Take ``job`` for the next start; one that differs in more than ``resume`` begins a new run.

        Raises:
            ConflictError: the engine is not OFFLINE.
        """
        if self._state is not EngineState.OFFLINE:
            raise ConflictError(
                f"the engine is {self._state}: stop it (POST /stop_engine) before you change its configuration",
                code="engine_not_offline",
            )
        if self._training.sync(job):
            self.resolved_config = self.failure = None
        self._detail = "ready to start"
        self._changed.notify()

    def boot(self) -> TrainJob:
        """OFFLINE → BOOTING; the job as the engine is to run it, see :meth:`TrainingRun.start`.

        Raises:
            ConflictError: there is no job.
            StateError: the engine is not OFFLINE.
        """
        check_engine(self._state, EngineState.BOOTING)
        job = self._training.start()
        self.boot_stage, self.last_lines = "starting", []
        self._sent = self._given = ""
        self._to(EngineState.BOOTING, "starting the engine process")
        return job

    def run_stopped(self) -> None:
        """The run was stopped on purpose or has done all its steps; the next start begins another, see :meth:`boot`."""
        self.failure = None
        if self.has_job:
            self._training.stop()

    # ------------------------------------------------------------------ engine

    def rollout_ready(self, message: RolloutReady) -> TrainBatch | None:
        """vLLM serves with the weights that ``message`` tells, and the trainer wants a batch: → ROLLING.

        Of a request that was answered before, this is a repetition: the answer, should it have been lost, or ``None``.
        """
        outstanding = self.pool.collection.outstanding
        if message.last_batch != self._given:
            logger.warning("the engine asks again for the batch of step %d, which it was given", message.next_step)
            return outstanding if outstanding is not None and outstanding.batch_id == self._sent else None
        self._serving = Serving(
            tuple(message.addresses), message.model, message.policy_version, self._engine_gone, message.stays_awake
        )
        self.pool.batches.advance(message.policy_version)
        if self._state is EngineState.WEIGHT_SYNCING and not self._sent and outstanding is not None:
            # the batch waits for the disk: were it taken back as well, the engine would get it twice
            logger.warning("the engine asks again for the batch of step %d, which is on its way", message.next_step)
        elif self._state in (EngineState.BOOTING, EngineState.WEIGHT_SYNCING):
            self._sent = ""
            if self._take_back():
                logger.warning("the engine asks for a batch without having done its step: the batch is sent again")
            self.boot_stage = ""
            self._to(EngineState.ROLLING, f"collecting the batch of step {message.next_step}")
        return None

    async def next_batch(self) -> TrainBatch:
        """Wait for a whole batch, see the engine through ROLLING_POST, and take it: → WEIGHT_SYNCING.

        It is on disk that the batch is out before it is returned, however long that takes.
        """
        pool = self.pool
        while True:
            await self._collected.until(lambda: self._state is EngineState.ROLLING and pool.batch_ready)
            pool.collection.seal()
            self._to(EngineState.ROLLING_POST, "the batch is complete; running episodes may finish")
            timeout = self._config.post_rolling_timeout
            if not await self._collected.until(lambda: pool.running == 0 or not pool.batch_ready, timeout):
                logger.warning("%d episodes did not finish within %g s", pool.running, timeout)
            if pool.batch_ready:
                break
            # it was one that came back, whose step was reported after all
            self._to(EngineState.ROLLING, "collecting the next batch: the one before is trained")
        batch = pool.batches.take()
        self._to(EngineState.WEIGHT_SYNCING, "training on the batch")
        while True:
            try:
                await self.synced()
            except UnavailableError as exc:
                self._detail = f"the batch waits for the disk: {exc.message}"
                logger.error("%s", self._detail)
                await asyncio.sleep(_DISK_PAUSE)
            else:
                self._sent = self._given = batch.batch_id
                self._detail = "training on the batch"
                return batch

    def step_done(self, result: StepResult) -> None:
        """Record a finished step in whatever state, see :meth:`TrainingRun.step_done`."""
        if self._training.step_done(result):
            self._sent = ""
            if self.failure is not None:
                # a step that is reported after the death makes that death the first in a row
                dead = self._state is EngineState.OFFLINE
                self.failure = self.failure.model_copy(update={"count": 1}) if dead else None
            self._changed.notify()
            # the next batch may be ready now
            self._tell_collected()

    def engine_failed(self, error: str) -> None:
        """The engine has reported an error: if it had a batch, that is evidence against the batch.

        Call it once nothing more is to be heard of that engine, for the batch's step may be among its last words.
        """
        if self._sent and (failure := self.pool.batches.fail(self._sent)) is not None:
            logger.warning(
                "the trainer failed on batch %s for the %d. time (%s): it is %s",
                self._sent,
                failure.attempts,
                error,
                "dropped" if failure.dropped else "tried again",
            )
        self._sent = ""

    def died(self, reason: str, *, wrong_config: bool = False) -> None:
        """Count a death of the engine, before it goes :meth:`offline`; its next step or a stop on purpose resets the
        count."""
        count = self.failure.count + 1 if self.failure is not None else 1
        self.failure = EngineFailure(reason=reason, count=count, wrong_config=wrong_config)

    def offline(self, reason: str, last_lines: Sequence[str] = ()) -> None:
        """Any state → OFFLINE: the batch that is out will be sent again, running episodes wait for another engine."""
        self._serve_no_more()
        self.engine_pid = None
        self.boot_stage = ""
        self.last_lines = list(last_lines)
        self._take_back()
        if self._state is EngineState.OFFLINE:
            self._detail = reason
            self._changed.notify()
        else:
            self._to(EngineState.OFFLINE, reason)

    def close(self) -> None:
        """Let everyone who waits go, and make nobody wait again: the server shuts down."""
        self._closing = True
        self.claims.close()
        self._changed.notify()

    # ------------------------------------------------------------------ episodes

    async def claim(
        self, wish: ClaimWish, wait: float = 0.0, receive: Callable[[], Awaitable[Any]] | None = None
    ) -> Grant | str:
        """What ``wish`` gets within ``wait`` seconds, or why it gets nothing; ``receive`` is its caller's (ASGI).

        Raises:
            RequestError: more episodes than the job has slots.
            ConflictError: its key was used for another claim.
            ClientGoneError: the caller left while it waited.
            UnavailableError: see :meth:`synced`; a claim with a key may be repeated, of others the episodes go back.
        """
        if self._pool is not None:
            if wish.episodes > self.job.slots:
                raise RequestError(
                    f"{wish.episodes} episodes cannot run at once: the job has {self.job.slots} slots "
                    "(raise max_parallel_episodes or batch_size)",
                    param="count",
                )
            self._pool.collection.seen(wish.client_uuid, train=wish.episode_type == "train")
        if self.journal_behind:
            return f"The journal is behind by {self._journal.pending} records: the disk is too slow, or fails"
        outcome = self.claims.claim(wish, wait=wait > 0)
        self._watch()
        if isinstance(outcome, WaitingClaim):
            try:
                outcome = await self.claims.wait(outcome, wait, receive)
            finally:
                # a claim that leaves may let others begin
                self._watch()
        if isinstance(outcome, Refusal):
            return self._why_not(outcome)
        try:
            await self.synced()
        except UnavailableError:
            if not wish.claim_key:
                self.claims.give_back(wish, outcome)
            raise
        return outcome

    async def end(
        self, client_uuid: str, task_id: str, ends: Sequence[EpisodeEnd], *, as_group: bool, end_key: str = ""
    ) -> str:
        """End episodes, see :meth:`EpisodePool.end`, also ones that only the journal remembers."""
        pool = self.pool
        past: dict[str, Ending] = {}
        for end in ends:
            if not pool.remembers(end.episode_uuid):
                ending = await self._journal.past_ending(end.episode_uuid)
                if ending is not None:
                    past[end.episode_uuid] = ending
        try:
            return pool.end(client_uuid, task_id, ends, as_group=as_group, end_key=end_key, past=past)
        finally:
            # that it came too late is told only once it is on disk why
            self.pool_changed()
            await self.synced()

    async def abort(
        self, client_uuid: str, episode_uuid: str, reason: str = "", metadata: Mapping[str, Any] | None = None
    ) -> str:
        """Give an episode up, see :meth:`EpisodePool.abort`; without a job there is nothing left to give up."""
        if self._pool is None:
            return ""
        note = self._pool.abort(client_uuid, episode_uuid, reason, metadata)
        self.pool_changed()
        await self.synced()
        return note

    async def withdraw_claim(self, client_uuid: str, claim_key: str) -> None:
        """Nobody waits for the claim with this key, see :meth:`ClaimQueue.withdraw`."""
        self.claims.withdraw(client_uuid, claim_key)
        self._watch()
        await self.synced()

    async def can_continue(self, client_uuid: str, episode_uuid: str) -> bool:
        """Whether the episode is still this client's to run."""
        self.pool.collection.seen(client_uuid)
        mine = self.pool.can_continue(client_uuid, episode_uuid)
        await self.synced()
        return mine

    async def agree(self, client_uuid: str) -> AgreeSyncWeightResponse:
        """The client has no more for the current batch."""
        if self._pool is None:
            return AgreeSyncWeightResponse(success=False, failure_reason="there is no training job yet")
        reason = self._pool.batches.agree(client_uuid)
        in_vain = self._pool.collection.in_vain
        self._watch()
        await self.synced()
        if in_vain:
            return AgreeSyncWeightResponse(success=True, failure_reason=_IN_VAIN)
        return AgreeSyncWeightResponse(success=not reason, failure_reason=reason)

    def pool_changed(self) -> None:
        """Tell that episodes ended, or that slots or the engine's state may let others begin."""
        if len(self.claims):
            self.claims.serve()
        # what was granted now has a deadline, and time that stood still may have begun to pass
        self._watch()

    async def expire(self) -> None:
        """Do what the passing of time alone makes due, above all take episodes back; never returns."""
        while True:
            self._look_again.clear()
            self._watching = self._next_due()
            pause = None if self._watching == math.inf else max(_SHORTEST_PAUSE, self._watching - time.monotonic())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._look_again.wait()
            if self._pool is not None and self._watching <= time.monotonic():
                self._pool.expire()
                self.pool_changed()

    # ------------------------------------------------------------------ inside

    @property
    def _journal(self) -> JournalPort:
        assert self._opened is not None, "open() comes first"
        return self._opened

    @property
    def _training(self) -> TrainingRun:
        assert self._run is not None, "open() comes first"
        return self._run

    @property
    def _pool(self) -> EpisodePool | None:
        return self._run.found_pool if self._run is not None else None

    def _to(self, state: EngineState, detail: str) -> None:
        if self._state is EngineState.WEIGHT_SYNCING and self.pool.collection.by_agreement:
            self.agreement_over = time.monotonic()
        self._enter(state, detail)
        if self._pool is not None:
            self._pool.enter(state)
        self.pool_changed()

    def _take_back(self) -> bool:
        return self._pool is not None and self._pool.collection.give_back()

    def _tell_collected(self) -> None:
        if (pool := self._pool) is None:
            return
        if self._state is EngineState.ROLLING and pool.collection.in_vain:
            logger.warning("the clients agree to a weight sync, but %s", _IN_VAIN)
            pool.batches.end_agreements()
            self.agreement_over = time.monotonic()
        if self._state is EngineState.ROLLING_POST or pool.batch_ready:
            self._collected.notify()

    def _next_due(self) -> float:
        if (pool := self._pool) is None:
            return math.inf
        deadline, change = pool.next_deadline(), pool.batches.collection.next_change()
        if change is None:
            return math.inf if deadline is None else deadline
        return change if deadline is None else min(deadline, change)

    def _watch(self) -> None:
        if self._next_due() < self._watching:
            self._look_again.set()
        self._tell_collected()

    def _why_not(self, refusal: Refusal) -> str:
        if self._closing:
            return "The swarm server is shutting down"
        match self._state:
            case EngineState.ROLLING:
                return refusal.reason or NO_EPISODES
            case EngineState.ROLLING_POST:
                return POST_ROLLING
            case EngineState.WEIGHT_SYNCING:
                return SYNCING
            case EngineState.BOOTING:
                return f"Engine is booting ({self._detail})"
            case EngineState.OFFLINE:
                return f"Engine is offline ({self._detail})"
