"""Ends that several servers share, at one server: promises, decisions, doubt, and restarts."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from swarm.protocol import PrepareGroupEndRequest
from swarm.server.app import create_app
from swarm.server.config import ServerConfig
from swarm.server.prepared import STORE_NAME
from swarm.server.prepared_store import PreparedStore
from swarm.states import EngineState
from swarm.types import ModelCall
from tests.swarm.client.scripted import Answer, ScriptedServer
from tests.swarm.server.conftest import JOB, Rig, ready
from tests.swarm.server.test_pool import record
from tests.swarm.server.vllm import ScriptedVllm, serving

pytestmark = pytest.mark.anyio


@pytest.fixture
def coordinator() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


@pytest.fixture
def overrides(coordinator: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr("swarm.server.prepared._ASK_FIRST", 0.01)
    return {"peers": {coordinator.url + "/": "peer-token"}}


async def group(rig: Rig, *, sampled: bool = True) -> list[str]:
    answer = await rig.post("/claim_group", client_uuid="me", count=2)
    assert answer["success"], answer
    for one in answer["episodes"]:
        if sampled:
            pool = rig.controller.pool
            record(pool, pool.open(one["episode_uuid"], one["openai_api_key"]), CALL)
    return [one["episode_uuid"] for one in answer["episodes"]]


def promise(uuids: list[str], **more: Any) -> dict[str, Any]:
    ends = [{"episode_uuid": uuid, "workflow_output": {"reward": float(n)}} for n, uuid in enumerate(uuids)]
    return {"client_uuid": "me", "task_id": "t", "ends": ends, "transaction": "x", "hold_seconds": 600} | more


CALL = ModelCall(
    call_id="c",
    prompt_ids=[1],
    response_ids=[2],
    logprobs=[-0.5],
    min_policy_version=0,
    max_policy_version=0,
    finish_reason="stop",
)
DECIDE = {"client_uuid": "me", "transaction": "x"}


async def refused(rig: Rig, path: str, body: dict[str, Any]) -> tuple[int, str]:
    response = await rig.client.post(path, json=body)
    return response.status_code, response.json()["error"]["code"]


def finished(rig: Rig) -> dict[str, int]:
    return rig.controller.pool.information().tasks


async def undecided(rig: Rig) -> list[dict[str, Any]]:
    return (await rig.client.get("/prepared_group_ends")).json()["prepared"]


async def decision(rig: Rig, name: str = "x") -> str:
    return (await rig.client.get("/group_end_decision", params={"transaction": name})).json()["decision"]


async def test_a_promise_is_carried_out_once(rig: Rig) -> None:
    uuids = await group(rig)
    for _ in range(2):
        await rig.post("/prepare_group_end", **promise(uuids))
    assert finished(rig) == {}
    assert await decision(rig) == "pending"
    [shown] = await undecided(rig)
    assert (shown["transaction"], shown["episodes"], shown["in_doubt"]) == ("x", 2, "")
    for _ in range(2):
        assert (await rig.post("/commit_group_end", **DECIDE))["error"] is None
    assert finished(rig) == {"t": 2}
    assert await decision(rig) == "committed"
    assert await undecided(rig) == []
    assert await refused(rig, "/cancel_group_end", DECIDE) == (409, "group_end_committed")
    # a repetition of the whole
    await rig.post("/prepare_group_end", **promise(uuids))
    await rig.post("/commit_group_end", **DECIDE)
    assert finished(rig) == {"t": 2}


async def test_what_is_promised_ends_in_no_other_way(rig: Rig) -> None:
    claimed = await rig.claim()
    await claimed.chat()
    await rig.post("/prepare_group_end", **promise([claimed.uuid]))
    assert (await claimed.chat()).status_code in (401, 409)
    end = {"client_uuid": "me", "episode_uuid": claimed.uuid, "task_id": "t", "workflow_output": {"reward": 9.0}}
    assert await refused(rig, "/end_episode", end) == (409, "episode_promised")
    assert await refused(rig, "/prepare_group_end", promise([claimed.uuid], transaction="y")) == (
        409,
        "episode_promised",
    )
    aborted = await rig.post("/abort_episode", client_uuid="me", episode_uuid=claimed.uuid)
    assert "promised" in aborted["error"]
    assert rig.controller.pool.running == 1


async def test_a_cancelled_promise_frees_its_episodes_for_good(rig: Rig) -> None:
    uuids = await group(rig)
    await rig.post("/prepare_group_end", **promise(uuids))
    for _ in range(2):
        await rig.post("/cancel_group_end", **DECIDE)
    assert rig.controller.pool.running == 0
    assert finished(rig) == {}
    assert await decision(rig) == "cancelled"
    assert await refused(rig, "/commit_group_end", DECIDE) == (409, "group_end_cancelled")
    assert await refused(rig, "/prepare_group_end", promise(uuids)) == (409, "group_end_cancelled")


async def test_what_would_not_be_trained_is_not_promised(rig: Rig) -> None:
    uuids = await group(rig, sampled=False)
    assert await refused(rig, "/prepare_group_end", promise(uuids)) == (409, "group_not_trained")
    assert await undecided(rig) == []
    await rig.post("/abort_episode", client_uuid="me", episode_uuid=uuids[0])
    assert rig.controller.pool.running == 1


async def test_refusals(rig: Rig) -> None:
    uuids = await group(rig)
    assert await refused(rig, "/commit_group_end", DECIDE) == (404, "group_end_unknown")
    assert await refused(rig, "/prepare_group_end", promise(["unknown"])) == (404, "episode_not_found")
    assert await refused(rig, "/prepare_group_end", promise(uuids * 2)) == (400, "invalid_request")
    await rig.post("/prepare_group_end", **promise(uuids))
    assert await refused(rig, "/prepare_group_end", promise(uuids, task_id="other")) == (409, "other_transaction")
    other = DECIDE | {"client_uuid": "other"}
    assert await refused(rig, "/commit_group_end", other) == (404, "group_end_unknown")
    assert await refused(rig, "/cancel_group_end", other) == (404, "group_end_unknown")
    assert (await rig.client.get("/group_end_decision")).status_code == 400


async def test_to_be_asked_for_what_it_does_not_know_changes_nothing(rig: Rig) -> None:
    uuids = await group(rig)
    for name in ("x", "y", "z"):
        assert await decision(rig, name) == "cancelled"
    with sqlite3.connect(rig.controller._config.run_dir / STORE_NAME) as connection:
        assert connection.execute("SELECT count(*) FROM group_ends").fetchone() == (0,)
    connection.close()
    await rig.post("/prepare_group_end", **promise(uuids))
    assert await decision(rig) == "pending"


async def test_the_coordinator_cancels_what_nobody_commits(rig: Rig) -> None:
    await rig.post("/prepare_group_end", **promise(await group(rig), hold_seconds=0.01))
    await rig.eventually(lambda: rig.controller.pool.running == 0)
    assert await decision(rig) == "cancelled"
    assert await refused(rig, "/commit_group_end", DECIDE) == (409, "group_end_cancelled")


@pytest.mark.parametrize("decided", ["committed", "cancelled"])
async def test_a_participant_in_doubt_asks(rig: Rig, coordinator: ScriptedServer, decided: str) -> None:
    coordinator.script(
        "/group_end_decision", Answer({}, 503), {"decision": "pending"}, {"decision": "perhaps"}, {"decision": decided}
    )
    uuids = await group(rig)
    await rig.post("/prepare_group_end", **promise(uuids, hold_seconds=0.01, coordinator=coordinator.url))
    await rig.eventually(lambda: rig.controller.pool.running == 0)
    assert finished(rig) == ({"t": 2} if decided == "committed" else {})
    assert {one.query for one in coordinator.requests} == {"transaction=x"}
    assert {one.headers["authorization"] for one in coordinator.requests} == {"Bearer peer-token"}
    assert await decision(rig) == decided


async def test_only_peers_are_asked(rig: Rig, coordinator: ScriptedServer) -> None:
    elsewhere = "http://127.0.0.1:1"
    await rig.post("/prepare_group_end", **promise(await group(rig), hold_seconds=0.01, coordinator=elsewhere))
    prepared = rig.app.state.prepared
    await rig.eventually(lambda: bool(prepared.undecided()[0].in_doubt))
    [shown] = await undecided(rig)
    assert "peers" in shown["in_doubt"]
    assert rig.controller.pool.running == 2
    assert coordinator.requests == []
    # an operator, or the client, may still decide
    await rig.post("/commit_group_end", **DECIDE)
    assert finished(rig) == {"t": 2}


async def test_a_peer_that_has_no_address_leaves_others_watched(rig: Rig) -> None:
    prepared = rig.app.state.prepared
    nowhere = "http://[::1"
    prepared.config = prepared.config.model_copy(update={"peers": {nowhere: ""}})
    await rig.post("/prepare_group_end", **promise(await group(rig), hold_seconds=0.01, coordinator=nowhere))
    await rig.eventually(lambda: bool(prepared.undecided()[0].in_doubt))
    await rig.post("/prepare_group_end", **promise(await group(rig), hold_seconds=0.01, transaction="y"))
    await rig.eventually(lambda: rig.controller.pool.running == 2)


async def test_a_promise_outlives_weight_syncs_and_timeouts(rig: Rig) -> None:
    answer = await rig.post(
        "/claim_group", client_uuid="me", count=2, discard_episode_timeout=0.01, max_episode_seconds=0.01
    )
    uuids = [one["episode_uuid"] for one in answer["episodes"]]
    pool = rig.controller.pool
    for episode in pool.episodes:
        record(pool, episode, CALL)
    assert pool.promise("me", "t", PrepareGroupEndRequest.model_validate(promise(uuids)).ends, "x") == ""
    pool._clock = lambda: float("1e12")
    assert pool.expire() == 0
    pool.enter(EngineState.ROLLING_POST)
    pool.enter(EngineState.WEIGHT_SYNCING)
    assert pool.running == 2
    assert pool.end("me", "t", PrepareGroupEndRequest.model_validate(promise(uuids)).ends, end_key="x") == ""


async def test_another_run_breaks_the_promise_before_it_is_committed(rig: Rig) -> None:
    await rig.post("/prepare_group_end", **promise(await group(rig)))
    rig.controller.pool.begin_run(JOB, "another job was synced")
    assert await refused(rig, "/commit_group_end", DECIDE) == (409, "episode_deleted")
    assert await decision(rig) == "cancelled"


# -- restarts


@asynccontextmanager
async def server(run_dir: Path) -> AsyncGenerator[Rig]:
    vllm = ScriptedVllm()
    app = create_app(ServerConfig(run_dir=run_dir))
    async with (
        serving(vllm.app) as vllm_url,
        serving(app) as url,
        httpx.AsyncClient(base_url=url, timeout=20, trust_env=False, verify=False) as client,
    ):
        await client.get("/health")
        rig = Rig(app, vllm, vllm_url.removeprefix("http://"), client)
        rig.controller.sync_job(JOB)
        rig.controller.boot()
        rig.controller.rollout_ready(ready(rig.vllm_address))
        yield rig


async def test_a_promise_survives_a_restart(tmp_path: Path) -> None:
    async with server(tmp_path) as rig:
        uuids = await group(rig)
        await rig.post("/prepare_group_end", **promise(uuids))
    async with server(tmp_path) as rig:
        assert rig.controller.pool.running == 2
        end = {"client_uuid": "me", "episode_uuid": uuids[0], "task_id": "t", "workflow_output": {"reward": 9.0}}
        assert await refused(rig, "/end_episode", end) == (409, "episode_promised")
        await rig.post("/commit_group_end", **DECIDE)
        assert finished(rig) == {"t": 2}
    async with server(tmp_path) as rig:
        assert finished(rig) == {"t": 2}
        assert await decision(rig) == "committed"
        await rig.post("/commit_group_end", **DECIDE)
        assert finished(rig) == {"t": 2}


async def test_a_decision_is_carried_out_after_a_restart(tmp_path: Path) -> None:
    async with server(tmp_path) as rig:
        body = promise(await group(rig))
        await rig.post("/prepare_group_end", **body)
    # killed between the decision and the ends
    store = PreparedStore(tmp_path / STORE_NAME)
    store.put("x", "me", "committed", PrepareGroupEndRequest.model_validate(body))
    store.close()
    async with server(tmp_path) as rig:
        assert finished(rig) == {"t": 2}
        assert await undecided(rig) == []


async def test_a_hold_goes_on_over_a_restart(tmp_path: Path) -> None:
    async with server(tmp_path) as rig:
        await rig.post("/prepare_group_end", **promise(await group(rig)))
    with sqlite3.connect(tmp_path / STORE_NAME) as connection:
        connection.execute("UPDATE group_ends SET changed_at = changed_at - 1000")
    connection.close()
    async with server(tmp_path) as rig:
        await rig.eventually(lambda: rig.controller.pool.running == 0)
        assert await decision(rig) == "cancelled"


def test_only_its_owner_reads_the_store(tmp_path: Path) -> None:
    path = tmp_path / STORE_NAME
    path.touch(0o644)
    store = PreparedStore(path)
    try:
        assert {one.name: one.stat().st_mode & 0o077 for one in tmp_path.iterdir()} == {
            STORE_NAME: 0,
            f"{STORE_NAME}-wal": 0,
            f"{STORE_NAME}-shm": 0,
        }
    finally:
        store.close()
