"""A server comes back as it was: single cases, and a machine that kills it at any point."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from swarm.errors import AuthenticationError, ConfigError, ConflictError, StateError
from swarm.job import TrainJob, dump_job
from swarm.link.messages import RolloutReady
from swarm.protocol import EpisodeEnd
from swarm.server.config import ServerConfig
from swarm.server.engine.controller import Controller
from swarm.server.episodes.episode import ClaimWish, EpisodeKey, Grant
from swarm.server.journal.journal import Journal
from swarm.server.journal.rows import Recovered
from swarm.states import EngineEvent, EngineState
from swarm.tokens import TrainBatch
from swarm.types import EvalResult, StepResult, WorkflowOutput
from tests.swarm.server.episodes.test_pool import ends, sample
from tests.swarm.server.memory import MemoryJournal

JOB = TrainJob(model="tiny", batch_size=2, num_repeat=2, max_parallel_episodes=6)
CONFIG = ServerConfig(post_rolling_timeout=0.0)
OFFLINE, BOOTING, ROLLING = EngineState.OFFLINE, EngineState.BOOTING, EngineState.ROLLING
SYNCING = EngineState.WEIGHT_SYNCING


def ready(version: int, last_batch: str = "") -> RolloutReady:
    return RolloutReady(
        addresses=["127.0.0.1:1"], model="m", policy_version=version, next_step=version + 1, last_batch=last_batch
    )


def rolling(journal: Journal, version: int = 0) -> Controller:
    controller = Controller(CONFIG)
    controller.open(journal)
    if not controller.has_job:
        controller.sync_job(JOB)
    controller.boot()
    controller.rollout_ready(ready(version))
    return controller


async def granted(controller: Controller, wish: ClaimWish) -> Grant:
    grant = await controller.episodes.claim(wish)
    assert isinstance(grant, Grant), grant
    return grant


def test_a_journal_whose_job_cannot_be_read() -> None:
    job_yaml = dump_job(JOB) + "from_the_future: 1\n"
    with pytest.raises(ConfigError, match=r"from_the_future.*run_dir"):
        Controller(CONFIG).open(MemoryJournal(Recovered(run_id="r", job_yaml=job_yaml)))


@pytest.mark.anyio
async def test_claims_keys_and_groups_after_a_restart(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal.db")
    before = rolling(journal)
    wish = ClaimWish("me", episodes=3, as_group=True, claim_key="k", max_seconds=1000.0)
    grant = await granted(before, wish)
    first = grant.claims[0]
    sample(before.pool, first)
    before.pool.quarantine(before.pool.open(grant.claims[1].episode_uuid, grant.claims[1].key), "bad")
    await before.episodes.synced()
    await journal.close()

    journal = Journal.open(tmp_path / "journal.db")
    controller = Controller(CONFIG)
    controller.open(journal)
    assert (controller.engine.state, controller.job) == (OFFLINE, JOB)
    assert "restarted" in controller.engine_status().engine_status_detail
    episode = controller.pool.open(first.episode_uuid, first.key)
    assert len(episode.calls) == 1
    assert 900 < episode.cap - episode.last_active <= 1000
    group = controller.pool.running.open_group(grant.group_uuid, grant.group_key)
    assert [member.episode_uuid for member in group.members] == [one.episode_uuid for one in grant.claims]
    again = await granted(controller, wish)
    assert [one.episode_uuid for one in again.claims] == [one.episode_uuid for one in grant.claims]
    for one in (*again.claims, *grant.claims):
        assert controller.pool.open(one.episode_uuid, one.key)
    assert controller.pool.running.open_group(again.group_uuid, again.group_key) is group
    assert controller.pool.running.open_group(grant.group_uuid, grant.group_key) is group
    assert await granted(controller, wish) == again, "within one life the keys are the same"
    reason = await controller.episodes.end("me", "a", ends(*grant.claims[:2]), as_group=True, end_key="e")
    assert reason == "quarantined: bad"
    await journal.close()

    journal = Journal.open(tmp_path / "journal.db")
    controller = Controller(CONFIG)
    controller.open(journal)
    assert await controller.episodes.end("me", "a", ends(*grant.claims[:2]), as_group=True, end_key="e") == reason
    third = grant.claims[2]
    for key in (third.key, again.claims[2].key):
        assert controller.pool.open(third.episode_uuid, key)
    with pytest.raises(AuthenticationError):
        controller.pool.running.open_group(grant.group_uuid, grant.group_key)
    await journal.close()


@pytest.mark.anyio
async def test_an_agreement_holds_after_a_restart_until_its_batch_is_taken(tmp_path: Path) -> None:
    job = JOB.model_copy(update={"collection": "any_client_agree_sync_weight"})

    async def server(journal: Journal) -> Controller:
        controller = Controller(CONFIG)
        controller.open(journal)
        if not controller.has_job:
            controller.sync_job(job)
        return controller

    journal = Journal.open(tmp_path / "journal.db")
    before = await server(journal)
    before.boot()
    before.rollout_ready(ready(0))
    grant = await granted(before, ClaimWish("me", episodes=2))
    for claim in grant.claims:
        sample(before.pool, claim)
    await before.episodes.end("me", "a", ends(*grant.claims), as_group=True)
    assert (await before.episodes.agree("me")).success
    await journal.close()

    journal = Journal.open(tmp_path / "journal.db")
    after = await server(journal)
    assert after.pool.collection.ready
    after.boot()
    after.rollout_ready(ready(0))
    await asyncio.wait_for(after.next_batch(), 20)
    await journal.close()

    journal = Journal.open(tmp_path / "journal.db")
    assert journal.recover().agreed == []
    await journal.close()


@pytest.mark.anyio
async def test_a_group_that_lacks_a_member_is_known_after_a_restart(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal.db")
    before = rolling(journal, 1)
    lost, good = (await granted(before, ClaimWish("me", episodes=2))).claims
    assert "no completed" in await before.episodes.end("me", "a", ends(lost), as_group=False)
    await journal.close()

    journal = Journal.open(tmp_path / "journal.db")
    after = rolling(journal, 1)
    sample(after.pool, good)
    await after.episodes.end("me", "a", ends(good), as_group=False)
    information = after.pool.information()
    assert (information.tasks, information.dropped_episodes) == ({}, 2), "its advantage would lack the lost answer"
    await journal.close()

    journal = Journal.open(tmp_path / "journal.db")
    assert journal.recover().losses == []
    await journal.close()


@dataclass
class Known:
    """What the client knows of one episode of its own."""

    claim: EpisodeKey
    wish: ClaimWish
    outcome: str = "running"
    task: str = ""


class ServerMachine(RuleBasedStateMachine):
    """A controller over a real journal, whose client remembers what it was told; the server is killed at any point.

    A kill loses what was not synced; here everything a client was told was.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.loop = asyncio.new_event_loop()
        self.clients: list[Known] = []
        self.numbers = 0
        self.version = 0
        self.batch: TrainBatch | None = None
        self.trained: set[str] = set()
        self.failures = 0
        self.run(self.begin())
        self.boot(True)

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    async def begin(self) -> None:
        self.journal = Journal.open(Path(self.folder.name) / "journal.db")
        self.controller = Controller(CONFIG)
        self.controller.open(self.journal)
        if not self.controller.has_job:
            self.controller.sync_job(JOB)

    def teardown(self) -> None:
        self.run(self.journal.close())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
        self.folder.cleanup()

    @property
    def state(self) -> EngineState:
        return self.controller.engine.state

    def known(self, outcome: str = "running") -> list[Known]:
        return [one for one in self.clients if one.outcome == outcome]

    # ------------------------------------------------------------------ the engine

    @precondition(lambda self: self.state is OFFLINE)
    @rule(rolls=st.booleans())
    def boot(self, rolls: bool) -> None:
        self.controller.boot()
        self.run(self.controller.episodes.synced())
        if rolls:
            self.boots()

    @precondition(lambda self: self.state is BOOTING)
    @rule()
    def boots(self) -> None:
        # a step that was reported by an engine which died then makes what waits older
        with self.some_dropped():
            self.controller.rollout_ready(ready(self.version))

    @precondition(lambda self: self.state is ROLLING and self.controller.pool.collection.ready)
    @rule()
    def take(self) -> None:
        resent = self.controller.pool.collection.outstanding
        batch = self.run(asyncio.wait_for(self.controller.next_batch(), 20))
        if resent is not None:
            assert batch == resent and (self.batch is None or batch == self.batch)
        self.batch = batch
        for one in self.known():
            one.outcome = "episode_deleted"

    @precondition(lambda self: self.state is SYNCING)
    @rule(repeated=st.booleans())
    def step(self, repeated: bool) -> None:
        batch_id = self.report(1 + repeated)
        self.run(self.controller.episodes.synced())
        with self.some_dropped():
            assert self.controller.rollout_ready(ready(self.version + 7, "of long ago")) is None
            assert self.state is SYNCING
            self.controller.rollout_ready(ready(self.version, batch_id))

    def report(self, times: int) -> str:
        """The step of the batch that is out is done."""
        assert self.batch is not None
        batch_id = self.batch.batch_id
        self.version += 1
        for _ in range(times):
            self.controller.step_done(StepResult(step=self.version, batch_id=batch_id, metrics={}, seconds=1.0))
        names = {t.episode_uuid for group in self.batch.groups for t in group.trajectories}
        assert not names & self.trained, "trained twice"
        self.trained |= names
        self.batch, self.failures = None, 0
        return batch_id

    @contextmanager
    def some_dropped(self) -> Generator[None]:
        """Some of what waits may be dropped in the block: which, the collection knows."""
        before = self.controller.pool.information().dropped_episodes
        yield
        self.lose_waiting(self.controller.pool.information().dropped_episodes - before)

    def lose_waiting(self, count: int) -> None:
        waiting = {
            m.trajectory.episode_uuid for g in self.controller.pool.collection.groups.waiting() for m in g.members
        }
        gone = [
            one
            for one in self.known("finished")
            if one.claim.episode_uuid not in waiting | self.trained | self.outstanding()
        ]
        assert len(gone) == count
        for one in gone:
            one.outcome = "dropped"

    def outstanding(self) -> set[str]:
        batch = self.controller.pool.collection.outstanding
        return {t.episode_uuid for g in batch.groups for t in g.trajectories} if batch else set()

    @precondition(lambda self: self.state is not OFFLINE)
    @rule(reports=st.booleans(), did_its_step=st.booleans())
    def engine_dies(self, reports: bool, did_its_step: bool) -> None:
        had = self.state is SYNCING
        self.controller.offline("died")
        if had and did_its_step:
            self.report(1)
            had = False
        if reports:
            with self.some_dropped():
                self.controller.engine_failed("out of memory")
                self.failures += had
                if had and self.failures == JOB.batch_attempts:
                    self.batch, self.failures = None, 0
        self.run(self.controller.episodes.synced())

    @precondition(lambda self: self.numbers > 8)
    @rule()
    def stop_and_start_anew(self) -> None:
        if self.state is not OFFLINE:
            self.controller.run_stopped()
            self.controller.offline("stopped")
            self.controller.boot()
            self.run(self.controller.episodes.synced())
            assert self.controller.pool.information().tasks == {}
            for one in self.clients:
                if one.outcome == "running":
                    one.outcome = "episode_deleted"
                elif one.outcome in ("finished", "dropped", "quarantined"):
                    one.outcome = "of another run"
            self.trained, self.batch, self.failures = set(), None, 0

    @rule(event=st.sampled_from(EngineEvent))
    def any_event(self, event: EngineEvent) -> None:
        """What is not in the tables is refused and changes nothing."""
        try:
            self.controller.engine.states.after(event)
        except StateError:
            before = self.controller.engine.states
            with pytest.raises(StateError):
                self.controller._happen(event, "")
            assert self.controller.engine.states is before

    # ------------------------------------------------------------------ the server

    @rule(cleanly=st.booleans())
    def restart(self, cleanly: bool) -> None:
        before = self.picture()
        if cleanly:
            self.controller.close()
        self.run(self.journal.close())
        self.run(self.begin())
        assert self.state is OFFLINE
        assert self.picture() == before

    def picture(self) -> Any:
        pool = self.controller.pool
        waiting = [(g.task_id, [m.trajectory for m in g.members]) for g in pool.collection.groups.waiting()]
        running = [(e.claim, e.calls, e.quarantine_reason) for e in pool.running.values()]
        steps = [step.batch_id for step in self.controller.status().steps]
        return pool.information(), sorted(waiting, key=repr), running, pool.collection.outstanding, steps

    # ------------------------------------------------------------------ clients

    @rule(count=st.integers(1, 3), is_eval=st.booleans(), as_group=st.booleans(), cap=st.sampled_from([0.0, 1e6]))
    def claim(self, count: int, is_eval: bool, as_group: bool, cap: float) -> None:
        self.numbers += 1
        kind, key = "eval" if is_eval else "train", f"claim-{self.numbers}"
        wish = ClaimWish("me", kind, 1e6, cap, count, as_group or count > 1, claim_key=key)
        room = JOB.slots - len(self.known()) >= count
        ready = self.controller.pool.collection.ready
        outcome = self.run(self.controller.episodes.claim(wish))
        assert isinstance(outcome, Grant) == (self.state is ROLLING and room and not ready)
        if isinstance(outcome, Grant):
            self.clients += [Known(one, wish) for one in outcome.claims]

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def claim_again(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.clients))
        again = self.run(self.controller.episodes.claim(one.wish))
        assert isinstance(again, Grant)
        of_claim = [known for known in self.clients if known.wish is one.wish]
        assert [c.episode_uuid for c in again.claims] == [known.claim.episode_uuid for known in of_claim]
        for known, claim in zip(of_claim, again.claims, strict=True):
            if known.outcome == "running":
                for key in (known.claim.key, claim.key):
                    assert self.controller.pool.open(claim.episode_uuid, key)
                known.claim = claim

    @precondition(lambda self: self.known())
    @rule(data=st.data(), bad=st.sampled_from([False, False, True]))
    def call(self, data: st.DataObject, bad: bool) -> None:
        one = data.draw(st.sampled_from(self.known()))
        episode = self.controller.pool.open(one.claim.episode_uuid, one.claim.key)
        counted = self.controller.pool.begin_call([episode])
        if bad:
            self.controller.pool.quarantine(episode, "bad")
        else:
            sample(self.controller.pool, one.claim)
        self.controller.pool.end_call([episode], counted)
        self.run(self.controller.episodes.synced())

    @precondition(lambda self: self.state is ROLLING and len(self.known()) < JOB.slots)
    @rule(tasks=st.lists(st.sampled_from("aabbc"), min_size=1, max_size=6), stop_at=st.integers(0, 6))
    def whole_episodes(self, tasks: list[str], stop_at: int) -> None:
        """In bulk, so that batches come about; with the last one the batch may be taken as well."""
        for task in tasks:
            if self.controller.pool.collection.ready:
                break
            self.claim(1, False, False, 1e6)
            sample(self.controller.pool, self.clients[-1].claim)
            self.end(self.clients[-1], task, "")
        if self.controller.pool.collection.ready and stop_at:
            self.take()
            if stop_at > 1:
                self.step(stop_at > 4)

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), task=st.sampled_from("abc"), key=st.sampled_from(["", "other"]))
    def some_end(self, data: st.DataObject, task: str, key: str) -> None:
        self.end(data.draw(st.sampled_from(self.clients)), task, key)

    def end(self, one: Known, task: str, other: str) -> None:
        pool = self.controller.pool
        before = pool.information()
        key = f"{one.claim.episode_uuid}{other}"
        work = self.controller.episodes.end("me", one.task or task, ends(one.claim), as_group=False, end_key=key)
        if one.outcome.startswith("episode_"):
            with pytest.raises(ConflictError) as late:
                self.run(work)
            assert late.value.code == one.outcome
        elif one.outcome != "running":
            if other:
                with pytest.raises(ConflictError) as late:
                    self.run(work)
                assert late.value.code == "episode_ended"
            else:
                self.run(work)
        else:
            # later ends of this machine use another key if ``other`` is set: the first key is always without
            work.close()
            reason = self.run(
                self.controller.episodes.end(
                    "me", task, ends(one.claim), as_group=False, end_key=one.claim.episode_uuid
                )
            )
            one.task = task
            if one.wish.episode_type == "eval":
                one.outcome = "evaluated"
            else:
                after = pool.information()
                one.outcome = (
                    "finished"
                    if not reason
                    else "quarantined"
                    if after.quarantined_episodes > before.quarantined_episodes
                    else "dropped"
                )
                lost = after.dropped_episodes - before.dropped_episodes - (one.outcome == "dropped")
                self.lose_waiting(lost)
            return
        assert pool.information() == before

    @precondition(lambda self: self.known())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.known()))
        assert self.run(self.controller.episodes.abort("me", one.claim.episode_uuid)) == ""
        one.outcome = "episode_aborted"

    @rule()
    def time_passes(self) -> None:
        """Episodes whose cap was nothing are due at once, the others never."""
        self.controller.pool.expire()
        self.controller.episodes.pool_changed()
        self.run(self.controller.episodes.synced())
        for one in self.known():
            if one.wish.max_seconds == 0.0:
                one.outcome = "episode_expired"

    # ------------------------------------------------------------------ what always holds

    @invariant()
    def every_acknowledged_reward_is_in_one_place(self) -> None:
        pool = self.controller.pool
        waiting = [m.trajectory.episode_uuid for g in pool.collection.groups.waiting() for m in g.members]
        places = [*waiting, *self.outstanding(), *self.trained]
        assert len(places) == len(set(places))
        assert set(places) == {one.claim.episode_uuid for one in self.known("finished")}
        info = pool.information()
        assert info.completed_episodes == len(waiting)
        assert info.dropped_episodes == len(self.known("dropped"))
        assert info.quarantined_episodes == len(self.known("quarantined"))
        running = {one.claim.episode_uuid for one in self.known()}
        assert {episode.episode_uuid for episode in pool.running.values()} == running


ServerMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestServerMachine = ServerMachine.TestCase


async def evaluated(journal: Journal, reward: float, success: bool, version: int) -> Controller:
    controller = rolling(journal, version)
    grant = await granted(controller, ClaimWish("me", "eval"))
    episode = controller.pool.open(grant.claims[0].episode_uuid, grant.claims[0].key)
    # what the data plane notes of calls that it does not record
    episode.unrecorded += [(version, 5), (version, 6)]
    output = WorkflowOutput(reward=reward, is_success=success, log_metrics={"tools": 2.0})
    controller.pool.end("me", "task", [EpisodeEnd(episode_uuid=episode.episode_uuid, workflow_output=output)])
    await controller.episodes.synced()
    return controller


@pytest.mark.anyio
async def test_evaluations_go_on_after_a_restart(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal.db")
    await evaluated(journal, 1.0, True, 0)
    await journal.close()
    journal = Journal.open(tmp_path / "journal.db")
    controller = await evaluated(journal, 0.0, False, 0)
    [told] = controller.status().evaluations
    rewards = {"reward_mean": 0.5, "reward_std": 0.5, "success_rate": 0.5}
    means = rewards | {"calls_mean": 2.0, "response_tokens_mean": 11.0, "log/tools": 2.0}
    assert told == EvalResult(step=0, episodes=2, metrics={f"eval/{name}": value for name, value in means.items()})
    assert controller.take_evaluations() == [told] and controller.take_evaluations() == []
    controller.offline("over")
    # another run has evaluations of its own
    controller.sync_job(JOB.model_copy(update={"lr": 1.0}))
    assert controller.status().evaluations == []
    await journal.close()


@pytest.mark.anyio
async def test_evaluations_of_weights_that_the_engine_lost_are_forgotten(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal.db")
    for version in (1, 3):
        controller = await evaluated(journal, 1.0, True, version)
        await journal.close()
        journal = Journal.open(tmp_path / "journal.db")
    # the last checkpoint is of step 2
    controller = rolling(journal, 2)
    assert [told.step for told in controller.status().evaluations] == [1]
    await journal.close()
    journal = Journal.open(tmp_path / "journal.db")
    [told] = (await evaluated(journal, 0.0, False, 3)).status().evaluations[1:]
    assert (told.step, told.episodes, told.metrics["eval/reward_mean"]) == (3, 1, 0.0)
    await journal.close()
