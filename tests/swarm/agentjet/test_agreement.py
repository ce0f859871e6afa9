"""What AgentJet's clients see of the engine's state when they start it, and when they agree to a weight sync."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from swarm.agentjet.client import SwarmClient
from swarm.agentjet.compat import REMEMBERED_SECONDS, SHOWN_SECONDS, AgentJetClients
from swarm.errors import AuthenticationError, SwarmGatewayError, UpstreamError
from swarm.server.app import create_app
from swarm.server.config import ServerConfig
from swarm.server.monitor import VerboseLog
from swarm.states import EngineState
from swarm.status import EngineStatus, ServerStatus
from tests.standins import engine
from tests.standins.vllm import ScriptedVllm
from tests.standins.vllm import listening as serving
from tests.swarm.agentjet.agentjet_client import AgentJetClient, AprilClient
from tests.swarm.agentjet.test_conformance import ROOT, Swarm, eventually, job_config, rollout, run, served
from tests.swarm.server.batching.conftest import Clock

pytestmark = pytest.mark.anyio
ANY, ALL = "rollout_until_any_client_agree_sync_weight", "rollout_until_all_clients_agree_sync_weight"


@pytest.fixture
async def swarm(tmp_path: Path) -> AsyncGenerator[Swarm]:
    async with served(tmp_path) as one:
        yield one


async def start(swarm: Swarm, method: str) -> AgentJetClient:
    return await swarm.start(swarm_mode_sample_collection_method=method, rollout__max_env_worker=16)


def clients_of(swarm: Swarm, clock: Callable[[], float] = time.monotonic) -> AgentJetClients:
    clients = AgentJetClients(ServerConfig(), swarm.controller, VerboseLog())
    clients.clock = clock
    return clients


async def active(client: AgentJetClient) -> dict[str, bool]:
    """Whom the batch waits for, and whether they agreed."""
    stat = await run(client.get_rollout_stat)
    assert stat.swarm_client_instruction is not None
    return {one.client_uuid: one.allowed_sync_weight for one in stat.swarm_client_instruction.active_clients}


async def exact_state(swarm: Swarm) -> EngineState:
    """What our client asks for."""
    async with httpx.AsyncClient(base_url=swarm.url, timeout=60, trust_env=False, verify=False) as http:
        answer = await http.get("/get_engine_status", params={"exact": 1})
    return EngineStatus.model_validate(answer.json()).engine_status


async def test_any_client_may_agree_to_sync(swarm: Swarm) -> None:
    client = await start(swarm, ANY)
    running = await run(client.begin_episode)
    agreeing = asyncio.create_task(run(client.agree_sync_weight))
    await eventually(lambda: any(row.agreed for row in swarm.controller.pool.collection.rows()))
    # while an episode runs there may be something to train yet
    await rollout(client, "a", 1.0)
    assert not agreeing.done()
    taking = asyncio.create_task(swarm.take())
    await rollout(client, "a", 0.0)
    assert await agreeing
    await run(client.abort_episode, running.episode_uuid)
    swarm.trained(await taking)
    assert (swarm.version, client.causes) == (1, [])


async def test_a_sync_is_seen_that_is_over_before_its_client_looks(swarm: Swarm) -> None:
    client = await start(swarm, ANY)
    for reward in (0.0, 1.0):
        await rollout(client, "a", reward)
    taking = asyncio.create_task(swarm.take())
    agreeing = asyncio.create_task(run(client.agree_sync_weight, 0.6))
    swarm.trained(await taking)
    assert await exact_state(swarm) is EngineState.ROLLING
    assert await agreeing
    assert client.get_engine_status()[0] == "ENGINE.WEIGHT_SYNCING"


async def test_all_agree_means_those_who_end_or_abort_train_episodes_for_this_batch(swarm: Swarm) -> None:
    client = await start(swarm, ALL)
    dead, evaluating, other = swarm.client(), swarm.client(), swarm.client()
    await rollout(dead, "a", 1.0)
    await rollout(dead, "a", 0.0)
    taking = asyncio.create_task(swarm.take())
    assert await run(dead.agree_sync_weight)
    swarm.trained(await taking)
    assert await active(client) == {}
    swarm.controller.episodes.agreement_over = -math.inf  # long ago
    await rollout(evaluating, "a", 1.0, episode_type="eval")
    aborted = await run(other.begin_episode)
    assert await active(client) == {}
    await run(other.abort_episode, aborted.episode_uuid)
    for reward in (0.0, 1.0):
        await rollout(client, "b", reward)
    taking = asyncio.create_task(swarm.take())
    agreeing = asyncio.create_task(run(client.agree_sync_weight))
    await eventually(lambda: any(row.agreed for row in swarm.controller.pool.collection.rows()))
    assert await active(client) == {client.client_uuid: True, other.client_uuid: False}
    assert not taking.done()
    assert await run(other.agree_sync_weight)
    assert await agreeing
    swarm.trained(await taking)
    assert swarm.version == 2


@pytest.mark.parametrize("method", [ANY, ALL])
async def test_who_agrees_to_train_nothing_goes_on(swarm: Swarm, method: str) -> None:
    client = await start(swarm, method)
    await rollout(client, "a", 1.0)
    await rollout(client, "b", 1.0)
    assert await run(client.agree_sync_weight)
    assert client.causes == []
    assert await exact_state(swarm) is EngineState.ROLLING
    stat = await run(client.get_rollout_stat)
    assert (stat.completed_episodes, stat.global_step) == (2, 0), "nothing was trained, and nothing is lost"


@pytest.mark.parametrize("runs", [False, True])
async def test_our_client_of_that_name_does_not_wait_for_a_sync_that_does_not_come(
    swarm: Swarm, runs: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("swarm.agentjet.client._PATIENCE", 60.0)
    monkeypatch.setattr("swarm.agentjet.client._LOOK_SECONDS", 0.05, raising=False)
    await start(swarm, ANY)
    client = await run(SwarmClient, swarm.url)
    # its token is refused at first, and a proxy has lost the server then
    troubles: list[SwarmGatewayError] = [UpstreamError("HTTP 502"), AuthenticationError("unknown token")]
    ask, asked = client.status, list[dict[str, Any]]()

    def status(**query: Any) -> ServerStatus:
        asked.append(query)
        if troubles:
            raise troubles.pop()
        return ask(**query)

    monkeypatch.setattr(client, "status", status)
    try:
        episode = (await run(client.begin_episode))[0] if runs else ""
        agreeing = asyncio.create_task(run(client.agree_sync_weight))
        if runs:
            await eventually(lambda: any(row.agreed for row in swarm.controller.pool.collection.rows()))
            await run(client.abort_episode, episode)
        assert await agreeing
    finally:
        await run(client.close)
    assert "in vain" in caplog.text and "no weight sync within" not in caplog.text
    # the steps of a long run are megabytes, for each client that waits and each look
    assert all(query["steps"] == 0 for query in asked)


async def test_how_long_a_sync_is_shown(swarm: Swarm) -> None:
    await start(swarm, ANY)
    controller, clock = swarm.controller, Clock()
    shown = clients_of(swarm, clock)
    clock.now = 1000.0
    assert shown.status() == controller.engine_status()
    controller.episodes.agreement_over = clock.now
    status = shown.status()
    assert status.engine_status is EngineState.WEIGHT_SYNCING
    assert status.engine_status_detail == (
        "the sync that clients agreed to is over; the engine is ENGINE.ROLLING: collecting the batch of step 1"
    )
    # its clients look each 5 s, at a state that is up to 1 s old
    clock.now += SHOWN_SECONDS - 0.5
    assert shown.status().engine_status is EngineState.WEIGHT_SYNCING
    controller.offline("the training run is finished")
    assert shown.status().engine_status is EngineState.WEIGHT_SYNCING
    clock.now += 0.5
    assert shown.status().engine_status is EngineState.OFFLINE
    controller.episodes.agreement_over = clock.now
    controller.boot()
    assert shown.status().engine_status is EngineState.BOOTING


@pytest.mark.parametrize("dies", [False, True])
async def test_a_sync_is_shown_counted_from_its_end(swarm: Swarm, dies: bool) -> None:
    """However long the episodes that still ran took before it."""
    client = await start(swarm, ANY)
    for reward in (0.0, 1.0):
        await rollout(client, "a", reward)
    running = await run(client.begin_episode)
    taking = asyncio.create_task(swarm.take())
    assert await run(client.agree_sync_weight)
    await swarm.until(EngineState.ROLLING_POST)
    await run(client.abort_episode, running.episode_uuid)
    batch_id = await taking
    ends = time.monotonic()
    if dies:
        swarm.controller.offline("out of memory")
    else:
        swarm.trained(batch_id)
    shown = clients_of(swarm, lambda: ends + SHOWN_SECONDS)
    assert await exact_state(swarm) is (EngineState.OFFLINE if dies else EngineState.ROLLING)
    assert shown.status().engine_status is EngineState.WEIGHT_SYNCING


async def test_a_sync_is_shown_though_the_next_batch_is_complete_already(swarm: Swarm) -> None:
    client = await start(swarm, ANY)
    for reward in (0.0, 1.0):
        await rollout(client, "a", reward)
    running = await run(client.begin_episode)
    taking = asyncio.create_task(swarm.take())
    assert (await swarm.controller.episodes.agree(client.client_uuid)).success
    await swarm.until(EngineState.ROLLING_POST)
    shown = clients_of(swarm)
    assert shown.status().engine_status is EngineState.ROLLING_POST
    swarm.controller.episodes.agreement_over = time.monotonic()  # the sync before is just over
    assert shown.status().engine_status is EngineState.WEIGHT_SYNCING
    await run(client.abort_episode, running.episode_uuid)
    swarm.trained(await taking)


async def test_for_how_long_offline_is_remembered(swarm: Swarm) -> None:
    clock = Clock()
    clock.now = 1000.0
    shown = clients_of(swarm, clock)
    assert shown.until_forgotten() == 0, "nobody was told"
    shown.status()
    assert shown.until_forgotten() == pytest.approx(REMEMBERED_SECONDS)
    clock.now += REMEMBERED_SECONDS
    assert shown.until_forgotten() == 0


@pytest.mark.slow
async def test_the_start_as_of_april(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    vllm = ScriptedVllm()
    async with serving(vllm.app) as vllm_url:
        command = engine.command(f"train@{vllm_url.removeprefix('http://')}")
        app = create_app(ServerConfig(run_dir=tmp_path / "run"), engine_command=command)
        async with (
            serving(app) as url,
            httpx.AsyncClient(base_url=url, timeout=60, trust_env=False, verify=False) as http,
        ):
            client = AgentJetClient(url)
            await run(client.sync_train_config, job_config())
            await run(client.close)
            april = AprilClient(url)
            await run(april.start_engine)
            await run(april.http.close)
            assert (await http.post("/stop_engine")).json()["success"]
            # ours looks at the exact state, and is not made to wait
            await http.get("/get_engine_status", params={"exact": 1})
            pauses: list[float] = []
            until_forgotten = AgentJetClients.until_forgotten

            def pause(shown: AgentJetClients) -> float:
                pauses.append(until_forgotten(shown))
                return pauses[-1]

            monkeypatch.setattr(AgentJetClients, "until_forgotten", pause)
            assert (await http.post("/start_engine")).json()["success"]
            assert pauses == [0.0]
