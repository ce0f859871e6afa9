"""Requests about episodes in any state of the engine, and what becomes due as time passes.

Invariant: what an ``async`` method answers is on disk, except a claim: its row is written before those of its calls and
its end, which wait for the disk. While the disk fails or is late, new claims are refused. Every change of the pool
serves the waiting claims and wakes whoever waits for a batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any
from uuid import uuid4

from swarm.concurrency import Latest, Signal, until_gone
from swarm.errors import RequestError, UnavailableError
from swarm.evidence.pairs import Pair
from swarm.evidence.ratings import SideRating
from swarm.evidence.stages import ServingStage
from swarm.protocol import (
    BATCH_WAITS,
    NO_EPISODES,
    POST_ROLLING,
    SYNCING,
    TRAINED_OUT,
    TRAINER_AWAY,
    TRAINING_WAITS,
    BoolResponse,
    EpisodeEnd,
    FollowedRoute,
)
from swarm.server.engine.board import EngineBoard
from swarm.server.engine.runs import TrainingRun
from swarm.server.episodes.claims import ClaimQueue, WaitingClaim
from swarm.server.episodes.episode import ERASED, ClaimWish, Grant, Refusal
from swarm.server.episodes.stages import Stages
from swarm.server.journal.rows import Ending
from swarm.states import EngineState
from swarm.subjects import DataReport, Deletions, Subject, Tombstone
from swarm.types import Notes

logger = logging.getLogger(__name__)

#: seconds between two looks at the clock, at the least
_SHORTEST_PAUSE = 0.02
#: between two looks whether the disk refuses what is pending
_LOOK_SECONDS = 0.1
#: looks after which a disk that refuses does not do so by chance
_MOST_REFUSED = 10
#: agreements whose repetition is known
_MOST_AGREED = 10_000
_IN_VAIN = "no task has two finished episodes: nothing is trained, and what waits keeps waiting"


class EpisodeRequests:
    """Requests about the episodes of ``run``, while ``engine`` is in whatever state.

    Attributes:
        collected: notified when there may be a batch, or when running episodes may have finished.
    """

    def __init__(self, run: TrainingRun, engine: EngineBoard) -> None:
        self.run = run
        self._engine = engine
        self.collected = Signal()
        self._watching = math.inf
        self._look_again = asyncio.Event()
        #: when (monotonic) the last sync that clients agreed to ended, or they agreed in vain
        self.agreement_over = -math.inf
        #: by client and key
        self._agreed = Latest[tuple[str, str], BoolResponse](_MOST_AGREED)
        self.claims = ClaimQueue(lambda: run.found_pool)
        #: deletions; what they mean ends later than them, too
        self.deletions = Deletions()
        #: called with the names of the episodes whose data is deleted
        self.on_erased: Callable[[Iterable[str]], None] = lambda names: None

    async def synced(self) -> None:
        """Return when everything that has happened so far is on disk.

        Raises:
            UnavailableError: the disk did not take it in time (``journal_unavailable``); it happened nevertheless.
        """
        await self.run.journal.synced()

    async def caught_up(self) -> None:
        """As :meth:`synced`, for a caller that need not wait for room on the disk: if the disk refuses the pending
        rows, it waits for about one second."""
        synced = asyncio.ensure_future(self.synced())
        refused = 0
        try:
            while not synced.done():
                refused = refused + 1 if self.run.journal.error else 0
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
        if (pool := self.run.found_pool) is not None:
            if wish.episodes > (slots := self.run.job.slots):
                raise RequestError(
                    f"{wish.episodes} episodes cannot run at once: the job has {slots} slots "
                    "(raise max_parallel_episodes or batch_size)",
                    param="count",
                )
            pool.collection.seen(wish.client_uuid, train=wish.episode_type == "train", task_hint=wish.task_hint)
        self._check_disk()
        if self.run.journal.behind:
            # a claim is answered before it is on disk: without this, claims would outrun the disk
            caught_up = self.caught_up()
            await (caught_up if receive is None else until_gone(receive, caught_up))
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
        self,
        client_uuid: str,
        task_id: str,
        ends: Sequence[EpisodeEnd],
        *,
        as_group: bool,
        end_key: str = "",
        pair: Pair | None = None,
    ) -> str:
        """End episodes, see :meth:`EpisodePool.end`, also ones that only the journal remembers."""
        pool = self.run.pool
        past: dict[str, Ending] = {}
        for end in ends:
            if not pool.remembers(end.episode_uuid):
                ending = await self.run.journal.past_ending(end.episode_uuid)
                if ending is not None:
                    past[end.episode_uuid] = ending
        try:
            if any(self._erased(end.episode_uuid, end.workflow_output.notes) for end in ends):
                for end in ends:
                    pool.abort(client_uuid, end.episode_uuid, ERASED)
                self.on_erased(end.episode_uuid for end in ends)
                return ERASED
            return pool.end(client_uuid, task_id, ends, as_group=as_group, end_key=end_key, past=past, pair=pair)
        finally:
            # a conflict too is answered only once its cause is on disk
            await self._changed()

    async def abort(self, client_uuid: str, episode_uuid: str, reason: str = "", notes: Notes | None = None) -> str:
        """Give an episode up, see :meth:`EpisodePool.abort`; without a job there is nothing left to give up."""
        if (pool := self.run.found_pool) is None:
            return ""
        erased = self._erased(episode_uuid, notes)
        note = pool.abort(client_uuid, episode_uuid, reason, None if erased else notes)
        if erased:
            self.on_erased([episode_uuid])
        await self._changed()
        return note

    async def erase(self, subject: Subject) -> DataReport:
        """Delete all that was claimed for ``subject`` until now, whether it is over or not.

        Returns what there was.

        Raises:
            UnavailableError: it is not done yet; repeat it where the message does not say that it is noted.
        """
        journal, pool = self.run.journal, self.run.found_pool
        # a clock that was set back hides nothing
        running = [] if pool is None else [episode.claim.claimed_at for episode in pool.running.values()]
        until = max([time.time(), *running])
        self.deletions.add(subject, until)
        until = max([until, *(match.claimed_at for match in await journal.matches(subject, math.inf))])
        self.deletions.add(subject, until)
        # again: some of what was claimed by then may have ended while the journal was read
        matches = await journal.matches(subject, until)
        stone = Tombstone(id=uuid4().hex, subject=subject, until=until)
        if pool is not None:
            pool.collection.forget(names := {match.uuid for match in matches}, ERASED)
            self.on_erased(names)
            self.pool_changed()
        # that looks again: meanwhile a batch may have been taken, and trained
        after = await journal.erase(stone)
        there_was = dict(Counter(match.state for match in matches))
        return after.model_copy(update={"episodes": there_was, "deleted": True})

    def _erased(self, episode_uuid: str, notes: Notes | None) -> bool:
        if notes is None or (pool := self.run.found_pool) is None:
            return False
        episode = pool.running.get(episode_uuid)
        return episode is not None and self.deletions.cover(notes, episode.claim.claimed_at)

    async def record_rating(self, rating: SideRating) -> None:
        """Record what a user said of an answer."""
        self.run.pool.comparisons.rate(rating)
        await self._changed()

    async def record_pair(self, pair: Pair) -> None:
        """Record a pair that no end takes along."""
        self.run.pool.comparisons.add(pair)
        # its verdict may end a trial
        await self._changed()

    async def follow_stages(
        self,
        routes: Iterable[FollowedRoute],
        after_change: int | None,
        within: float,
        *,
        sets_rules: bool = True,
        may_hold: bool = True,
    ) -> tuple[int, list[ServingStage]]:
        """See :meth:`Stages.follow`; how many changes there were and the stages, at the first change after
        ``after_change``, once that is on disk, or ``within`` seconds: nobody follows a move that a death undoes. A
        lower share is returned at once, also while the disk is full; after other changes that are not on disk, once the
        disk has refused."""
        stages = self.run.pool.stages
        stages.follow(routes, sets_rules=sets_rules, may_hold=may_hold)
        self._watch()
        await stages.changed.until(lambda: self._engine.closing or stages.changes != after_change, within)
        changes, now = stages.changes, dict(stages.pointers)
        if after_change is None or not stages.waits_for_disk <= after_change <= changes:
            try:
                await self.synced()
            except UnavailableError:
                if not (lower := stages.taken_back()):
                    raise
                # another number than that of all changes: the others are asked for at once
                return stages.waits_for_disk - 1, lower
        stages.copies = now
        return changes, list(now.values())

    async def move_stage(self, move: Callable[[Stages], ServingStage]) -> ServingStage:
        """The stage that ``move`` leads to, once it is on disk."""
        stage = move(self.run.pool.stages)
        await self._changed()
        return stage

    async def resume_training(self) -> None:
        """Let training go on in spite of the alarms of now and of rollbacks, see :meth:`TrainingWatch.resume`."""
        self.run.pool.watch.resume()
        self.run.pool.stages.resume()
        await self._changed()

    async def withdraw_claim(self, client_uuid: str, claim_key: str) -> None:
        """Cancel the claim with this key, see :meth:`ClaimQueue.withdraw`."""
        self.claims.withdraw(client_uuid, claim_key)
        self._watch()
        await self.synced()

    async def can_continue(self, client_uuid: str, episode_uuid: str) -> bool:
        """Whether the episode is still this client's to run."""
        self.run.pool.collection.seen(client_uuid)
        mine = self.run.pool.running.of(client_uuid, episode_uuid) is not None
        await self.synced()
        return mine

    async def agree(self, client_uuid: str, key: str = "") -> BoolResponse:
        """The client has no more for the current batch; with a ``key`` that it gave before it repeats itself."""
        if (pool := self.run.found_pool) is None:
            return BoolResponse(success=False, failure_reason="there is no training job yet")
        if (answer := self._agreed.get((client_uuid, key))) is None:
            reason = pool.collection.agree(client_uuid)
            in_vain = pool.collection.in_vain
            answer = BoolResponse(success=in_vain or not reason, failure_reason=_IN_VAIN if in_vain else reason)
            if key:
                self._agreed[client_uuid, key] = answer
        await self._changed()
        return answer

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
            if (pool := self.run.found_pool) is not None and self._watching <= time.monotonic():
                pool.expire()
                self.pool_changed()

    async def _changed(self) -> None:
        """Call it when a request changed the pool; what it did is on disk when this returns."""
        self.pool_changed()
        await self.synced()

    def _check_disk(self) -> None:
        if error := self.run.journal.error:
            raise UnavailableError(
                f"the journal cannot write: {error}; claims are refused meanwhile", code="journal_unavailable"
            )

    def tell_collected(self) -> None:
        if (pool := self.run.found_pool) is None:
            return
        if self._engine.state is EngineState.ROLLING and pool.collection.in_vain:
            logger.warning("the clients agree to a weight sync, but %s", _IN_VAIN)
            pool.collection.end_agreements()
            self.agreement_over = time.monotonic()
        if self._engine.state is EngineState.ROLLING_POST or pool.collection.ready:
            self.collected.notify()

    def _next_due(self) -> float:
        if (pool := self.run.found_pool) is None:
            return math.inf
        times = (
            pool.running.deadlines.next(),
            pool.collection.next_change(),
            pool.stages.next_lapse(),
            self.claims.next_lapse(),
        )
        return min((due for due in times if due is not None), default=math.inf)

    def _watch(self) -> None:
        if self._next_due() < self._watching:
            self._look_again.set()
        self.tell_collected()

    def _why_not(self, refusal: Refusal) -> str:
        if self._engine.closing:
            return "The swarm server is shutting down"
        state = self._engine.state
        if state is EngineState.ROLLING or refusal.reason in (BATCH_WAITS, TRAINING_WAITS, TRAINED_OUT, TRAINER_AWAY):
            return refusal.reason or NO_EPISODES
        phrases = {EngineState.ROLLING_POST: POST_ROLLING, EngineState.WEIGHT_SYNCING: SYNCING}
        return phrases.get(state, f"Engine is {state.name.lower()} ({self._engine.detail})")
