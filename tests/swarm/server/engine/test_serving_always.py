"""Episodes run on while the trainer computes: batches leave, weights change, and nobody is cut off or kept waiting."""

from __future__ import annotations

import asyncio

import pytest

from swarm.job import TrainJob
from swarm.link.messages import RolloutReady
from swarm.protocol import BATCH_WAITS, TRAINER_AWAY
from swarm.server.engine.controller import Controller
from swarm.server.episodes.episode import ClaimWish, Grant
from swarm.states import EngineState
from swarm.tokens import TrainBatch
from tests.swarm.server.engine.test_controller import LONG, claim, done, finish, opened, out, ready, refusal, waiting
from tests.swarm.server.memory import MemoryJournal

pytestmark = pytest.mark.anyio

JOB = TrainJob(model="tiny", batch_size=2, num_repeat=2, max_parallel_episodes=8)


def always(version: int = 0, last_batch: str = "") -> RolloutReady:
    plain = ready(version, last_batch)
    return RolloutReady(
        addresses=plain.addresses,
        model=plain.model,
        policy_version=version,
        next_step=plain.next_step,
        last_batch=last_batch,
        serving="always",
    )


def rolling(journal: MemoryJournal | None = None, job: TrainJob = JOB) -> Controller:
    controller = opened(journal)
    controller.sync_job(job)
    controller.boot()
    controller.rollout_ready(always())
    return controller


async def gateway_claim(controller: Controller, wait: float = LONG) -> object:
    return await controller.episodes.claim(ClaimWish("gateway", episodes=2, unless_batch_waits=True), wait)


async def evaluations(controller: Controller, count: int) -> Grant:
    grant = await controller.episodes.claim(ClaimWish("me", episodes=count, episode_type="eval"), LONG)
    assert isinstance(grant, Grant)
    return grant


def synced(controller: Controller, version: int) -> None:
    controller.weight_sync_begins()
    controller.weights_synced(version)


def step(controller: Controller, batch: TrainBatch, number: int) -> None:
    """What an engine says once it has computed step ``number``."""
    synced(controller, number)
    controller.step_done(done(batch, number))
    controller.rollout_ready(always(number, batch.batch_id))


async def test_episodes_run_on_while_the_trainer_computes_and_the_weights_change() -> None:
    controller = rolling()
    running = await claim(controller, 2)
    batch = await out(controller)
    assert controller.engine.state is EngineState.ROLLING
    begun = await claim(controller, 2)
    controller.weight_sync_begins()
    assert controller.engine.state is EngineState.WEIGHT_SYNCING and controller.engine.policy_version == 0
    queued = await waiting(controller, 2)
    finish(controller, running, "c")
    controller.weights_synced(1)
    assert (controller.engine.state, controller.engine.policy_version) == (EngineState.ROLLING, 1)
    assert len(await asyncio.wait_for(queued, LONG)) == 2
    controller.step_done(done(batch))
    controller.rollout_ready(always(1, batch.batch_id))
    feed = asyncio.create_task(controller.next_batch())
    finish(controller, begun, "d")
    following = await asyncio.wait_for(feed, LONG)
    assert [group.task_id for group in following.groups] == ["c", "d"]
    assert controller.pool.information().trained_episodes == 4


async def test_whoever_follows_the_engine_hears_of_a_step_that_begins_and_of_one_that_is_done() -> None:
    """The weights are transferred before the step is reported: no state changes with the report."""
    controller = rolling()
    waiting_for_step = asyncio.create_task(controller.engine.wait_for_change(controller.engine.changes, 2 * LONG))
    batch = await out(controller)
    assert controller.status().training_seconds is not None
    await asyncio.wait_for(waiting_for_step, LONG)
    synced(controller, 1)
    waiting_for_end = asyncio.create_task(controller.engine.wait_for_change(controller.engine.changes, 2 * LONG))
    controller.step_done(done(batch))
    await asyncio.wait_for(waiting_for_end, LONG)
    assert controller.status().training_seconds is None


async def test_a_batch_waits_for_the_trainer_and_then_leaves_at_once() -> None:
    controller = rolling()
    first = await out(controller)
    feed = asyncio.create_task(controller.next_batch())
    finish(controller, await claim(controller, 2), "c")
    finish(controller, await claim(controller, 2), "d")
    assert await gateway_claim(controller) == BATCH_WAITS
    assert await refusal(controller) == BATCH_WAITS
    patient = await waiting(controller, 2)
    assert not feed.done()
    step(controller, first, 1)
    assert [group.task_id for group in (await asyncio.wait_for(feed, LONG)).groups] == ["c", "d"]
    assert len(await asyncio.wait_for(patient, LONG)) == 2


@pytest.mark.parametrize("max_staleness", [1, 2, None])
async def test_no_more_begin_than_come_in_time_while_the_trainer_computes(max_staleness: int | None) -> None:
    controller = rolling(job=JOB.model_copy(update={"max_staleness": max_staleness, "max_parallel_episodes": 16}))
    first = await out(controller)
    allowed = 14 if max_staleness is None else 4 * max_staleness
    running = [await claim(controller, 2) for _ in range(allowed // 2)]
    if max_staleness is None:
        assert len(await claim(controller, 2)) == 2, "nothing is ever too old"
        return
    unsure = asyncio.create_task(gateway_claim(controller))
    assert await asyncio.wait_for(unsure, LONG) == BATCH_WAITS
    assert await refusal(controller) == BATCH_WAITS
    finish(controller, running[0], "c")
    assert await refusal(controller) == BATCH_WAITS, "it waits instead of running"
    queued = await waiting(controller, 2)
    controller.pool.abort("me", running[1][0].episode_uuid)
    controller.episodes.pool_changed()
    assert len(await asyncio.wait_for(queued, LONG)) == 2, "one was given up, and its place is free"
    patient = await waiting(controller, 2)
    step(controller, first, 1)
    assert len(await asyncio.wait_for(patient, LONG)) == 2


async def test_a_claim_that_gives_way_leaves_the_queue_when_enough_run() -> None:
    controller = rolling()
    await out(controller)
    await claim(controller, 2)
    others = await evaluations(controller, 6)
    last = await waiting(controller, 2)
    unsure = asyncio.create_task(gateway_claim(controller))
    await asyncio.sleep(0)
    assert not unsure.done(), "all slots are taken"
    for one in others.claims[:4]:
        controller.pool.abort("me", one.episode_uuid)
    controller.episodes.pool_changed()
    assert await asyncio.wait_for(unsure, LONG) == BATCH_WAITS
    assert len(await last) == 2


async def test_a_batch_that_becomes_whole_while_the_trainer_waits_refuses_nobody() -> None:
    controller = rolling()
    feed = asyncio.create_task(controller.next_batch())
    finish(controller, await claim(controller, 2), "a")
    running = await claim(controller, 2)
    await evaluations(controller, 6)
    queued = asyncio.create_task(gateway_claim(controller))
    await asyncio.sleep(0)
    finish(controller, running, "b")
    await asyncio.wait_for(feed, LONG)
    assert await asyncio.wait_for(queued, LONG) != BATCH_WAITS


async def test_what_is_older_than_the_job_allows_is_dropped_at_the_sync() -> None:
    controller = rolling()
    first = await out(controller)
    finish(controller, await claim(controller, 2), "old")
    step(controller, first, 1)
    feed = asyncio.create_task(controller.next_batch())
    assert controller.pool.information().tasks == {"old": 2}
    finish(controller, await claim(controller, 2), "new")
    second = await asyncio.wait_for(feed, LONG)
    old = await claim(controller, 2)
    finish(controller, await claim(controller, 2), "sampled by version 0")
    step(controller, second, 2)
    finish(controller, old, "also")
    assert controller.pool.collection.dropped == 4


async def test_a_trainer_that_dies_gets_its_batch_again() -> None:
    controller = rolling()
    batch = await out(controller)
    running = await claim(controller, 2)
    controller.offline("killed")
    assert controller.status().training_seconds is None, "nobody trains"
    controller.boot()
    controller.rollout_ready(always())
    assert await asyncio.wait_for(controller.next_batch(), LONG) is batch
    controller.rollout_ready(always(0, batch.batch_id))
    assert await asyncio.wait_for(controller.next_batch(), LONG) is batch, "it asks for another without a step"
    finish(controller, running, "c")
    step(controller, batch, 1)
    assert controller.pool.information().tasks == {"c": 2}
    assert controller.rollout_ready(always(7)) is None, "a request that was answered"


def test_a_job_that_trains_nothing_old_cannot_serve_always() -> None:
    with pytest.raises(ValueError, match="max_staleness of 1 or more"):
        TrainJob(model="m", serving="always", max_staleness=0)


async def test_groups_that_expire_at_the_next_sync_make_no_batch_that_others_wait_for() -> None:
    controller = rolling()
    running = {task: await claim(controller, 2) for task in ("c", "d", "surplus")}
    first = await out(controller)
    feed = asyncio.create_task(controller.next_batch())
    for task, claims in running.items():
        finish(controller, claims, task)
    step(controller, first, 1)
    second = await asyncio.wait_for(feed, LONG)
    assert [group.task_id for group in second.groups] == ["c", "d"]
    # sampled by version 0: it may wait for version 1, and is too old for version 2
    finish(controller, await claim(controller, 2), "as old")
    assert controller.pool.information().tasks == {"surplus": 2, "as old": 2}
    assert len(await claim(controller, 2)) == 2, "the trainer would have nothing to do after its step"


async def test_a_batch_that_waits_holds_up_no_evaluation_and_says_so_during_the_sync() -> None:
    controller = rolling()
    await out(controller)
    for task in ("c", "d"):
        finish(controller, await claim(controller, 2), task)
    assert await refusal(controller) == BATCH_WAITS
    train = asyncio.create_task(claim(controller, 1, LONG))
    await asyncio.sleep(0)
    await evaluations(controller, 1)
    controller.weight_sync_begins()
    assert await gateway_claim(controller) == BATCH_WAITS
    train.cancel()


async def test_a_trainer_that_dies_leaves_vllm_serving_and_gets_its_batch_again() -> None:
    controller = rolling()
    running = await claim(controller, 2)
    batch = await out(controller)
    unsure = asyncio.create_task(gateway_claim(controller))
    served = controller.engine.served
    await asyncio.wait_for(unsure, LONG)
    job = controller.trainer_died("killed")
    assert (controller.engine.state, job.resume, controller.engine.policy_version) == (EngineState.BOOTING, False, 0)
    assert controller.engine.served is served and not served.gone.happened, "calls would be cut off"
    status = controller.status()
    assert (status.serving, status.training_seconds) == ("always", None)
    assert status.engine_failure is not None and status.engine_failure.count == 1
    assert await gateway_claim(controller) == TRAINER_AWAY
    patient = await waiting(controller, 2)
    finish(controller, running, "finished meanwhile")
    controller.trainer_died("killed again")
    assert controller.engine.failure is not None and controller.engine.failure.count == 2
    # the other trainer transfers its weights before it asks for a batch
    synced(controller, 3)
    assert (controller.engine.state, controller.engine.policy_version) == (EngineState.BOOTING, 3)
    controller.rollout_ready(always(3))
    assert controller.engine.state is EngineState.ROLLING and not controller.engine.served.gone.happened
    assert await asyncio.wait_for(controller.next_batch(), LONG) is batch
    assert len(await asyncio.wait_for(patient, LONG)) == 2
    step(controller, batch, 4)
    assert controller.engine.failure is None
    assert isinstance(await gateway_claim(controller), Grant)


async def test_a_trainer_that_fails_is_evidence_against_its_batch_and_an_engine_that_dies_ends_the_serving() -> None:
    controller = rolling()
    for _ in range(JOB.batch_attempts):
        await out(controller) if not controller.pool.collection.ready else await controller.next_batch()
        controller.trainer_died("out of memory")
        controller.rollout_ready(always())
    assert controller.pool.collection.outstanding is None and controller.pool.collection.dropped == 4
    controller.trainer_died("out of memory")
    controller.weight_sync_begins()
    assert not controller.engine.states.outlives_trainer, "another trainer would find a paused vLLM"
    controller.rollout_ready(always())
    assert controller.engine.states.outlives_trainer
    controller.trainer_died("out of memory")
    controller.offline("vLLM died, too")
    assert not controller.engine.states.outlives_trainer and not controller.pool.no_episode_needed
