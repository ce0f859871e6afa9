"""AgentJet's own client against a real server on a real socket: routes, bodies, phrases, and its way to wait."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import yaml
from starlette.applications import Starlette

from swarm.agentjet import compat
from swarm.agentjet.yaml_job import convert
from swarm.job import dump_job
from swarm.link.messages import RolloutReady
from swarm.server.app import create_app
from swarm.server.config import ServerConfig
from swarm.server.engine.controller import Controller
from swarm.states import EngineState
from swarm.types import StepResult
from tests.standins import engine
from tests.standins.vllm import ENGINE_MODEL, ScriptedVllm
from tests.standins.vllm import listening as serving
from tests.swarm.agentjet.agentjet_client import NO_EPISODES, POST_ROLLING, SYNCING, AgentJetClient, Claimed
from tests.swarm.agentjet.test_yaml_job import composed

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parents[3]
T = TypeVar("T")


def job_config(**changes: Any) -> dict[str, Any]:
    """AgentJet's composed configuration of a small job: batches of 2 tasks with 2 episodes, 4 slots."""
    small = {"model__path": "tiny", "data__train_batch_size": 2, "rollout__num_repeat": 2, "rollout__max_env_worker": 8}
    return composed(**small | changes)


async def run(work: Callable[..., T], *args: Any, **more: Any) -> T:
    """What the (blocking) client does, beside the server's loop."""
    return await asyncio.to_thread(work, *args, **more)


async def eventually(condition: Callable[[], bool]) -> None:
    """Give way to the server and the clients' threads until ``condition`` holds."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - what the threads do sets no event
            await asyncio.sleep(0.005)


class Swarm:
    """A server without an engine process: the test is its trainer."""

    def __init__(self, app: Starlette, url: str, vllm: ScriptedVllm, vllm_url: str) -> None:
        self.controller: Controller = app.state.controller
        self.url = url
        self.vllm = vllm
        self.vllm_address = vllm_url.removeprefix("http://")
        self.version = 0
        self.always = False
        self.clients: list[AgentJetClient] = []

    def client(self) -> AgentJetClient:
        self.clients.append(AgentJetClient(self.url))
        return self.clients[-1]

    async def start(self, job: str = "", *, always: bool = False, **changes: Any) -> AgentJetClient:
        """A client, after it has synced a job and the engine has come up; ``always``: episodes run during a step."""
        client = self.client()
        self.always = always
        body = {"yaml_as_string": job or yaml.safe_dump(job_config(**changes))}
        await run(client._post, "/sync_train_config", body)
        self.controller.boot()
        self.ready()
        await run(client.wait_for, "ENGINE.ROLLING")
        return client

    def ready(self, last_batch: str = "") -> None:
        step = self.version + 1
        self.controller.rollout_ready(
            RolloutReady(
                addresses=[self.vllm_address],
                model=ENGINE_MODEL,
                policy_version=self.version,
                next_step=step,
                last_batch=last_batch,
                serving="always" if self.always else "between_steps",
            )
        )

    async def take(self) -> str:
        """The engine takes the batch: WEIGHT_SYNCING from now on; the batch's id."""
        async with asyncio.timeout(60):
            return (await self.controller.next_batch()).batch_id

    def trained(self, batch_id: str) -> None:
        self.version += 1
        self.controller.step_done(StepResult(step=self.version, batch_id=batch_id, metrics={}, seconds=0.1))
        self.ready(batch_id)

    async def until(self, state: EngineState) -> None:
        await eventually(lambda: self.controller.engine.state is state)


@asynccontextmanager
async def served(tmp_path: Path, **config: Any) -> AsyncGenerator[Swarm]:
    vllm = ScriptedVllm()
    settings = ServerConfig(run_dir=tmp_path / "run", **{"post_rolling_timeout": 5.0} | config)
    # with an engine of its own, the server would check the job's keys as verl's
    app = create_app(settings, engine_command=engine.command("train"))
    async with serving(vllm.app) as vllm_url, serving(app) as url:
        async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False, verify=False) as http:
            await http.get("/health")
        swarm = Swarm(app, url, vllm, vllm_url)
        try:
            yield swarm
        finally:
            for client in swarm.clients:
                await run(client.close)


@pytest.fixture
async def swarm(tmp_path: Path) -> AsyncGenerator[Swarm]:
    async with served(tmp_path) as one:
        yield one


async def rollout(client: AgentJetClient, task_id: str, reward: float, **more: Any) -> str:
    """One episode from claim to end, as an agent's thread does it."""

    def work() -> str:
        claimed = client.begin_episode(**more)
        assert client.can_continue_episode(claimed.episode_uuid)
        answer = client.chat(claimed)
        assert answer["choices"][0]["message"]["content"]
        client.end_episode(task_id, claimed.episode_uuid, reward)
        return claimed.episode_uuid

    return await run(work)


@pytest.mark.slow
async def test_from_sync_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    vllm = ScriptedVllm()
    async with serving(vllm.app) as vllm_url:
        command = engine.command(f"train@{vllm_url.removeprefix('http://')}")
        app = create_app(ServerConfig(run_dir=tmp_path / "run", post_rolling_timeout=0.5), engine_command=command)
        async with serving(app) as url:
            client = AgentJetClient(url)
            try:
                await run(client.sync_train_config, job_config())
                assert await run(client.server_experiment_dir) == str(tmp_path / "run")
                await run(client.start_engine)
                for task in ("a", "b"):
                    await asyncio.gather(*(rollout(client, task, reward) for reward in (0.0, 1.0)))
                await run(client.wait_for, "ENGINE.ROLLING")
                await eventually(lambda: client.get_engine_status()[1]["global_step"] == 1)
                # the next batch goes on at once
                await rollout(client, "c", 1.0)
                with pytest.raises(RuntimeError, match=r"400.*stop it"):
                    await run(client.sync_train_config, job_config())
                await run(client.stop_engine)
            finally:
                await run(client.close)


async def test_the_engine_tells_why_there_is_nothing_to_claim(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat.AgentJetClients, "held_seconds", 0.01)
    client = await swarm.start()
    running = [await run(client.begin_episode) for _ in range(4)]
    refused = await run(client.claim_once, "train", 240.0, None)
    assert (refused.success, refused.episode_uuid) == (False, "") and NO_EPISODES in refused.fail_cause

    for claimed, task in zip(running[:3], ("a", "a", "b"), strict=True):
        await run(client.chat, claimed)
        await run(client.end_episode, task, claimed.episode_uuid, 1.0)
    await rollout(client, "b", 0.0)
    taking = asyncio.create_task(swarm.take())
    await swarm.until(EngineState.ROLLING_POST)
    refused = await run(client.claim_once, "train", 240.0, None)
    assert not refused.success and POST_ROLLING in refused.fail_cause
    # what runs may finish, and holds the step up for so long
    assert await run(client.can_continue_episode, running[3].episode_uuid)
    await run(client.chat, running[3])
    await run(client.end_episode, "c", running[3].episode_uuid, 1.0)

    batch_id = await taking
    refused = await run(client.claim_once, "train", 240.0, None)
    assert not refused.success and SYNCING in refused.fail_cause
    await run(client.wait_for, "ENGINE.WEIGHT_SYNCING")
    swarm.trained(batch_id)
    assert (await run(client.begin_episode)).success
    assert client.entered_sync == 1


async def test_a_client_that_polls_gets_through_a_weight_sync(swarm: Swarm) -> None:
    client = await swarm.start()
    for task in ("a", "a", "b", "b"):
        await rollout(client, task, 1.0)
    batch_id = await swarm.take()
    waiting = asyncio.create_task(rollout(client, "c", 1.0))
    await run(client.wait_for, "ENGINE.WEIGHT_SYNCING")
    swarm.trained(batch_id)
    assert await waiting


async def test_claims_are_held_until_the_next_batch_opens(swarm: Swarm) -> None:
    """Refused, its client would sleep for 15 s."""
    client = await swarm.start()
    straggler = await run(client.begin_episode)
    await run(client.chat, straggler)
    for task in ("a", "a", "b", "b"):
        await rollout(client, task, 1.0)
    claims = swarm.controller.episodes.claims

    def claim() -> asyncio.Task[Claimed]:
        return asyncio.create_task(run(client.claim_once, "train", 240.0, None))

    taking = asyncio.create_task(swarm.take())
    await swarm.until(EngineState.ROLLING_POST)
    held = [claim() for _ in range(2)]
    await eventually(lambda: len(claims) == 2)
    await run(client.end_episode, "c", straggler.episode_uuid, 1.0)
    batch_id = await taking
    # one more than there are places in the next batch
    held += [claim() for _ in range(3)]
    await eventually(lambda: len(claims) == 5)
    assert not any(one.done() for one in held)
    swarm.trained(batch_id)
    answers = [await one for one in held]
    assert sorted(one.success for one in answers) == [False, True, True, True, True]
    (refused,) = [one.fail_cause for one in answers if not one.success]
    assert NO_EPISODES in refused, "it tries again in 2 s, as the batch is open"
    # while it is open, nobody is held
    assert NO_EPISODES in (await claim()).fail_cause


async def test_a_held_claim_waits_for_the_trainer_where_serving_goes_on(tmp_path: Path) -> None:
    async with served(tmp_path) as swarm:
        client = await swarm.start(always=True)
        for task in ("a", "a", "b", "b"):
            await rollout(client, task, 1.0)
        batch_id = await swarm.take()
        for task in ("c", "c", "d", "d"):
            await rollout(client, task, 1.0)
        held = asyncio.create_task(run(client.claim_once, "train", 240.0, None))
        await eventually(lambda: len(swarm.controller.episodes.claims) == 1)
        assert (await run(client.claim_once, "eval", 240.0, None)).success, "no batch is waited for"
        swarm.trained(batch_id)
        await swarm.take()
        assert (await held).success


async def test_a_client_keeps_connections_beside_its_held_claims(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.server.episodes.claims.MOST_HELD", 2)
    client, other = await swarm.start(), swarm.client()
    for task in ("a", "a", "b", "b"):
        await rollout(client, task, 1.0)
    batch_id = await swarm.take()
    held = [asyncio.create_task(run(client.claim_once, "train", 240.0, None)) for _ in range(2)]
    await eventually(lambda: len(swarm.controller.episodes.claims) == 2)
    assert SYNCING in (await run(client.claim_once, "train", 240.0, None)).fail_cause
    held.append(asyncio.create_task(run(other.claim_once, "train", 240.0, None)))
    await eventually(lambda: len(swarm.controller.episodes.claims) == 3)
    swarm.trained(batch_id)
    assert all([(await one).success for one in held])


async def test_a_step_waits_for_episodes_as_long_as_these_may_run(tmp_path: Path) -> None:
    """What the server waits for otherwise, 30 s or a setting, would throw long episodes away."""
    async with served(tmp_path, post_rolling_timeout=None) as swarm:
        client = await swarm.start()
        idle = await run(client.begin_episode, "train", 0.2)
        busy = await run(client.begin_episode)
        await run(client.chat, busy)
        for task in ("a", "a", "b", "b"):
            await rollout(client, task, 1.0)
        taking = asyncio.create_task(swarm.take())
        # an episode that nobody works on ends by its own timeout
        while await run(client.can_continue_episode, idle.episode_uuid):
            pass
        assert swarm.controller.engine.state is EngineState.ROLLING_POST and not taking.done()
        await run(client.chat, busy)
        await run(client.end_episode, "c", busy.episode_uuid, 1.0)
        swarm.trained(await taking)
        assert (await run(client.get_rollout_stat)).completed_episodes == 1, "accepted, for the next batch"


@pytest.mark.parametrize("of", ["job", "server"])
async def test_how_long_a_step_waits_can_be_set(tmp_path: Path, of: str) -> None:
    job = dump_job(convert(job_config()).job, only_set=True)
    if of == "job":
        job += "post_rolling_timeout: 0\n"
    async with served(tmp_path, post_rolling_timeout=0.0 if of == "server" else 60.0) as swarm:
        client = await swarm.start(job)
        straggler = await run(client.begin_episode)
        for task in ("a", "a", "b", "b"):
            await rollout(client, task, 1.0)
        await swarm.take()
        assert not await run(client.can_continue_episode, straggler.episode_uuid)


async def test_a_stragglers_end_is_told_in_words_that_its_client_goes_on_after(tmp_path: Path) -> None:
    async with served(tmp_path, post_rolling_timeout=0.0) as swarm:
        client = await swarm.start()
        straggler = await run(client.begin_episode)
        await run(client.chat, straggler)
        for task in ("a", "a", "b", "b"):
            await rollout(client, task, 1.0)
        batch_id = await swarm.take()
        await run(client.end_episode, "c", straggler.episode_uuid, 1.0)
        assert len(client.warnings) == 1, "an error would make it run the task once more"
        swarm.trained(batch_id)
        assert (await run(client.get_rollout_stat)).completed_episodes == 0, "not accepted"
        # our client, which names its ends, is told as of everything else that comes too late
        body = client._body(straggler.episode_uuid, "c", {"reward": 1.0}) | {"idempotency_key": "k"}
        with pytest.raises(RuntimeError, match=r"409.*episode_deleted"):
            await run(client._post, "/end_episode", body)


async def test_the_last_step_is_told_after_the_end_of_the_run(swarm: Swarm) -> None:
    client = await swarm.start()
    for task in ("a", "a", "b", "b"):
        await rollout(client, task, 1.0)
    batch_id = await swarm.take()
    swarm.controller.step_done(StepResult(step=1, batch_id=batch_id, metrics={}, seconds=0.1))
    swarm.controller.run_stopped()
    swarm.controller.offline("the training run is finished")
    await run(client.wait_for, "ENGINE.OFFLINE")
    assert await run(client.get_global_step) == 1
    assert (await run(client.get_rollout_stat)).global_step == 1
    # the next run begins anew
    swarm.controller.boot()
    await run(client.wait_for, "ENGINE.BOOTING")
    assert await run(client.get_global_step) == 0


async def test_the_host_of_an_episodes_address_is_the_clients(tmp_path: Path) -> None:
    async with served(tmp_path) as swarm:
        client = await swarm.start()
        # a server behind a forwarded port is known by another name than it has itself
        client.url = swarm.url.replace("127.0.0.1", "localhost")
        claimed = await run(client.begin_episode)
        assert claimed.openai_base_url.startswith(client.url)
        assert (await run(client.chat, claimed))["model"] == "tiny"


async def test_eval_episodes_keep_their_sampling_and_are_not_trained(swarm: Swarm) -> None:
    client = await swarm.start()

    def evaluate() -> None:
        claimed = client.begin_episode("eval")
        client.chat(claimed, temperature=0.0)
        client.end_episode("a", claimed.episode_uuid, 1.0)

    await run(evaluate)
    assert swarm.vllm.requests[-1][1]["temperature"] == 0.0
    stat = await run(client.get_rollout_stat)
    assert (stat.completed_episodes, stat.running_episode_details) == (0, None)
    await rollout(client, "a", 1.0)
    assert swarm.vllm.requests[-1][1]["temperature"] == 0.9


async def test_an_abort_always_succeeds(swarm: Swarm) -> None:
    client, other = await swarm.start(), swarm.client()
    claimed = await run(client.begin_episode)
    assert (await run(other.abort_episode, claimed.episode_uuid)).success
    assert await run(client.can_continue_episode, claimed.episode_uuid), "a stranger's abort changes nothing"
    for _ in range(2):
        assert (await run(client.abort_episode, claimed.episode_uuid)).success
    assert not await run(client.can_continue_episode, claimed.episode_uuid)
    assert (await run(client.abort_episode, "never-heard-of")).success
    ended = await rollout(client, "a", 1.0)
    assert (await run(client.abort_episode, ended)).success
    assert (await run(client.get_rollout_stat)).completed_episodes == 1, "the reward stands"
    swarm.controller.offline("crashed")
    assert (await run(client.abort_episode, claimed.episode_uuid)).success


async def test_a_late_end_is_an_abort_and_its_slot_comes_back(swarm: Swarm) -> None:
    client = await swarm.start()
    claimed = await run(client.begin_episode, "train", 0.01)
    async with asyncio.timeout(60):
        while await run(client.can_continue_episode, claimed.episode_uuid):
            pass
    client._expires[claimed.episode_uuid] -= 100
    await run(client.end_episode, "a", claimed.episode_uuid, 1.0)  # expired at the client too: it aborts
    stat = await run(client.get_rollout_stat)
    assert (stat.completed_episodes, stat.running_episode_details) == (0, None)
    second = await run(client.begin_episode, "train", 0.01)
    async with asyncio.timeout(60):
        while await run(client.can_continue_episode, second.episode_uuid):
            pass
    client._expires[second.episode_uuid] += 100
    # only the server knows that it is late: the client is told, once, in words that it goes on after
    await run(client.end_episode, "a", second.episode_uuid, 1.0)
    (warning,) = client.warnings
    assert "was idle for longer than its discard_episode_timeout" in warning
    assert (await run(client.get_rollout_stat)).completed_episodes == 0
    entries = await run(client.get_verbose_logs)
    assert any("discard_episode_timeout" in entry["message"] for entry in entries), "its monitor shows why"
    # our client, which names its ends, is told as of everything else that comes too late
    body = client._body(second.episode_uuid, "a", {"reward": 1.0}) | {"idempotency_key": "k"}
    with pytest.raises(RuntimeError, match=r"409.*episode_timed_out"):
        await run(client._post, "/end_episode", body)


async def test_a_reward_is_one_number(swarm: Swarm) -> None:
    client = await swarm.start()
    claimed = await run(client.begin_episode)
    for reward in (None, [1.0, 0.5]):
        with pytest.raises(RuntimeError, match=r"400.*one number is needed"):
            await run(client.end_episode, "a", claimed.episode_uuid, reward)
        assert await run(client.can_continue_episode, claimed.episode_uuid)
        client._expires[claimed.episode_uuid] = math.inf


async def test_names_of_episodes_differ_from_their_beginning(swarm: Swarm) -> None:
    """Monitors show the first 8 characters."""
    client = await swarm.start()
    assert len({(await run(client.begin_episode)).episode_uuid[:8] for _ in range(4)}) == 4


async def test_the_pool_and_the_buffer_have_agentjets_shape(swarm: Swarm) -> None:
    client, other = await swarm.start(), swarm.client()
    stat = await run(client.get_rollout_stat)
    assert stat.sample_collection_method == "rollout_until_finish_enough_tasks"
    assert (stat.completed_task_target, stat.completed_episode_target, stat.task_expected_num_repeat) == (2, 4, 2)
    first = await rollout(client, "a", 1.0)
    second = await rollout(other, "a", 0.0)
    policy = {"ratio": 1.5, "expected_batch_size": 2, "expected_num_repeat": 2, "current_task_id": "b"}
    claimed = await run(client.begin_episode, policy=policy)
    await run(client.chat, claimed)
    stat = await run(client.get_rollout_stat)
    assert (stat.completed_tasks, stat.completed_episodes, stat.completed_non_dummy_tasks) == (1, 2, 1)
    assert stat.completed_tasks_details == {"a": [first, second]}
    assert stat.completed_tasks_client_uuids == {"a": [client.client_uuid, other.client_uuid]}
    assert stat.running_episode_details is not None
    ((name, details),) = stat.running_episode_details.items()
    assert name == claimed.episode_uuid
    assert details["optional_task_id"] == "b" and details["client_uuid"] == client.client_uuid
    assert details["discard_episode_timeout"] == "240.0s" and details["llm_call_count"] == "1"
    assert (stat.engine_status, stat.global_step, stat.booting_start_time) == ("ENGINE.ROLLING", 0, None)
    assert stat.training_model_path == "tiny"
    (buffered,) = await run(client.get_episode_buffer)
    assert (buffered.episode_uuid, buffered.episode_status) == (claimed.episode_uuid, "claimed")
    assert (buffered.llm_call_count, buffered.optional_task_id, buffered.openai_api_key) == (1, "b", "")
    asked = {"episode_uuid": claimed.episode_uuid, "unregister_if_not_claimed": True}
    for uuid, running in ((claimed.episode_uuid, True), (first, False), ("unknown", False)):
        answer = await run(client._post, "/is_episode_claimed", asked | {"episode_uuid": uuid})
        assert answer.json() == {"success": running, "failure_reason": ""}


async def test_a_throttled_client_leaves_room_for_the_other(swarm: Swarm) -> None:
    """Half of a batch of four tasks each: the client holds itself back, as it reads the pool."""
    client = await swarm.start(data__train_batch_size=4)
    other = swarm.client()
    policy = {"ratio": 0.5, "expected_batch_size": 4, "expected_num_repeat": 2}
    for task in ("a", "a", "b"):
        await rollout(client, task, 1.0, policy=policy | {"current_task_id": task})
    await rollout(other, "x", 1.0, policy=policy | {"current_task_id": "x"})
    third = asyncio.create_task(rollout(client, "c", 1.0, policy=policy | {"current_task_id": "c"}))
    await eventually(lambda: "throttled by the client" in client.causes)
    # the server holds to the same share for a client that does not hold itself back
    refused = await run(client.claim_once, "train", 240.0, policy | {"current_task_id": "d"})
    assert not refused.success and "throttled" in refused.fail_cause
    assert NO_EPISODES in refused.fail_cause, "else it pauses for 15 s, not for 2"
    # a task that has begun is never delayed
    await rollout(client, "b", 1.0, policy=policy | {"current_task_id": "b"})
    assert not third.done()
    await rollout(other, "x", 1.0)
    for _ in range(2):
        await rollout(other, "y", 1.0)
    swarm.trained(await swarm.take())
    assert await third, "the next batch has room"


async def test_what_belongs_to_agentjets_trainer_is_refused(swarm: Swarm) -> None:
    client = await swarm.start()
    for path, body in (
        ("/register_episode", {"episode_uuid": "e", "zmq_listen_result_addr": "ipc:///tmp/x"}),
        ("/update_engine_status", {"engine_status": "ENGINE.OFFLINE"}),
        ("/update_current_batch_rollout_pool_information_and_fetch_instruction", {}),
    ):
        with pytest.raises(RuntimeError, match=r"409.*foreign_trainer"):
            await run(client._post, path, body)
    assert swarm.controller.engine.state is EngineState.ROLLING
    # what its trainer only tells a monitor is taken
    assert (await run(client._post, "/push_verbose_log", {"tag": "vllm", "message": "hello"})).json()["success"]
    status = (await run(client.http.get, f"{swarm.url}/status")).json()
    assert [entry["message"] for entry in status["log"]][1:] == ["hello"]
    job, entry = await run(client.get_verbose_logs)
    assert "without effect here: " in job["message"] and "ajet.rollout.agent_madness_reward" in job["message"]
    assert (entry["tag"], entry["message"]) == ("vllm", "hello") and entry["timestamp"] > 0


async def test_without_a_job(swarm: Swarm) -> None:
    client = swarm.client()
    assert (await run(client.get_engine_status))[0] == "ENGINE.OFFLINE"
    assert await run(client.get_episode_buffer) == []
    assert await run(client.server_experiment_dir) is None
    # what its monitor asks for again and again
    stat = await run(client.get_rollout_stat)
    assert (stat.completed_task_target, stat.engine_status, stat.training_model_path) == (0, "ENGINE.OFFLINE", None)
    assert await run(client.get_verbose_logs) == []
    with pytest.raises(RuntimeError, match=r"400.*trinity"):
        await run(client.sync_train_config, job_config(backbone="trinity"))
    refused = await run(client.claim_once, "train", 240.0, None)
    assert not refused.success and refused.fail_cause
