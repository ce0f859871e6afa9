"""What is known about the engine, requests about episodes in any of its states, and what becomes due as time passes.

Invariant: the state changes only along the table of :mod:`swarm.states`, and each change wakes everyone who waits. What
an ``async`` method answers is on disk, except a claim: its row is written before those of its calls and its end, which
wait for the disk. While the disk fails or is late, new claims are refused. Every change of the pool serves the waiting
claims and wakes whoever waits for a batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from swarm.concurrency import Once, Signal
from swarm.errors import RequestError, UnavailableError
from swarm.job import TrainJob
from swarm.protocol import BATCH_WAITS, NO_EPISODES, POST_ROLLING, SYNCING, TRAINER_AWAY, BoolResponse, EpisodeEnd
from swarm.server.engine.runs import JournalPort, TrainingRun
from swarm.server.episodes.claims import ClaimQueue, WaitingClaim
from swarm.server.episodes.episode import ClaimWish, Grant, Refusal
from swarm.server.episodes.pool import EpisodePool
from swarm.server.journal.rows import Ending
from swarm.states import EngineEvent, EngineState, EngineStates
from swarm.status import EngineFailure, EngineStatus
from swarm.tokens import WeightSyncs
from swarm.types import Notes

logger = logging.getLogger(__name__)

#: seconds between two looks at the clock, at the least
_SHORTEST_PAUSE = 0.02
#: between two looks whether the disk refuses what is pending
_LOOK_SECONDS = 0.1
#: looks after which a disk that refuses does not do so by chance
_MOST_REFUSED = 10
#: Kept of an engine's warnings.
_MAX_WARNINGS = 20
_IN_VAIN = "no task has two finished episodes: nothing is trained, and what waits keeps waiting"


@dataclass(frozen=True, slots=True)
class Served:
    """What vLLM serves now: ``host:port`` of each replica, the name it knows the model by, and the weights' version.

    ``gone`` happens when the engine that serves goes OFFLINE; new weights of the same engine keep it. With
    ``stays_awake`` vLLM serves while the trainer computes.
    """

    addresses: tuple[str, ...]
    engine_model: str
    policy_version: int
    gone: Once
    stays_awake: bool = True


class EngineBoard:
    """The engine's state, what it reports about itself, and what it serves."""

    def __init__(self) -> None:
        self.states = EngineStates()
        self._detail = "no training job yet"
        self._entered = time.monotonic()
        self._changed = Signal()
        # starts beyond every number that an earlier server process can have reported
        self._changes = time.time_ns() // 1000
        self._weight_syncs = 0
        self._closing = False
        self._served: Served | None = None
        self._engine_gone = Once()
        #: those over which vLLM kept its requests
        self.syncs = WeightSyncs()
        self.engine_pid: int | None = None
        #: the code snapshot that the engine's processes say they import
        self.code: str | None = None
        self.boot_stage = ""
        self.last_lines: list[str] = []
        self.failure: EngineFailure | None = None
        self.resolved_config: dict[str, Any] | None = None
        #: what people should know of this engine, the latest last
        self.warnings: deque[str] = deque(maxlen=_MAX_WARNINGS)

    @property
    def state(self) -> EngineState:
        """The engine in one word."""
        return self.states.word

    @property
    def seconds_in_state(self) -> float:
        """How long the engine has been in its state."""
        return time.monotonic() - self._entered

    @property
    def policy_version(self) -> int:
        """The trainer step whose weights vLLM serves; 0 before the first."""
        return self._served.policy_version if self._served else 0

    @property
    def served(self) -> Served:
        """What vLLM serves.

        Raises:
            UnavailableError: nothing, the engine is not up.
        """
        if self._served is None:
            raise UnavailableError(f"the engine is {self.state}: {self._detail}", code="engine_offline")
        return self._served

    @property
    def global_step(self) -> int:
        """The step whose weights vLLM serves; while it serves none, the last step of the run."""
        return self.policy_version

    def engine_status(self) -> EngineStatus:
        return EngineStatus(engine_status=self.state, engine_status_detail=self._detail, global_step=self.global_step)

    def warn(self, text: str) -> None:
        """The engine, which goes on, reports what people should know."""
        logger.warning("%s", text)
        self.warnings.append(text)
        self._changed.notify()

    def progress(self, stage: str, detail: str) -> None:
        """The engine reports what it is doing."""
        self.boot_stage = stage
        if self.state is EngineState.BOOTING:
            self._detail = f"{stage}: {detail}" if detail else stage
        self._changed.notify()

    async def wait_for_state(self, states: Collection[EngineState], within: float) -> None:
        """Return when the engine is in one of ``states``, goes OFFLINE, or ``within`` seconds have passed."""
        started_offline = self.state is EngineState.OFFLINE

        def decided() -> bool:
            nonlocal started_offline
            if self.state is not EngineState.OFFLINE:
                started_offline = False
            offline = self.state is EngineState.OFFLINE and not started_offline
            return self._closing or self.state in states or offline

        await self._changed.until(decided, within)

    async def wait_for_change(self, after: int, within: float) -> None:
        """Return when the engine's state is another than at the change ``after``, or ``within`` seconds have passed."""
        await self._changed.until(lambda: self._closing or self._changes != after, within)

    def _follow(self, event: EngineEvent, detail: str) -> None:
        before = self.state
        self.states = self.states.after(event)
        self._detail = detail or self._detail
        if self.state is not before:
            self._entered = time.monotonic()
            self._changes += 1
            self._weight_syncs += self.state is EngineState.WEIGHT_SYNCING
            logger.info("%s: %s", self.state, self._detail)
        self._changed.notify()

    def _serve_no_more(self) -> None:
        self._served = None
        self._engine_gone.happen()
        self._engine_gone = Once()


class EpisodeRequests(EngineBoard):
    """Requests about episodes, on top of the engine's state."""

    def __init__(self) -> None:
        super().__init__()
        self._opened: JournalPort | None = None
        self._run: TrainingRun | None = None
        self._collected = Signal()
        self._watching = math.inf
        self._look_again = asyncio.Event()
        #: when (monotonic) the last sync that clients agreed to ended, or they agreed in vain
        self.agreement_over = -math.inf
        self.claims = ClaimQueue(lambda: self._pool)

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

    async def synced(self) -> None:
        """Return when everything that has happened so far is on disk.

        Raises:
            UnavailableError: the disk did not take it in time (``journal_unavailable``); it happened nevertheless.
        """
        await self._journal.synced()

    async def caught_up(self) -> None:
        """The same for who need not wait for room on the disk: where it refuses what is pending, a second must do."""
        synced = asyncio.ensure_future(self.synced())
        refused = 0
        try:
            while not synced.done():
                refused = refused + 1 if self._journal.error else 0
                if refused > _MOST_REFUSED:
                    self._check_disk()
                await asyncio.wait({synced}, timeout=_LOOK_SECONDS)
            await synced
        finally:
            synced.cancel()

    # ------------------------------------------------------------------ episodes

    async def claim(
        self, wish: ClaimWish, wait: float = 0.0, receive: Callable[[], Awaitable[Any]] | None = None
    ) -> Grant | str:
        """What ``wish`` gets within ``wait`` seconds, or why it gets nothing; ``receive`` is its caller's (ASGI).

        Raises:
            RequestError: more episodes than the job has slots.
            ConflictError: its key was used for another claim.
            UnavailableError: the disk refuses what is written, or hangs (``journal_unavailable``).
            ClientGoneError: the caller left while it waited.
        """
        if self._pool is not None:
            if wish.episodes > self.job.slots:
                raise RequestError(
                    f"{wish.episodes} episodes cannot run at once: the job has {self.job.slots} slots "
                    "(raise max_parallel_episodes or batch_size)",
                    param="count",
                )
            self._pool.collection.seen(wish.client_uuid, train=wish.episode_type == "train")
        self._check_disk()
        if self._journal.behind:
            # a claim is answered before it is on disk: without this, claims would outrun the disk
            await self.caught_up()
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
            # a conflict too is answered only once its cause is on disk
            self.pool_changed()
            await self.synced()

    async def abort(self, client_uuid: str, episode_uuid: str, reason: str = "", notes: Notes | None = None) -> str:
        """Give an episode up, see :meth:`EpisodePool.abort`; without a job there is nothing left to give up."""
        if self._pool is None:
            return ""
        note = self._pool.abort(client_uuid, episode_uuid, reason, notes)
        self.pool_changed()
        await self.synced()
        return note

    async def withdraw_claim(self, client_uuid: str, claim_key: str) -> None:
        """Cancel the claim with this key, see :meth:`ClaimQueue.withdraw`."""
        self.claims.withdraw(client_uuid, claim_key)
        self._watch()
        await self.synced()

    async def can_continue(self, client_uuid: str, episode_uuid: str) -> bool:
        """Whether the episode is still this client's to run."""
        self.pool.collection.seen(client_uuid)
        mine = self.pool.running.of(client_uuid, episode_uuid) is not None
        await self.synced()
        return mine

    async def agree(self, client_uuid: str) -> BoolResponse:
        """The client has no more for the current batch."""
        if self._pool is None:
            return BoolResponse(success=False, failure_reason="there is no training job yet")
        reason = self._pool.collection.agree(client_uuid)
        in_vain = self._pool.collection.in_vain
        self.pool_changed()
        await self.synced()
        if in_vain:
            return BoolResponse(success=True, failure_reason=_IN_VAIN)
        return BoolResponse(success=not reason, failure_reason=reason)

    def pool_changed(self) -> None:
        """Call it when episodes ended, or when slots or the engine's state may let others begin."""
        if len(self.claims):
            self.claims.serve()
        # new grants have deadlines, and the clock that stands still outside ROLLING may run again
        self._watch()

    async def expire(self) -> None:
        """Take back episodes at their deadlines, and do whatever else becomes due as time passes; never returns."""
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

    def _check_disk(self) -> None:
        if error := self._journal.error:
            raise UnavailableError(
                f"the journal cannot write: {error}; claims are refused meanwhile", code="journal_unavailable"
            )

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

    def _tell_collected(self) -> None:
        if (pool := self._pool) is None:
            return
        if self.state is EngineState.ROLLING and pool.collection.in_vain:
            logger.warning("the clients agree to a weight sync, but %s", _IN_VAIN)
            pool.collection.end_agreements()
            self.agreement_over = time.monotonic()
        if self.state is EngineState.ROLLING_POST or pool.collection.ready:
            self._collected.notify()

    def _next_due(self) -> float:
        if (pool := self._pool) is None:
            return math.inf
        deadline, change = pool.running.deadlines.next(), pool.collection.next_change()
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
        if refusal.reason in (BATCH_WAITS, TRAINER_AWAY):
            return refusal.reason
        match self.state:
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
