"""Claims in the order in which they came, batches through the engine's states, and what is told of both."""

from __future__ import annotations

import asyncio
import math

import anyio
import pytest

from swarm.concurrency import ClientGoneError
from swarm.errors import ConflictError, RequestError, UnavailableError
from swarm.job import TrainJob
from swarm.link.messages import RolloutReady
from swarm.protocol import NO_EPISODES, SYNCING
from swarm.server.config import ServerConfig
from swarm.server.engine.controller import Controller
from swarm.server.episodes.episode import ClaimWish, EpisodeKey, Grant
from swarm.server.journal.rows import (
    BatchRow,
    EndRow,
    EvaluationRow,
    RunRow,
    StepRow,
)
from swarm.states import EngineState
from swarm.tokens import TrainBatch
from swarm.types import StepResult, WorkflowOutput
from tests.swarm.server.episodes.test_pool import ends, sample
from tests.swarm.server.memory import MemoryJournal

pytestmark = pytest.mark.anyio

JOB = TrainJob(model="tiny", batch_size=2, num_repeat=2)
LONG = 20.0


def ready(version: int = 0, last_batch: str = "") -> RolloutReady:
    return RolloutReady(
        addresses=["127.0.0.1:1"], model="m", policy_version=version, next_step=version + 1, last_batch=last_batch
    )


def done(batch: TrainBatch, step: int = 1) -> StepResult:
    return StepResult(step=step, batch_id=batch.batch_id, metrics={}, seconds=1.0)


def opened(journal: MemoryJournal | None = None, **config: float) -> Controller:
    controller = Controller(ServerConfig.model_validate({"post_rolling_timeout": LONG} | config))
    controller.open(journal or MemoryJournal())
    return controller


def rolling(journal: MemoryJournal | None = None, job: TrainJob = JOB, **config: float) -> Controller:
    controller = opened(journal, **config)
    controller.sync_job(job)
    controller.boot()
    controller.rollout_ready(ready())
    return controller


async def claim(controller: Controller, count: int = 1, wait: float = 0.0) -> list[EpisodeKey]:
    grant = await controller.episodes.claim(ClaimWish("me", episodes=count), wait)
    assert isinstance(grant, Grant), grant
    return list(grant.claims)


async def refusal(controller: Controller, count: int = 1, wait: float = 0.0) -> str:
    outcome = await controller.episodes.claim(ClaimWish("me", episodes=count), wait)
    assert isinstance(outcome, str), outcome
    return outcome


async def waiting(controller: Controller, count: int) -> asyncio.Task[list[EpisodeKey]]:
    """A claim that has queued up."""
    task = asyncio.create_task(claim(controller, count, LONG))
    await asyncio.sleep(0)
    assert not task.done()
    return task


def finish(controller: Controller, claims: list[EpisodeKey], task: str, reward: float = 1.0) -> None:
    for one in claims:
        sample(controller.pool, one)
    controller.pool.end("me", task, ends(*claims, reward=reward), as_group=True)
    controller.episodes.pool_changed()


async def out(controller: Controller) -> TrainBatch:
    """A batch that the engine has."""
    feed = asyncio.create_task(controller.next_batch())
    finish(controller, await claim(controller, 2, LONG), "a")
    finish(controller, await claim(controller, 2, LONG), "b")
    return await asyncio.wait_for(feed, LONG)


async def test_a_sync_that_nobody_agreed_to_ends_no_agreement() -> None:
    controller = rolling()
    batch = await out(controller)
    controller.step_done(done(batch))
    controller.rollout_ready(ready(1, batch.batch_id))
    assert controller.engine.state is EngineState.ROLLING and controller.episodes.agreement_over == -math.inf


async def test_a_batch_whose_data_is_deleted_while_it_is_trained_is_a_step_all_the_same() -> None:
    journal = MemoryJournal()
    controller = rolling(journal)
    batch = await out(controller)
    controller.pool.collection.forget({one.episode_uuid for one in batch.trajectories}, "deleted")
    controller.step_done(done(batch))
    # what says that the version learned from it
    assert [(row.result.step, row.result.batch_id) for row in journal.of(StepRow)] == [(1, batch.batch_id)]
    controller.rollout_ready(ready(1, batch.batch_id))
    assert (controller.engine.state, controller.status().steps[-1].step) == (EngineState.ROLLING, 1)


async def test_an_agreement_that_is_repeated_counts_for_one_batch() -> None:
    controller = rolling(job=JOB.model_copy(update={"collection": "any_client_agree_sync_weight"}))
    feed = asyncio.create_task(controller.next_batch())
    finish(controller, await claim(controller, 2), "a")
    answer = await controller.episodes.agree("me", "k")
    batch = await asyncio.wait_for(feed, LONG)
    controller.step_done(done(batch))
    controller.rollout_ready(ready(1, batch.batch_id))
    running = await claim(controller, 2)
    # whoever got no answer asks again after some time
    assert await controller.episodes.agree("me", "k") == answer
    finish(controller, running, "b")
    assert not controller.pool.collection.ready
    await controller.episodes.agree("me", "another")
    assert controller.pool.collection.ready


async def test_why_a_claim_fails() -> None:
    journal = MemoryJournal()
    controller = opened(journal, post_rolling_timeout=0.0)
    assert "no training job" in await refusal(controller)
    controller.sync_job(JOB)
    assert "Engine is offline" in await refusal(controller)
    controller.boot()
    controller.engine.progress("loading the model", "shard 1/2")
    assert "loading the model: shard 1/2" in await refusal(controller)
    controller.rollout_ready(ready())
    claims = await claim(controller, 4)
    assert await refusal(controller, wait=0.01) == NO_EPISODES
    feed = asyncio.create_task(controller.next_batch())
    finish(controller, claims[:2], "a")
    straggler = await claim(controller, 1)
    finish(controller, claims[2:], "b")
    await controller.engine.wait_for_state([EngineState.WEIGHT_SYNCING], LONG)
    assert await refusal(controller) == SYNCING
    assert controller.pool.running.of("me", straggler[0].episode_uuid) is None
    await feed
    with pytest.raises(RequestError, match="4 slots"):
        await claim(controller, 5)


async def test_steps_carry_our_metrics_of_their_batch() -> None:
    controller = rolling()
    feed = asyncio.create_task(controller.next_batch())
    finish(controller, await claim(controller, 2), "a", reward=0.0)
    finish(controller, await claim(controller, 2), "b", reward=1.0)
    batch = await asyncio.wait_for(feed, LONG)
    controller.step_done(StepResult(step=1, batch_id=batch.batch_id, metrics={"loss": 0.5}, seconds=1.0))
    controller.step_done(StepResult(step=1, batch_id=batch.batch_id, metrics={"loss": 0.5}, seconds=1.0))
    controller.step_done(StepResult(step=2, batch_id="unheard of", metrics={}, seconds=1.0))
    (first,) = controller.status().steps
    assert first.metrics == {
        "loss": 0.5,
        "swarm/reward_mean": 0.5,
        "swarm/reward_std": 0.5,
        "swarm/repetition": 0.0,
        "swarm/episodes": 4.0,
        "swarm/tasks": 2.0,
        "swarm/tasks_with_signal": 0.0,
        "swarm/response_tokens_mean": 1.0,
        "swarm/calls_mean": 1.0,
        "swarm/calls": 4.0,
        "swarm/timelines": 4.0,
        "swarm/unmerged_tokens": 8.0,
        "swarm/merged_tokens": 8.0,
        "swarm/lost_history": 0.0,
        "swarm/staleness_mean": 0.0,
        "swarm/staleness_max": 0.0,
    }
    assert controller.status(steps=0).steps == []


async def test_the_batch_of_a_dead_engine_is_sent_again_as_it_was() -> None:
    journal = MemoryJournal()
    controller = rolling(journal)
    batch = await out(controller)
    controller.offline("the engine process was killed by SIGKILL", ["last", "words"])
    status = controller.status()
    assert status.engine.engine_status_detail == "the engine process was killed by SIGKILL"
    assert status.last_lines == ["last", "words"]
    controller.boot()
    queued = await waiting(controller, 1)
    controller.rollout_ready(ready())
    assert not queued.done(), "what began now would be cut off by the weight sync"
    assert await asyncio.wait_for(controller.next_batch(), LONG) is batch
    controller.rollout_ready(ready(0, batch.batch_id))
    assert await asyncio.wait_for(controller.next_batch(), LONG) is batch, "asked for another without a step"
    assert len(journal.of(BatchRow)) == 1
    controller.step_done(done(batch))
    controller.rollout_ready(ready(1, batch.batch_id))
    await asyncio.wait_for(queued, LONG)


async def test_a_request_that_is_repeated_gets_the_answer_that_it_got() -> None:
    controller = rolling()
    batch = await out(controller)
    assert controller.rollout_ready(ready()) is batch, "the answer may be lost"
    assert controller.engine.state is EngineState.WEIGHT_SYNCING
    controller.step_done(done(batch))
    assert controller.rollout_ready(ready(7)) is None, "it has been answered, and that batch is trained"
    assert (controller.engine.state, controller.engine.policy_version) == (EngineState.WEIGHT_SYNCING, 0)
    assert controller.rollout_ready(ready(1, batch.batch_id)) is None
    assert (controller.engine.state, controller.engine.policy_version) == (EngineState.ROLLING, 1)
    assert controller.rollout_ready(ready()) is None
    assert (controller.engine.state, controller.engine.policy_version) == (EngineState.ROLLING, 1)
    following = await out(controller)
    assert following is not batch
    assert controller.rollout_ready(ready()) is following, "who asks so late has not asked for it, but drops it"
    assert controller.engine.state is EngineState.WEIGHT_SYNCING


async def test_a_step_that_is_reported_after_its_batch_came_back_is_recorded() -> None:
    journal = MemoryJournal()
    controller = rolling(journal)
    batch = await out(controller)
    controller.offline("the engine process was killed by SIGKILL")
    controller.step_done(done(batch))
    assert [record.result.batch_id for record in journal.of(StepRow)] == [batch.batch_id]
    controller.engine_failed("out of memory")
    assert not journal.failures, "the batch is not to blame for what came after its step"
    controller.boot()
    controller.rollout_ready(ready(1))
    assert not controller.pool.collection.ready


async def test_a_batch_on_which_the_trainer_reports_errors_is_dropped_in_the_end() -> None:
    journal = MemoryJournal()
    controller = rolling(journal, JOB.model_copy(update={"batch_attempts": 2}))
    batch = await out(controller)
    for attempt in (1, 2):
        controller.offline("the engine failed")
        controller.engine_failed("CUDA out of memory")
        controller.boot()
        controller.engine_failed("no such tokenizer")  # it had no batch: no evidence
        controller.rollout_ready(ready())
        assert journal.failures == list(range(1, attempt + 1))
        if attempt == 1:
            assert await asyncio.wait_for(controller.next_batch(), LONG) is batch
    status = controller.status()
    assert status.pool is not None and status.pool.dropped_episodes == 4
    assert await claim(controller, 4), "another batch can be collected"


async def test_a_batch_leaves_only_once_it_is_on_disk() -> None:
    journal = MemoryJournal()
    controller = rolling(journal)
    journal.gate.clear()
    feed = asyncio.create_task(controller.next_batch())
    a, b = [await claim(controller, 2) for _ in range(2)]
    journal.gate.set()
    journal.failing = True
    finish(controller, a, "a")
    finish(controller, b, "b")
    assert not (await asyncio.wait([feed], timeout=0.05))[0]
    assert "waits for the disk" in controller.engine_status().engine_status_detail
    journal.failing = False
    assert (await asyncio.wait_for(feed, LONG)).batch_id == journal.of(BatchRow)[0].batch.batch_id
    assert journal.synced_records == len(journal.records)


async def test_an_engine_that_asks_again_while_its_batch_waits_for_the_disk_gets_it_once() -> None:
    journal = MemoryJournal()
    controller = rolling(journal)
    feed = asyncio.create_task(controller.next_batch())
    finish(controller, await claim(controller, 2), "a")
    finish(controller, await claim(controller, 2), "b")
    journal.gate.clear()
    await controller.engine.wait_for_state([EngineState.WEIGHT_SYNCING], LONG)
    controller.rollout_ready(ready())
    journal.gate.set()
    batch = await asyncio.wait_for(feed, LONG)
    assert controller.engine.state is EngineState.WEIGHT_SYNCING
    assert not controller.pool.collection.ready
    controller.step_done(done(batch))
    controller.rollout_ready(ready(1, batch.batch_id))
    assert controller.engine.state is EngineState.ROLLING
    assert not controller.pool.collection.ready


async def test_what_is_told_is_on_disk() -> None:
    journal = MemoryJournal()
    controller = rolling(journal)
    first, second = await claim(controller, 2)
    sample(controller.pool, first)
    journal.gate.clear()
    late = ends(second)
    works = [
        asyncio.create_task(controller.episodes.end("me", "a", ends(first), as_group=False)),
        asyncio.create_task(controller.episodes.abort("me", second.episode_uuid)),
        asyncio.create_task(controller.episodes.can_continue("me", second.episode_uuid)),
        asyncio.create_task(controller.episodes.end("me", "a", late, as_group=False)),
    ]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not any(work.done() for work in works)
    journal.gate.set()
    *fine, refused = await asyncio.gather(*works, return_exceptions=True)
    assert fine == ["", "", False] and isinstance(refused, ConflictError)


async def test_a_disk_that_fails_loses_nothing_that_is_repeated() -> None:
    journal = MemoryJournal()
    controller = rolling(journal)
    journal.failing = True
    grant = await controller.episodes.claim(ClaimWish("me"))
    assert isinstance(grant, Grant)
    (one,) = grant.claims
    sample(controller.pool, one)
    journal.failing = True
    for _ in range(2):
        with pytest.raises(UnavailableError):
            await controller.episodes.end("me", "a", ends(one), as_group=False, end_key="e")
    journal.failing = False
    assert await controller.episodes.end("me", "a", ends(one), as_group=False, end_key="e") == ""
    assert len([r for r in journal.of(EndRow) if r.how == "ended"]) == 1
    assert controller.pool.information().completed_episodes == 1


async def test_new_claims_are_refused_while_the_disk_fails() -> None:
    journal = MemoryJournal()
    controller = rolling(journal)
    journal.error = "no space"
    for _ in range(2):
        with pytest.raises(UnavailableError, match="no space") as refused:
            await controller.episodes.claim(ClaimWish("me"))
        assert refused.value.code == "journal_unavailable"
    assert not controller.pool.running
    journal.error = ""
    assert isinstance(await controller.episodes.claim(ClaimWish("me")), Grant)


async def test_claims_keep_the_pace_of_a_slow_disk() -> None:
    journal = MemoryJournal()
    controller = rolling(journal)
    journal.behind = True
    journal.gate.clear()
    claiming = asyncio.create_task(controller.episodes.claim(ClaimWish("me")))
    await anyio.wait_all_tasks_blocked()
    assert not claiming.done() and not controller.pool.running
    journal.gate.set()
    assert isinstance(await claiming, Grant)
    journal.failing = True
    with pytest.raises(UnavailableError, match="disk is full"):
        await controller.episodes.claim(ClaimWish("me"))


async def test_a_claim_that_waits_for_the_disk_does_not_wait_for_room_on_it() -> None:
    journal = MemoryJournal()
    controller = rolling(journal)
    journal.behind = True
    journal.gate.clear()
    claiming = asyncio.create_task(controller.episodes.claim(ClaimWish("me")))
    await anyio.wait_all_tasks_blocked()
    journal.error = "database or disk is full"
    with pytest.raises(UnavailableError, match="disk is full"):
        await claiming
    assert not controller.pool.running


async def test_a_claim_whose_caller_leaves_while_it_waits_for_the_disk_leaves_nothing_behind() -> None:
    journal = MemoryJournal()
    controller = rolling(journal)
    journal.behind = True
    journal.gate.clear()

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    with pytest.raises(ClientGoneError):
        await asyncio.wait_for(controller.episodes.claim(ClaimWish("me"), LONG, receive), LONG)
    assert not controller.pool.running


async def test_an_equal_job_keeps_the_pool_another_one_does_not() -> None:
    journal = MemoryJournal()
    controller = rolling(journal)
    finish(controller, await claim(controller, 2), "a")
    (running,) = await claim(controller, 1)
    with pytest.raises(ConflictError, match="stop it"):
        controller.sync_job(JOB)
    controller.offline("crashed")
    controller.sync_job(JOB.model_copy(update={"resume": True}))
    assert controller.pool.information().completed_tasks == 1
    assert controller.pool.running.of("me", running.episode_uuid) is not None
    controller.sync_job(JOB.model_copy(update={"lr": 0.5}))
    assert controller.pool.information().completed_tasks == 0
    with pytest.raises(ConflictError) as late:
        await controller.episodes.end("me", "a", ends(running), as_group=False)
    assert late.value.code == "episode_deleted"
    first, same, other = [record.run_id for record in journal.of(RunRow)]
    assert first == same != other


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("stopped", [False, True])
async def test_a_run_goes_on_unless_it_was_stopped_and_does_not_resume(resume: bool, stopped: bool) -> None:
    journal = MemoryJournal()
    controller = rolling(journal)
    batch = await out(controller)
    controller.step_done(done(batch))
    controller.rollout_ready(ready(1, batch.batch_id))
    claims = await claim(controller, 4)
    finish(controller, claims[:2], "complete")
    finish(controller, claims[2:3], "partial")
    if stopped:
        controller.run_stopped()
    controller.offline("gone")
    controller.sync_job(JOB.model_copy(update={"resume": resume}))
    assert len(controller.status().steps) == 1, "it can be looked at until the next run starts"
    controller.boot()
    goes_on = resume or not stopped
    assert controller.pool.information().tasks == ({"complete": 2, "partial": 1} if goes_on else {})
    assert len(controller.status().steps) == goes_on
    assert (controller.pool.running.of("me", claims[3].episode_uuid) is not None) == goes_on
    assert len({record.run_id for record in journal.of(RunRow)}) == (1 if goes_on else 2)


@pytest.mark.parametrize(
    ("more", "steps", "resumes"),
    [
        ({"save_freq": 2}, 0, False),
        # step 2 may be saved, and its trainer may have died before it could say so
        ({"save_freq": 2}, 1, True),
        ({"save_freq": 2}, 2, True),
        ({}, 2, True),
        ({"save_freq": -1}, 2, False),
        ({"overrides": {"trainer.save_freq": 1}}, 1, True),
    ],
)
async def test_a_run_that_crashed_goes_on_from_a_checkpoint_of_its_own(
    more: dict[str, object], steps: int, resumes: bool
) -> None:
    controller = rolling(job=JOB.model_copy(update=more))
    for number in range(1, steps + 1):
        batch = await out(controller)
        controller.step_done(done(batch, number))
        controller.rollout_ready(ready(number, batch.batch_id))
    controller.offline("crashed")
    assert controller.boot().resume is resumes
    assert controller.newest_step == steps, "however far the checkpoint is behind"
    assert controller.job.resume is False


async def test_a_run_that_went_back_is_another_run_with_the_steps_up_to_there() -> None:
    journal = MemoryJournal()
    job = JOB.model_copy(update={"save_freq": 1, "max_staleness": None})
    controller = rolling(journal, job=job)
    for number in (1, 2, 3):
        batch = await out(controller)
        controller.step_done(done(batch, number))
        controller.rollout_ready(ready(number, batch.batch_id))
    finish(controller, await claim(controller, 2), "sampled by the weights of step 3")
    for version in (1, 3):
        controller.pool.evaluations.add(WorkflowOutput(reward=version / 10), [(version, 5)])
    controller.run_stopped()
    controller.offline("stopped")
    before = len(journal.records)
    assert controller.sync_job(job, from_step=2)
    assert [one.step for one in controller.status().steps] == [1, 2]
    assert [one.step for one in controller.status().evaluations] == [1]
    assert controller.pool.information().tasks == {}
    # a crash restarts it from its own checkpoint, though it was stopped before
    assert controller.boot().resume
    assert [one.step for one in controller.status().steps] == [1, 2]
    earlier, later = journal.of(RunRow)[0].run_id, journal.of(RunRow)[-1].run_id
    assert earlier != later
    added = journal.records[before:]
    assert [(row.run_id, row.result.step) for row in added if isinstance(row, StepRow)] == [(later, 1), (later, 2)]
    assert [(row.run_id, row.step) for row in added if isinstance(row, EvaluationRow)] == [(later, 1)]


async def test_a_run_that_goes_on_waits_for_nobody_of_the_run_before() -> None:
    controller = rolling(job=JOB.model_copy(update={"collection": "all_clients_agree_sync_weight", "resume": True}))
    take_part(controller, "dead")
    controller.run_stopped()
    controller.offline("stopped")
    controller.boot()
    controller.rollout_ready(ready())
    feed = asyncio.create_task(controller.next_batch())
    finish(controller, await claim(controller, 2), "a")
    assert (await controller.episodes.agree("me")).success
    await asyncio.wait_for(feed, LONG)


def take_part(controller: Controller, client: str) -> None:
    """An episode of this client begins and ends."""
    controller.pool.collection.claimed(client, "train")
    controller.pool.collection.released(client, "train", "", "aborted")


async def test_idle_episodes_are_expired_whose_claim_had_to_wait() -> None:
    controller = opened()
    controller.sync_job(JOB)
    expire = asyncio.create_task(controller.episodes.expire())
    try:
        gone = asyncio.create_task(controller.episodes.claim(ClaimWish("gone", idle_timeout=0.05, episodes=4), LONG))
        following = asyncio.create_task(claim(controller, 4, wait=LONG))
        await asyncio.sleep(0)
        controller.boot()
        controller.rollout_ready(ready())
        assert isinstance(await gone, Grant)
        assert len(await asyncio.wait_for(following, LONG)) == 4
    finally:
        expire.cancel()


async def test_a_group_that_is_polled_for_no_more_lets_those_behind_it_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.server.episodes.claims.BETWEEN_POLLS", 0.05)
    monkeypatch.setattr("swarm.server.episodes.claims.LONG_POLL", 0.01)
    controller = rolling()
    expire = asyncio.create_task(controller.episodes.expire())
    try:
        running = await claim(controller, 4)
        group = ClaimWish("me", episodes=4, as_group=True, claim_key="k")
        assert isinstance(await controller.episodes.claim(group, 0.01), str)
        following = asyncio.create_task(claim(controller, wait=LONG))
        await asyncio.sleep(0)
        controller.pool.abort("me", running[0].episode_uuid)
        controller.episodes.pool_changed()
        assert len(await asyncio.wait_for(following, LONG)) == 1
    finally:
        expire.cancel()


async def test_a_client_that_died_before_the_engine_rolled_does_not_hold_up_agreement() -> None:
    job = JOB.model_copy(update={"collection": "all_clients_agree_sync_weight"})
    controller = rolling(job=job, client_timeout=0.1)
    expire = asyncio.create_task(controller.episodes.expire())
    try:
        finish(controller, await claim(controller, 2), "a")
        controller.offline("crashed")
        controller.boot()
        take_part(controller, "dead")
        assert (await controller.episodes.agree("me")).success
        for _ in range(10):
            # clients' time stands still, so the watcher goes to rest without a deadline
            await asyncio.sleep(0)
        feed = asyncio.create_task(controller.next_batch())
        controller.rollout_ready(ready())
        await asyncio.wait_for(feed, LONG)
    finally:
        expire.cancel()


async def test_closing_lets_everyone_go() -> None:
    controller = rolling()
    await claim(controller, 4)
    waiter = asyncio.create_task(refusal(controller, wait=LONG))
    await asyncio.sleep(0)
    controller.close()
    assert "shutting down" in await asyncio.wait_for(waiter, 30)
    assert "shutting down" in await asyncio.wait_for(refusal(controller, wait=LONG), 30)
