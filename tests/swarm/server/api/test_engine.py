"""Routes of the engine through ASGI: configuration, start and stop, status, and what an operator gets wrong."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import httpx
import pytest

from swarm.job import TrainJob, dump_job
from swarm.server.app import create_app
from swarm.server.config import ServerConfig
from swarm.server.engine.controller import Controller
from swarm.states import EngineState
from swarm.status import EngineStatus, ServerStatus
from tests.swarm.server.conftest import ready

pytestmark = pytest.mark.anyio

JOB = TrainJob(model="tiny", batch_size=2, num_repeat=2)


@pytest.fixture
async def client(tmp_path: Path) -> AsyncGenerator[httpx.AsyncClient]:
    command = (sys.executable, "-c", "import time; time.sleep(60)")
    app = create_app(ServerConfig(run_dir=tmp_path, max_body_bytes=4096), engine_command=command)
    # the client stands in for the server: it runs the lifespan
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1", verify=False) as client,
    ):
        client.app = app  # type: ignore[attr-defined]
        yield client


def controller_of(client: httpx.AsyncClient) -> Controller:
    return client.app.state.controller  # type: ignore[attr-defined]


async def sync(client: httpx.AsyncClient, text: str = dump_job(JOB)) -> httpx.Response:
    return await client.post("/sync_train_config", json={"yaml_as_string": text})


async def test_sync_start_stop(client: httpx.AsyncClient) -> None:
    answer = {"success": True, "error": None, "restarted": False}
    assert (await sync(client)).json() == answer | {"new_run": True, "ignored": {}}
    assert (await sync(client)).json() == answer | {"new_run": False, "ignored": {}}
    started = (await client.post("/start_engine")).json()
    assert started["success"] and started["pid"] > 0
    status = ServerStatus.model_validate((await client.get("/status")).json())
    assert status.engine.engine_status is EngineState.BOOTING
    assert (status.engine_pid, status.model, status.job) == (started["pid"], "tiny", JOB)
    refused = await client.post("/start_engine")
    assert refused.status_code == 409
    assert "/stop_engine" in refused.json()["error"]["message"]
    assert refused.headers["x-should-retry"] == "false"
    refused = await sync(client)
    assert (refused.status_code, refused.headers["x-should-retry"]) == (400, "false")
    told = refused.json()
    assert (told["success"], told["code"]) == (False, "engine_not_offline")
    assert "/stop_engine" in told["error"]
    assert (await client.post("/stop_engine")).json()["success"]
    last = EngineStatus.model_validate((await client.get("/get_engine_status")).json())
    assert last.engine_status is EngineState.OFFLINE
    assert (await client.post("/stop_engine")).json()["success"]


async def test_status_of_a_server_without_a_job(client: httpx.AsyncClient) -> None:
    status = ServerStatus.model_validate((await client.get("/status")).json())
    assert (status.engine.engine_status, status.pool, status.job) == (EngineState.OFFLINE, None, None)
    assert (await client.get("/health")).json() == {"status": "ok"}
    gone = {"client_uuid": "me", "episode_uuid": "of an earlier server"}
    assert (await client.post("/abort_episode", json=gone)).json() == {"success": True, "error": None}
    response = await client.post("/start_engine")
    assert response.status_code == 409
    assert "/sync_train_config" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: tiny\nbatch_sise: 4", "batch_sise"),
        ("model: tiny\nnum_repeat: 1", "num_repeat"),
        ("model: [", "not valid YAML"),
        ("- a", "mapping"),
        ("model: /no/such/model", "/no/such/model"),
    ],
)
async def test_a_wrong_configuration_says_what_is_wrong(client: httpx.AsyncClient, text: str, said: str) -> None:
    response = await sync(client, text)
    assert response.status_code == 400
    assert said in response.json()["error"]["message"]


async def test_a_model_that_went_away_before_the_start(client: httpx.AsyncClient, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    await sync(client, f"model: {model}")
    model.rmdir()
    response = await client.post("/start_engine")
    assert response.status_code == 400
    assert str(model) in response.json()["error"]["message"]
    assert controller_of(client).engine.state is EngineState.OFFLINE


async def test_status_waits_for_a_state(client: httpx.AsyncClient) -> None:
    await sync(client)
    query = {"wait_state": "ENGINE.ROLLING", "wait_seconds": "30", "steps": "0"}
    waiter = asyncio.create_task(client.get("/status", params=query))
    await asyncio.sleep(0)
    controller = controller_of(client)
    controller.boot()
    controller.rollout_ready(ready("127.0.0.1:1"))
    answer = (await asyncio.wait_for(waiter, 10)).json()
    assert answer["engine"]["engine_status"] == "ENGINE.ROLLING"
    controller.offline("done")


@pytest.mark.parametrize(
    "query", [{"wait_state": "ROLLING"}, {"wait_state": "ENGINE.ROLLING", "wait_seconds": "61"}, {"steps": "many"}]
)
async def test_a_wrong_query(client: httpx.AsyncClient, query: dict[str, str]) -> None:
    response = await client.get("/status", params=query)
    assert response.status_code == 400
    assert "/status" in response.json()["error"]["message"]
