"""Both clients against the real swarm server over real sockets; the engine's part is played by the test."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from swarm.client import AsyncSwarmClient, EpisodeEndpoint, SwarmClient
from swarm.errors import AuthenticationError, ConflictError, NotFoundError, RequestError, UnavailableError
from swarm.job import TrainJob
from swarm.link.messages import RolloutReady
from swarm.server.app import create_app
from swarm.server.config import ServerConfig
from swarm.server.engine.controller import Controller
from swarm.states import EngineState
from swarm.types import Task, WorkflowOutput
from tests.standins.vllm import listening
from tests.swarm.client.conftest import QUICK
from tests.swarm.server.episodes.test_pool import record
from tests.token_data import model_call

pytestmark = pytest.mark.anyio

JOB = TrainJob(model="tiny", batch_size=2, num_repeat=2)
READY = RolloutReady(addresses=["127.0.0.1:9"], model="tiny", policy_version=3, next_step=4)
OUTPUT = WorkflowOutput(reward=0.5)
PATIENCE = 30.0


@dataclass
class Swarm:
    """A server without an engine process, and how to play the engine."""

    url: str
    controller: Controller

    def roll(self) -> None:
        self.controller.sync_job(JOB)
        self.controller.boot()
        self.controller.rollout_ready(READY)

    def sample(self, episode: EpisodeEndpoint) -> None:
        """Record one model call, as the data plane does."""
        pool = self.controller.pool
        call = model_call([1], [2], 3)
        record(pool, pool.open(episode.episode_uuid, episode.api_key), call)

    async def claim_is_waiting(self) -> None:
        async with asyncio.timeout(PATIENCE):
            while not self.controller.status(0).waiting_claims:  # noqa: ASYNC110 - what a client does over the socket sets no event
                await asyncio.sleep(0.002)


@pytest.fixture
async def swarm(tmp_path: Path, anyio_backend: str) -> AsyncIterator[Swarm]:
    app = create_app(ServerConfig(run_dir=tmp_path, token="secret"))
    async with listening(app) as url:
        yield Swarm(url, app.state.controller)


@pytest.fixture
async def client(swarm: Swarm) -> AsyncIterator[AsyncSwarmClient]:
    async with AsyncSwarmClient(swarm.url, token="secret", policy=QUICK) as client:
        yield client


async def test_the_job_that_a_status_tells_is_the_one_that_was_synced(swarm: Swarm, client: AsyncSwarmClient) -> None:
    """Or `up` would refuse to go on with its own run, as with that of another job."""
    job = TrainJob(model="tiny", overrides={"actor_rollout_ref.actor.grad_clip": math.inf})
    swarm.controller.sync_job(job)
    assert (await client.status()).job == job


async def test_a_group_goes_through_and_its_end_may_be_repeated(swarm: Swarm, client: AsyncSwarmClient) -> None:
    swarm.roll()
    episodes = await client.claim_group(2)
    assert all(one.base_url == f"{swarm.url}/episodes/{one.episode_uuid}/v1" for one in episodes)
    for episode in episodes:
        swarm.sample(episode)
    outputs = {one.episode_uuid: OUTPUT for one in episodes}
    assert await client.end_group("t", outputs) == ""
    assert await client.end_group("t", outputs) == ""
    status = await client.status()
    assert status.pool is not None
    assert (status.pool.tasks, status.pool.running_episodes) == ({"t": 2}, 0)
    assert (status.job, status.engine.global_step) == (JOB, 3)
    # too late to take it back
    await client.abort(outputs)
    assert swarm.controller.pool.information().tasks == {"t": 2}


async def test_a_claim_waits_until_the_engine_rolls(swarm: Swarm, client: AsyncSwarmClient) -> None:
    swarm.controller.sync_job(JOB)
    swarm.controller.boot()
    claim = asyncio.ensure_future(client.claim_group(2, PATIENCE))
    await swarm.claim_is_waiting()
    swarm.controller.rollout_ready(READY)
    assert len(await claim) == 2


async def test_refusals_say_why(swarm: Swarm, client: AsyncSwarmClient) -> None:
    with pytest.raises(UnavailableError, match="Engine is offline") as caught:
        await client.claim_group(2)
    assert caught.value.code == "engine_offline"
    swarm.roll()
    with pytest.raises(RequestError, match="the job has 4 slots"):
        await client.claim_group(5, PATIENCE)
    await client.claim_group(4)
    with pytest.raises(UnavailableError) as caught:
        await client.claim_group(1)
    assert caught.value.code == "no_episodes"
    with pytest.raises(NotFoundError):
        await client.end_group("t", {"unknown": OUTPUT})


async def test_a_wrong_token_is_no_client(swarm: Swarm) -> None:
    async with AsyncSwarmClient(swarm.url, token="wrong", policy=QUICK) as stranger:
        with pytest.raises(AuthenticationError, match="SWARM_TOKEN"):
            await stranger.status()


async def test_a_claim_given_up_leaves_no_episode_behind(swarm: Swarm, client: AsyncSwarmClient) -> None:
    swarm.roll()
    held = await client.claim_group(4)
    claim = asyncio.ensure_future(client.claim_group(2, PATIENCE))
    await swarm.claim_is_waiting()
    claim.cancel()
    with pytest.raises(asyncio.CancelledError):
        await claim
    await client.abort([one.episode_uuid for one in held])
    await client.close()
    assert swarm.controller.pool.information().running_episodes == 0


@pytest.mark.parametrize("closes", [False, True])
async def test_a_claim_given_up_at_any_moment_leaves_no_episode_behind(swarm: Swarm, closes: bool) -> None:
    """Before it is sent, while it is granted, or while its answer is on the way."""
    swarm.roll()
    for moment in range(30):
        client = AsyncSwarmClient(swarm.url, token="secret", policy=QUICK)
        claim = asyncio.ensure_future(client.claim_group(4, PATIENCE))
        await asyncio.sleep(moment * 2e-4)
        if not closes:
            claim.cancel()
        else:
            await client.close()
        [outcome] = await asyncio.gather(claim, return_exceptions=True)
        await client.close()
        running = swarm.controller.pool.information().running_episodes
        assert running == (len(outcome) if isinstance(outcome, list) else 0)
        for episode in outcome if isinstance(outcome, list) else ():
            swarm.controller.pool.abort(client.client_uuid, episode.episode_uuid)


async def test_waiting_for_one_of_several_states_and_for_weight_syncs(swarm: Swarm, client: AsyncSwarmClient) -> None:
    swarm.roll()
    synced = asyncio.Event()
    await client.add_entering_weight_sync_callback(synced.set)
    targets = (EngineState.WEIGHT_SYNCING, EngineState.OFFLINE)
    waiting = asyncio.ensure_future(client.wait_for_state(*targets, wait_seconds=PATIENCE))
    episodes = await client.claim_group(4)
    for episode in episodes:
        swarm.sample(episode)
    batch = asyncio.ensure_future(swarm.controller.next_batch())
    for task, pair in (("a", episodes[:2]), ("b", episodes[2:])):
        await client.end_group(task, {one.episode_uuid: OUTPUT for one in pair})
    await batch
    assert (await waiting).engine.engine_status is EngineState.WEIGHT_SYNCING
    async with asyncio.timeout(PATIENCE):
        await synced.wait()


async def test_threads_run_episodes_and_failures_come_back(swarm: Swarm) -> None:
    swarm.roll()

    def everything() -> list[str | None]:
        with SwarmClient(swarm.url, token="secret", policy=QUICK, begin_timeout=PATIENCE) as client:
            # already rolling with this job
            client.auto_sync_train_config_and_start_engine(JOB)
            with pytest.raises(ConflictError, match="differs in seed"):
                client.auto_sync_train_config_and_start_engine(JOB.model_copy(update={"seed": 1}))

            def rollout(task: Task) -> str:
                uuid, _ = client.begin_episode(episode_type="eval")
                assert client.can_continue_episode(uuid)
                if task.task_id == "bad":
                    assert uuid in {one.episode_uuid for one in client.status().running}
                    client.abort_episode(uuid)
                    raise ValueError("broken")
                client.end_episode(task, uuid, OUTPUT)
                assert not client.can_continue_episode(uuid)
                return task.task_id

            names = [*(f"t{number}" for number in range(8)), "bad"]
            tasks = (Task(task_id=name) for name in names)
            done = client.run_episodes_until_all_complete(tasks, rollout, max_workers=6, auto_retry=2)
            pool = client.status().pool
            assert pool is not None and pool.running_episodes == 0
            assert client.get_global_step() == 3
            return done

    assert await asyncio.to_thread(everything) == [*(f"t{number}" for number in range(8)), None]
