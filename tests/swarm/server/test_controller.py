"""Claims in the order in which they came, batches through the engine's states, and what is told of both."""

from __future__ import annotations

import asyncio

import pytest

from swarm.errors import ConflictError, RequestError
from swarm.job import TrainJob
from swarm.link.messages import RolloutReady
from swarm.protocol import NO_EPISODES, POST_ROLLING, SYNCING
from swarm.server.controller import Controller
from swarm.server.episodes import Claim
from swarm.states import EngineState
from swarm.types import StepResult
from tests.swarm.server.test_pool import ends, sample

pytestmark = pytest.mark.anyio

JOB = TrainJob(model="tiny", batch_size=2, num_repeat=2)
LONG = 20.0


def ready(version: int = 0) -> RolloutReady:
    return RolloutReady(addresses=["127.0.0.1:1"], model="m", policy_version=version, next_step=version + 1)


def rolling(post_rolling_timeout: float = LONG) -> Controller:
    controller = Controller(post_rolling_timeout)
    controller.sync_job(JOB)
    controller.boot()
    controller.rollout_ready(ready())
    return controller


async def claim(controller: Controller, count: int = 1, wait: float = 0.0) -> list[Claim]:
    claims = await controller.claim("me", "train", 240.0, count, wait)
    assert not isinstance(claims, str), claims
    return claims


async def waiting(controller: Controller, count: int) -> asyncio.Task[list[Claim]]:
    """A claim that has queued up."""
    task = asyncio.create_task(claim(controller, count, LONG))
    await asyncio.sleep(0)
    assert not task.done()
    return task


def finish(controller: Controller, claims: list[Claim], task: str, reward: float = 1.0) -> None:
    for one in claims:
        sample(controller.pool, one)
    controller.pool.end("me", task, ends(*claims, reward=reward), as_group=True)
    controller.pool_changed()


async def test_why_a_claim_fails() -> None:
    controller = Controller(0.0)
    assert "no training job" in str(await controller.claim("me", "train", 1, 1, 0))
    controller.sync_job(JOB)
    assert "Engine is offline" in str(await controller.claim("me", "train", 1, 1, 0))
    controller.boot()
    controller.progress("loading the model", "shard 1/2")
    assert "loading the model: shard 1/2" in str(await controller.claim("me", "train", 1, 1, 0))
    controller.rollout_ready(ready())
    claims = await claim(controller, 4)
    assert await controller.claim("me", "train", 1, 1, 0.01) == NO_EPISODES
    feed = asyncio.create_task(controller.next_batch())
    finish(controller, claims[:2], "a")
    straggler = await claim(controller, 1)
    finish(controller, claims[2:], "b")
    await controller.wait_for_state(EngineState.WEIGHT_SYNCING, LONG)
    assert await controller.claim("me", "train", 1, 1, 0) == SYNCING
    assert not controller.pool.can_continue("me", straggler[0].episode_uuid)
    await feed
    with pytest.raises(RequestError, match="4 slots"):
        await controller.claim("me", "train", 1, 5, 0)


async def test_a_waiting_group_is_not_starved_by_single_claims() -> None:
    controller = rolling()
    running = await claim(controller, 3)
    group = await waiting(controller, 3)
    single = await waiting(controller, 1)
    assert await controller.claim("me", "train", 1, 1, 0) == NO_EPISODES, "the free slot is kept for those who wait"
    for one in running[:2]:
        assert not group.done()
        controller.pool.abort("me", one.episode_uuid)
        controller.pool_changed()
    assert len(await asyncio.wait_for(group, LONG)) == 3
    assert not single.done()
    controller.pool.abort("me", running[2].episode_uuid)
    controller.pool_changed()
    assert len(await asyncio.wait_for(single, LONG)) == 1


async def test_a_claim_that_gives_up_lets_those_behind_it_pass() -> None:
    controller = rolling()
    await claim(controller, 3)
    group = await waiting(controller, 2)
    single = await waiting(controller, 1)
    group.cancel()
    assert len(await asyncio.wait_for(single, LONG)) == 1
    impatient = asyncio.create_task(controller.claim("me", "train", 1, 2, 0.01))
    assert await asyncio.wait_for(impatient, LONG) == NO_EPISODES


async def test_a_claim_granted_to_a_caller_that_just_left_is_given_back() -> None:
    controller = rolling()
    running = await claim(controller, 4)
    group = await waiting(controller, 4)
    for one in running:
        controller.pool.abort("me", one.episode_uuid)
    controller.pool_changed()
    group.cancel()
    with pytest.raises(asyncio.CancelledError):
        await group
    assert controller.pool.running == 0


async def test_a_claim_waits_through_a_weight_sync() -> None:
    controller = rolling()
    feed = asyncio.create_task(controller.next_batch())
    finish(controller, await claim(controller, 2), "a")
    finish(controller, await claim(controller, 2), "b")
    batch = await asyncio.wait_for(feed, LONG)
    assert controller.state is EngineState.WEIGHT_SYNCING
    claimed = await waiting(controller, 2)
    controller.step_done(StepResult(step=1, batch_id=batch.batch_id, metrics={"loss": 0.5}, seconds=1.0))
    controller.rollout_ready(ready(1))
    assert len(await asyncio.wait_for(claimed, LONG)) == 2
    assert controller.policy_version == 1


async def test_rolling_post_lets_running_episodes_finish() -> None:
    controller = rolling()
    feed = asyncio.create_task(controller.next_batch())
    a, b = await claim(controller, 2), await claim(controller, 2)
    finish(controller, a, "a")
    late = await claim(controller, 2)
    finish(controller, b, "b")
    await controller.wait_for_state(EngineState.ROLLING_POST, LONG)
    assert await controller.claim("me", "train", 1, 1, 0) == POST_ROLLING
    finish(controller, late, "c")
    batch = await asyncio.wait_for(feed, LONG)
    assert [group.task_id for group in batch.groups] == ["a", "b"]
    assert controller.pool.information().tasks == {"c": 2}


async def test_steps_carry_our_metrics_of_their_batch() -> None:
    controller = rolling()
    feed = asyncio.create_task(controller.next_batch())
    finish(controller, await claim(controller, 2), "a", reward=0.0)
    finish(controller, await claim(controller, 2), "b", reward=1.0)
    batch = await asyncio.wait_for(feed, LONG)
    controller.step_done(StepResult(step=1, batch_id=batch.batch_id, metrics={"loss": 0.5}, seconds=1.0))
    controller.step_done(StepResult(step=1, batch_id=batch.batch_id, metrics={"loss": 0.5}, seconds=1.0))
    first, repeated = controller.status().steps
    assert first.metrics == {
        "loss": 0.5,
        "swarm/reward_mean": 0.5,
        "swarm/reward_std": 0.5,
        "swarm/episodes": 4.0,
        "swarm/tasks": 2.0,
        "swarm/response_tokens_mean": 1.0,
    }
    assert repeated.metrics == {"loss": 0.5}, "a batch counts once"
    assert len(controller.status(steps=1).steps) == 1


async def test_the_batch_of_a_dead_engine_goes_back() -> None:
    controller = rolling()
    feed = asyncio.create_task(controller.next_batch())
    finish(controller, await claim(controller, 2), "a")
    finish(controller, await claim(controller, 2), "b")
    await asyncio.wait_for(feed, LONG)
    assert controller.pool.information().completed_tasks == 0
    controller.offline("the engine process was killed by SIGKILL", ["last", "words"])
    status = controller.status()
    assert status.pool is not None
    assert status.pool.completed_tasks == 2
    assert status.engine.engine_status_detail == "the engine process was killed by SIGKILL"
    assert status.last_lines == ["last", "words"]
    controller.sync_job(JOB.model_copy(update={"resume": True}))
    controller.boot()
    controller.rollout_ready(ready())
    assert (await asyncio.wait_for(controller.next_batch(), LONG)).groups[0].task_id == "a"


async def test_an_engine_that_asks_again_without_a_step_gives_the_batch_back() -> None:
    controller = rolling()
    feed = asyncio.create_task(controller.next_batch())
    finish(controller, await claim(controller, 2), "a")
    finish(controller, await claim(controller, 2), "b")
    await asyncio.wait_for(feed, LONG)
    controller.rollout_ready(ready())
    assert controller.pool.batch_ready


async def test_an_equal_job_keeps_the_pool_another_one_does_not() -> None:
    controller = rolling()
    finish(controller, await claim(controller, 2), "a")
    with pytest.raises(ConflictError, match="stop it"):
        controller.sync_job(JOB)
    controller.offline("stopped")
    controller.sync_job(JOB.model_copy())
    assert controller.pool.information().completed_tasks == 1
    controller.sync_job(JOB.model_copy(update={"lr": 0.5}))
    assert controller.pool.information().completed_tasks == 0


@pytest.mark.parametrize("resume", [False, True])
async def test_what_the_run_before_collected_is_trained_only_by_a_run_that_resumes_it(resume: bool) -> None:
    controller = rolling()
    claims = await claim(controller, 3)
    finish(controller, claims[:2], "complete")
    finish(controller, claims[2:], "partial")
    controller.step_done(StepResult(step=1, batch_id="earlier", metrics={}, seconds=1.0))
    controller.offline("crashed")
    controller.sync_job(JOB.model_copy(update={"resume": resume}))
    assert len(controller.status().steps) == 1, "it can be looked at until the next run starts"
    controller.boot()
    information = controller.pool.information()
    assert information.tasks == ({"complete": 2, "partial": 1} if resume else {})
    assert information.dropped_episodes == (0 if resume else 3)
    assert len(controller.status().steps) == (1 if resume else 0)


async def test_idle_episodes_are_expired_without_polling() -> None:
    controller = rolling()
    expire = asyncio.create_task(controller.expire_idle())
    try:
        claims = await controller.claim("me", "train", 0.05, 4, 0)
        assert not isinstance(claims, str)
        assert len(await claim(controller, 4, wait=LONG)) == 4
    finally:
        expire.cancel()


async def test_waiting_for_a_state_ends_with_the_engine() -> None:
    controller = rolling()
    waiter = asyncio.create_task(controller.wait_for_state(EngineState.WEIGHT_SYNCING, LONG))
    await asyncio.sleep(0)
    controller.offline("died")
    await asyncio.wait_for(waiter, 30)
    started_offline = asyncio.create_task(controller.wait_for_state(EngineState.ROLLING, LONG))
    await asyncio.sleep(0)
    assert not started_offline.done()
    controller.boot()
    controller.rollout_ready(ready())
    await asyncio.wait_for(started_offline, 30)


async def test_closing_lets_everyone_go() -> None:
    controller = rolling()
    await claim(controller, 4)
    waiter = asyncio.create_task(controller.claim("me", "train", 1, 1, LONG))
    await asyncio.sleep(0)
    controller.close()
    assert "shutting down" in str(await asyncio.wait_for(waiter, 30))
    assert "shutting down" in str(await asyncio.wait_for(controller.claim("me", "train", 1, 1, LONG), 30))
