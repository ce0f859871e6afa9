"""Whatever the engine says in whatever order, state, claims and answers are those of the flags that once stood for it.

:class:`Flags` is the server of before as far as its flags decided anything: one word and nine flags. Known difference:
a train claim at an engine that is OFFLINE after its last step was told that a batch waits; now it is told OFFLINE.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from swarm.job import TrainJob
from swarm.link.messages import RolloutReady
from swarm.protocol import BATCH_WAITS, NO_EPISODES, POST_ROLLING, SYNCING, TRAINED_OUT, TRAINER_AWAY, EpisodeType
from swarm.server.episodes.episode import ClaimWish, Grant
from swarm.states import EngineState
from swarm.tokens import TrainBatch
from swarm.types import StepResult
from tests.swarm.server.engine.test_controller import finish, opened
from tests.swarm.server.memory import MemoryJournal

OFFLINE, BOOTING, ROLLING = EngineState.OFFLINE, EngineState.BOOTING, EngineState.ROLLING
POST, SYNC = EngineState.ROLLING_POST, EngineState.WEIGHT_SYNCING
JOB = TrainJob(
    model="tiny", batch_size=1, num_repeat=2, max_parallel_episodes=4, total_training_steps=3, batch_attempts=2
)


@dataclass
class Flags:
    """The engine's word and the flags beside it, changed as the server changed them."""

    always: bool
    word: EngineState = OFFLINE
    serving: bool = False
    serves_always: bool = False
    trainer_busy: bool = False
    trained_out: bool = False
    trainer_away: bool = False
    sent: str = ""
    given: str = ""
    asked: bool = False
    leaving: bool = False
    transferring: bool = False

    def enter(self, word: EngineState) -> None:
        self.word = word
        if word is BOOTING:
            self.trained_out = False

    def boot(self) -> None:
        self.sent = self.given = ""
        self.asked = False
        self.enter(BOOTING)

    def ready(self, last_batch: str, over: bool) -> bool:
        """Whether the request is none that was answered before."""
        if last_batch != self.given:
            return False
        self.serving, self.transferring = True, False
        self.serves_always, self.trainer_away = self.always, False
        if self.leaving:
            return True
        self.sent, self.trainer_busy = "", False
        self.trained_out, self.asked = over, not over
        if self.word in (BOOTING, SYNC):
            self.enter(ROLLING)
        return True

    def sync(self) -> None:
        self.transferring = True
        if self.word is ROLLING:
            self.enter(SYNC)

    def synced(self) -> None:
        if self.serving and self.word is SYNC:
            self.enter(ROLLING)

    def take(self) -> None:
        self.asked, self.leaving = False, True
        if self.serves_always:
            self.trainer_busy = True
        else:
            self.enter(SYNC)

    def handed(self, batch_id: str) -> None:
        self.leaving = False
        self.sent = self.given = batch_id

    def died(self) -> None:
        self.sent = self.given = ""
        self.asked, self.trainer_away = False, True
        self.enter(BOOTING)

    def offline(self) -> None:
        self.serving = self.transferring = self.trainer_away = self.leaving = False
        # it was kept until the next boot
        self.trained_out = False
        self.enter(OFFLINE)

    @property
    def serves(self) -> bool:
        return self.serving and not self.transferring

    def no_episode_needed(self, full: bool) -> str:
        if self.trainer_away:
            return TRAINER_AWAY
        if self.trained_out:
            return TRAINED_OUT
        return BATCH_WAITS if self.trainer_busy and self.word in (ROLLING, SYNC) and full else ""

    def answer(self, kind: EpisodeType, room: bool, ready: bool, full: bool) -> str:
        """What a claim of one episode is told; empty: it is granted."""
        if kind == "train" and (reason := self.no_episode_needed(full)):
            return reason
        match self.word:
            case EngineState.ROLLING if ready and not self.trained_out:
                return POST_ROLLING
            case EngineState.ROLLING:
                return "" if room else NO_EPISODES
            case EngineState.ROLLING_POST:
                return POST_ROLLING
            case EngineState.WEIGHT_SYNCING:
                return SYNCING
            case EngineState.BOOTING:
                return "Engine is booting"
            case EngineState.OFFLINE:
                return "Engine is offline"


class EngineMachine(RuleBasedStateMachine):
    """A controller, what an engine may say to it, and the flags; a batch leaves as soon as it may."""

    @initialize(always=st.booleans())
    def begin(self, always: bool) -> None:
        self.loop = asyncio.new_event_loop()
        self.journal = self.run(self.made())
        self.controller = opened(self.journal, post_rolling_timeout=1e6)
        self.controller.sync_job(JOB)
        self.flags = Flags(always)
        self.version = self.tasks = 0
        #: the batch that is out or came back
        self.batch = ""
        self.straggler = ""
        self.feed: asyncio.Task[TrainBatch] | None = None

    async def made(self) -> MemoryJournal:
        return MemoryJournal()

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def teardown(self) -> None:
        self.stop_feed()
        self.loop.close()

    def stop_feed(self) -> None:
        if self.feed is not None:
            self.feed.cancel()
            self.run(asyncio.wait([self.feed]))
            self.feed = None
        self.flags.leaving = False
        self.journal.gate.set()

    def react(self) -> None:
        """Let a batch leave, if there is one and the engine waits for it."""
        if self.feed is None:
            self.feed = self.loop.create_task(self.controller.next_batch())
        flags, ready = self.flags, self.controller.pool.collection.ready
        if flags.word is POST and not ready:
            flags.enter(ROLLING)
        leaves = flags.asked and ready and flags.word in (ROLLING, POST)
        self.run(self.settle())
        if leaves and self.straggler and not flags.serves_always:
            flags.enter(POST)
        elif leaves:
            flags.take()
        if flags.leaving and self.journal.gate.is_set():
            batch = self.run(asyncio.wait_for(self.feed, 20))
            self.batch = batch.batch_id
            flags.handed(batch.batch_id)
            self.feed = self.loop.create_task(self.controller.next_batch())
            self.run(self.settle())
        assert not self.feed.done(), "nobody has asked for it"

    async def settle(self) -> None:
        for _ in range(9):
            await asyncio.sleep(0)

    # ------------------------------------------------------------------ the engine

    @precondition(lambda self: self.flags.word is OFFLINE)
    @rule(asks=st.booleans())
    def boot(self, asks: bool) -> None:
        self.controller.boot()
        self.flags.boot()
        if asks:
            self.ask(False, False)

    @precondition(lambda self: self.flags.word is not OFFLINE)
    @rule(repeated=st.booleans(), over=st.sampled_from([False] * 5 + [True]))
    def ask(self, repeated: bool, over: bool) -> None:
        flags = self.flags
        # a batch that leaves is for a step
        over = flags.trained_out or (over and not (flags.leaving or flags.word is POST))
        message = RolloutReady(
            addresses=["127.0.0.1:1"],
            model="m",
            policy_version=self.version,
            next_step=JOB.total_training_steps + over,
            last_batch="of long ago" if repeated else flags.given,
            serving="always" if flags.always else "between_steps",
        )
        resent = flags.sent
        again = self.controller.rollout_ready(message)
        taken = flags.ready(message.last_batch, over)
        assert (again.batch_id if again is not None else "") == ("" if taken else resent)
        self.react()

    # a trainer that waits for a batch has no weights to transfer
    @precondition(lambda self: not self.flags.leaving and (self.flags.word is BOOTING or self.computes()))
    @rule(ends=st.booleans())
    def sync(self, ends: bool) -> None:
        self.controller.weight_sync_begins()
        self.flags.sync()
        # elsewhere vLLM drops its requests, and its trainer says no more of it
        if ends and self.flags.always:
            self.synced()

    @precondition(lambda self: self.flags.always and self.flags.transferring)
    @rule()
    def synced(self) -> None:
        self.version += self.flags.word is SYNC
        self.controller.weights_synced(self.version)
        self.flags.synced()

    def computes(self) -> bool:
        flags = self.flags
        return flags.word is SYNC or (flags.word is ROLLING and flags.trainer_busy)

    @precondition(lambda self: self.batch and not self.flags.leaving)
    @rule()
    def step(self) -> None:
        """Perhaps of a batch that came back meanwhile."""
        self.controller.step_done(StepResult(step=1, batch_id=self.batch, metrics={}, seconds=1.0))
        self.batch = self.flags.sent = ""
        if self.flags.word is not OFFLINE:
            self.react()

    @precondition(lambda self: self.flags.word is not OFFLINE)
    @rule(alone=st.sampled_from([True, True, False]))
    def dies(self, alone: bool) -> None:
        """The trainer, or all of the engine."""
        self.stop_feed()
        if alone and self.flags.serves:
            self.blame(self.controller.trainer_died)
            self.flags.died()
            self.react()
        else:
            self.controller.offline("killed")
            self.blame(self.controller.engine_failed)
            self.flags.offline()

    def blame(self, tell: Callable[[str], object]) -> None:
        """The batch that the trainer has is to blame, and no other."""
        before = len(self.journal.failures)
        tell("out of memory")
        assert len(self.journal.failures) - before == bool(self.flags.sent)
        if self.controller.pool.collection.outstanding is None:
            self.batch = ""
        self.flags.sent = ""

    # ------------------------------------------------------------------ episodes

    @precondition(lambda self: self.flags.word is ROLLING)
    @rule(straggles=st.booleans(), slow_disk=st.booleans())
    def collect(self, straggles: bool, slow_disk: bool) -> None:
        """A batch becomes whole, perhaps while another episode runs, perhaps long before the disk has it."""
        if straggles and not self.straggler and isinstance(grant := self.claim("eval"), Grant):
            self.straggler = grant.claims[0].episode_uuid
        claims = [claim for claim in (self.claim("train"), self.claim("train")) if isinstance(claim, Grant)]
        self.tasks += 1
        if len(claims) == JOB.num_repeat:
            if slow_disk:
                self.journal.gate.clear()
            finish(self.controller, [grant.claims[0] for grant in claims], f"task-{self.tasks}")
        else:
            for grant in claims:
                self.controller.pool.abort("me", grant.claims[0].episode_uuid)
        self.react()

    @precondition(lambda self: self.straggler or self.flags.leaving)
    @rule()
    def what_the_batch_waits_for_happens(self) -> None:
        self.journal.gate.set()
        if self.straggler:
            self.controller.pool.abort("me", self.straggler)
            self.controller.episodes.pool_changed()
            self.straggler = ""
        if self.flags.word is not OFFLINE:
            self.react()

    # ------------------------------------------------------------------ what always holds

    def claim(self, kind: EpisodeType, gives_way: bool = False) -> Grant | str:
        return self.run(self.controller.episodes.claim(ClaimWish("me", kind, unless_batch_waits=gives_way)))

    def answer(self, kind: EpisodeType) -> str:
        pool = self.controller.pool
        return self.flags.answer(kind, len(pool.running) < JOB.slots, pool.collection.ready, pool.collection.full)

    @invariant()
    def state_and_status_are_what_the_flags_say(self) -> None:
        controller, flags = self.controller, self.flags
        assert (controller.engine.state, controller.engine.states.outlives_trainer) == (flags.word, flags.serves)
        status = controller.status()
        mode = ("always" if flags.always else "between_steps") if flags.serving else None
        assert (status.serving, status.training_seconds is None) == (mode, not flags.sent)
        # it may have been cut off by a batch that left without it
        if self.straggler and controller.pool.running.get(self.straggler) is None:
            assert not flags.always
            self.straggler = ""

    @invariant()
    def claims_are_answered_as_the_flags_say(self) -> None:
        pool = self.controller.pool
        assert pool.no_episode_needed == self.flags.no_episode_needed(pool.collection.full)
        kinds: tuple[EpisodeType, ...] = ("train", "eval")
        for kind, gives_way in product(kinds, (False, True)):
            expected, outcome = self.answer(kind), self.claim(kind, gives_way)
            if isinstance(outcome, Grant):
                assert not expected
                pool.abort("me", outcome.claims[0].episode_uuid)
            else:
                assert expected and outcome.startswith(expected)


EngineMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40)
TestEngineMachine = EngineMachine.TestCase
