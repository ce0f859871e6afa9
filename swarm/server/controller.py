"""Where the engine's state, the pool and waiting callers meet.

Invariant: the engine's state changes only in :meth:`Controller._to`, so the pool and everyone who waits always see it;
claims are served in the order in which they came.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from swarm.errors import ConflictError, RequestError, UnavailableError
from swarm.job import TrainJob
from swarm.link.messages import RolloutReady
from swarm.protocol import NO_EPISODES, POST_ROLLING, SYNCING, EngineStatus, EpisodeType, ServerStatus
from swarm.server.concurrency import Signal
from swarm.server.episodes import Claim
from swarm.server.pool import EpisodePool
from swarm.states import EngineState, check_engine
from swarm.types import StepResult, TrainBatch

logger = logging.getLogger(__name__)

MAX_STEPS = 1000


@dataclass(eq=False)
class _Waiter:
    client_uuid: str
    episode_type: EpisodeType
    idle_timeout: float
    count: int
    claims: asyncio.Future[list[Claim]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


@dataclass(frozen=True, slots=True)
class Serving:
    """What vLLM serves now: ``host:port`` of each replica, the name it knows the model by, and the weights' version.

    ``gone`` is set when the engine that serves it goes OFFLINE; new weights of the same engine keep it.
    """

    addresses: tuple[str, ...]
    engine_model: str
    policy_version: int
    gone: asyncio.Event


class Controller:
    """The engine's state and everything that hangs on it.

    Args:
        post_rolling_timeout: seconds that running episodes get once the batch is complete.
    """

    def __init__(self, post_rolling_timeout: float) -> None:
        self._post_rolling_timeout = post_rolling_timeout
        self._state = EngineState.OFFLINE
        self._detail = "no training job yet"
        self._entered = time.monotonic()
        self._changed = Signal()
        # starts beyond every number that an earlier server life can have told
        self._changes = time.time_ns() // 1000
        self._weight_syncs = 0
        self._waiters: deque[_Waiter] = deque()
        self._closing = False
        self._job: TrainJob | None = None
        self._pool: EpisodePool | None = None
        self._serving: Serving | None = None
        self._engine_gone = asyncio.Event()
        self._steps: deque[StepResult] = deque(maxlen=MAX_STEPS)
        self.engine_pid: int | None = None
        self.boot_stage = ""
        self.last_lines: list[str] = []
        self.resolved_config: dict[str, Any] | None = None

    # ------------------------------------------------------------------ what is

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def policy_version(self) -> int:
        """The trainer step whose weights vLLM serves; 0 before the first."""
        return self._serving.policy_version if self._serving else 0

    @property
    def job(self) -> TrainJob:
        """The synced job.

        Raises:
            ConflictError: there is none yet.
        """
        if self._job is None:
            raise ConflictError("there is no training job: POST /sync_train_config first", code="no_job")
        return self._job

    @property
    def pool(self) -> EpisodePool:
        """The pool of the synced job; raises like :attr:`job`."""
        if self._pool is None:
            raise ConflictError("there is no training job: POST /sync_train_config first", code="no_job")
        return self._pool

    @property
    def serving(self) -> Serving:
        """What vLLM serves.

        Raises:
            UnavailableError: nothing, the engine is not up.
        """
        if self._serving is None:
            raise UnavailableError(f"the engine is {self._state}: {self._detail}", code="engine_offline")
        return self._serving

    async def synced(self) -> None:
        """Return when everything that has happened so far is on disk.

        Raises:
            UnavailableError: the disk did not take it in time (``journal_unavailable``); it happened nevertheless.
        """

    def engine_status(self) -> EngineStatus:
        return EngineStatus(
            engine_status=self._state, engine_status_detail=self._detail, global_step=self.policy_version
        )

    def status(self, steps: int = MAX_STEPS) -> ServerStatus:
        """Everything, with at most the last ``steps`` steps."""
        return ServerStatus(
            engine=self.engine_status(),
            boot_stage=self.boot_stage,
            engine_seconds=time.monotonic() - self._entered,
            engine_changes=self._changes,
            weight_syncs=self._weight_syncs,
            engine_pid=self.engine_pid,
            waiting_claims=len(self._waiters),
            last_lines=self.last_lines,
            model=self._job.model_name if self._job else "",
            pool=self._pool.information() if self._pool else None,
            steps=list(self._steps)[-steps:] if steps else [],
            job=self._job,
            resolved_config=self.resolved_config,
        )

    async def wait_for_state(self, state: EngineState, within: float) -> None:
        """Return when the engine is in ``state``, goes OFFLINE, or ``within`` seconds have passed."""
        started_offline = self._state is EngineState.OFFLINE

        def decided() -> bool:
            nonlocal started_offline
            if self._state is not EngineState.OFFLINE:
                started_offline = False
            return self._closing or self._state is state or (self._state is EngineState.OFFLINE and not started_offline)

        await self._changed.until(decided, within)

    async def wait_for_change(self, after: int, within: float) -> None:
        """Return when the engine's state is another than at the change ``after``, or ``within`` seconds have passed."""
        await self._changed.until(lambda: self._closing or self._changes != after, within)

    # ------------------------------------------------------------------ engine

    def sync_job(self, job: TrainJob) -> None:
        """Take ``job`` for the next start; one that differs in ``resume`` at most keeps the pool and the steps.

        Raises:
            ConflictError: the engine is not OFFLINE.
        """
        if self._state is not EngineState.OFFLINE:
            raise ConflictError(
                f"the engine is {self._state}: stop it (POST /stop_engine) before you change its configuration",
                code="engine_not_offline",
            )
        if self._job is None or job != self._job.model_copy(update={"resume": job.resume}):
            self._pool = EpisodePool(job)
            self._steps.clear()
            self.resolved_config = None
        self._job = job
        self._detail = "ready to start"
        self._changed.notify()

    def boot(self) -> None:
        """OFFLINE → BOOTING; raises :class:`StateError` from any other state.

        Unless the job resumes, training starts from its first weights: what the run before collected was sampled by
        weights of another lineage, so it is dropped and the history of steps begins anew.
        """
        self._to(EngineState.BOOTING, "starting the engine process")
        if not self.job.resume:
            self._steps.clear()
            if dropped := self.pool.drop_collected():
                logger.warning("dropped %d finished episodes of the run before: this one does not resume it", dropped)
        self.boot_stage, self.last_lines = "starting", []

    def progress(self, stage: str, detail: str) -> None:
        """The engine tells what it is doing."""
        self.boot_stage = stage
        if self._state is EngineState.BOOTING:
            self._detail = f"{stage}: {detail}" if detail else stage
        self._changed.notify()

    def rollout_ready(self, message: RolloutReady) -> None:
        """vLLM serves with the weights that ``message`` tells, and the trainer wants a batch: → ROLLING."""
        self._serving = Serving(tuple(message.addresses), message.model, message.policy_version, self._engine_gone)
        if self._state is EngineState.WEIGHT_SYNCING and (groups := self.pool.give_back()):
            logger.warning("the engine asks for a batch without having done its step: %d groups go back", groups)
        if self._state in (EngineState.BOOTING, EngineState.WEIGHT_SYNCING):
            self.boot_stage = ""
            self._to(EngineState.ROLLING, f"collecting the batch of step {message.next_step}")

    async def next_batch(self) -> TrainBatch:
        """Wait for a whole batch, see the engine through ROLLING_POST, and take it: → WEIGHT_SYNCING."""
        await self._changed.until(lambda: self._state is EngineState.ROLLING and self.pool.batch_ready)
        self._to(EngineState.ROLLING_POST, "the batch is complete; running episodes may finish")
        if not await self._changed.until(lambda: self.pool.running == 0, self._post_rolling_timeout):
            logger.warning("%d episodes did not finish within %g s", self.pool.running, self._post_rolling_timeout)
        batch = self.pool.take_batch()
        self._to(EngineState.WEIGHT_SYNCING, "training on the batch")
        return batch

    def step_done(self, result: StepResult) -> None:
        """Record a finished step, with our own metrics of its batch, and let the batch go."""
        batch = self.pool.confirm(result.batch_id)
        if batch is None:
            logger.error("step %d reports batch %r, which is not out", result.step, result.batch_id)
        else:
            result = result.model_copy(update={"metrics": {**result.metrics, **batch_metrics(batch)}})
        self._steps.append(result)
        self._changed.notify()

    def offline(self, reason: str, last_lines: Sequence[str] = ()) -> None:
        """Any state → OFFLINE: the batch that is out goes back, running episodes are deleted."""
        self._serving = None
        self._engine_gone.set()
        self._engine_gone = asyncio.Event()
        self.engine_pid = None
        self.boot_stage = ""
        self.last_lines = list(last_lines)
        if self._pool is not None:
            self._pool.give_back()
        if self._state is EngineState.OFFLINE:
            self._detail = reason
        else:
            self._to(EngineState.OFFLINE, reason)

    def close(self) -> None:
        """Let everyone who waits go, and make nobody wait again: the server shuts down."""
        self._closing = True
        for waiter in self._waiters:
            waiter.claims.cancel()
        self._changed.notify()

    # ------------------------------------------------------------------ episodes

    async def claim(
        self, client_uuid: str, episode_type: EpisodeType, idle_timeout: float, count: int, wait: float
    ) -> list[Claim] | str:
        """``count`` claimed episodes, or why there are none after at most ``wait`` seconds.

        Raises:
            RequestError: more episodes than the job has slots.
        """
        if self._pool is not None and count > self.job.slots:
            raise RequestError(
                f"{count} episodes cannot run at once: the job has {self.job.slots} slots "
                "(raise max_parallel_episodes or batch_size)",
                param="count",
            )
        waiter = _Waiter(client_uuid, episode_type, idle_timeout, count)
        self._waiters.append(waiter)
        try:
            self._serve_waiters()
            if not waiter.claims.done() and wait > 0 and not self._closing:
                await asyncio.wait([waiter.claims], timeout=wait)
            if waiter.claims.done() and not waiter.claims.cancelled():
                return waiter.claims.result()
            return self._refusal()
        except asyncio.CancelledError:
            # the caller left in the moment its claim was granted
            if waiter.claims.done() and not waiter.claims.cancelled():
                for claim in waiter.claims.result():
                    self.pool.abort(client_uuid, claim.episode_uuid)
            raise
        finally:
            with contextlib.suppress(ValueError):
                self._waiters.remove(waiter)
            # this one may have held up those behind it
            self._serve_waiters()

    def abort(self, client_uuid: str, episode_uuid: str) -> str:
        """Give an episode up, see :meth:`EpisodePool.abort`; without a job there is nothing left to give up."""
        if self._pool is None:
            return ""
        note = self._pool.abort(client_uuid, episode_uuid)
        self.pool_changed()
        return note

    def pool_changed(self) -> None:
        """Tell that episodes ended or slots came free."""
        self._serve_waiters()
        self._changed.notify()

    async def expire_idle(self) -> None:
        """Take back abandoned episodes as their deadlines pass; never returns."""
        while True:
            deadline = self._pool.next_deadline() if self._pool else None
            pause = None if deadline is None else max(0.0, deadline - time.monotonic())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._changed.wait()
            if self._pool is not None and self._pool.expire():
                self.pool_changed()

    # ------------------------------------------------------------------ inside

    def _to(self, state: EngineState, detail: str) -> None:
        self._state = check_engine(self._state, state)
        self._detail = detail
        self._entered = time.monotonic()
        self._changes += 1
        self._weight_syncs += state is EngineState.WEIGHT_SYNCING
        logger.info("%s: %s", state, detail)
        if self._pool is not None:
            self._pool.enter(state, detail if state is EngineState.OFFLINE else "")
        self.pool_changed()

    def _serve_waiters(self) -> None:
        while self._waiters and self._pool is not None:
            waiter = self._waiters[0]
            claims = None
            if not waiter.claims.done():
                # strictly first in, first out: a group that needs four slots must not starve behind single claims
                claims = self._pool.claim(waiter.client_uuid, waiter.episode_type, waiter.idle_timeout, waiter.count)
                if claims is None and waiter.count <= self.job.slots:
                    return
            self._waiters.popleft()
            if claims is not None:
                waiter.claims.set_result(claims)
                self._changed.notify()

    def _refusal(self) -> str:
        if self._closing:
            return "The swarm server is shutting down"
        match self._state:
            case EngineState.ROLLING:
                return NO_EPISODES
            case EngineState.ROLLING_POST:
                return POST_ROLLING
            case EngineState.WEIGHT_SYNCING:
                return SYNCING
            case EngineState.BOOTING:
                return f"Engine is booting ({self._detail})"
            case EngineState.OFFLINE:
                return f"Engine is offline ({self._detail})"


def batch_metrics(batch: TrainBatch) -> dict[str, float]:
    """Our metrics of one batch: rewards over all its episodes (population deviation), tokens sampled per episode."""
    trajectories = [trajectory for group in batch.groups for trajectory in group.trajectories]
    rewards = [trajectory.reward for trajectory in trajectories]
    tokens = [sum(sum(timeline.response_mask) for timeline in t.timelines) for t in trajectories]
    return {
        "swarm/reward_mean": statistics.fmean(rewards),
        "swarm/reward_std": statistics.pstdev(rewards),
        "swarm/episodes": float(len(trajectories)),
        "swarm/tasks": float(len(batch.groups)),
        "swarm/response_tokens_mean": statistics.fmean(tokens),
    }
