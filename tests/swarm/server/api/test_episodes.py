"""Routes of episodes over a real socket: claims that wait, ends that repeat, and strangers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from swarm.protocol import NO_EPISODES, POST_ROLLING, ClaimGroupResponse
from swarm.server.app import create_app
from swarm.server.config import ServerConfig
from swarm.server.engine.controller import Controller
from swarm.states import EngineEvent
from swarm.status import ServerStatus
from tests.swarm.server.conftest import JOB, Rig, ready

pytestmark = pytest.mark.anyio


async def test_a_group_from_claim_to_batch(rig: Rig) -> None:
    answer = ClaimGroupResponse.model_validate(await rig.post("/claim_group", client_uuid="me", count=2))
    assert answer.success and len({e.openai_api_key for e in answer.episodes}) == 2
    server = str(rig.client.base_url).rstrip("/")
    assert all(e.openai_base_url == f"{server}/episodes/{e.episode_uuid}/v1" for e in answer.episodes)
    for episode in answer.episodes:
        response = await rig.client.post(
            f"{episode.openai_base_url}/chat/completions",
            json={"messages": [{"role": "user", "content": "hi"}]},
            headers={"authorization": f"Bearer {episode.openai_api_key}"},
        )
        assert response.status_code == 200
    ends = [{"episode_uuid": e.episode_uuid, "workflow_output": {"reward": 0.5}} for e in answer.episodes]
    for _ in range(2):
        ended = await rig.post("/end_group", client_uuid="me", task_id="a", ends=ends)
        assert (ended["success"], ended["error"]) == (True, None)
        assert {name: told["trained"] for name, told in ended["tokens"].items()} == dict.fromkeys(
            [e.episode_uuid for e in answer.episodes], 2
        )
    info = ServerStatus.model_validate((await rig.client.get("/status")).json()).pool
    assert info is not None
    assert (info.completed_tasks, info.completed_episodes, info.tasks) == (1, 2, {"a": 2})


async def test_a_claim_that_cannot_be_served_says_why(rig: Rig) -> None:
    await rig.post("/claim_group", client_uuid="me", count=4)
    answer = await rig.post("/claim_episode", client_uuid="me", wait_seconds=0.01)
    assert (answer["success"], answer["fail_cause"]) == (False, NO_EPISODES)
    rig.controller._happen(EngineEvent.CLOSE, "")
    assert (await rig.post("/claim_group", client_uuid="me", count=1))["fail_cause"] == POST_ROLLING


async def test_a_waiting_claim_is_served_when_an_episode_ends(rig: Rig) -> None:
    group = await rig.post("/claim_group", client_uuid="me", count=4)
    waiter = asyncio.create_task(rig.claim(wait_seconds=30))
    await rig.eventually(lambda: len(rig.controller.episodes.claims) == 1)
    await rig.post("/abort_episode", client_uuid="me", episode_uuid=group["episodes"][0]["episode_uuid"])
    await asyncio.wait_for(waiter, 10)


async def test_a_caller_that_leaves_gives_up_its_place(rig: Rig) -> None:
    group = await rig.post("/claim_group", client_uuid="me", count=4)
    waiter = asyncio.create_task(rig.claim(wait_seconds=30))
    await rig.eventually(lambda: len(rig.controller.episodes.claims) == 1)
    waiter.cancel()
    await rig.eventually(lambda: len(rig.controller.episodes.claims) == 0)
    await rig.post("/abort_episode", client_uuid="me", episode_uuid=group["episodes"][0]["episode_uuid"])
    assert len(rig.controller.pool.running) == 3


async def test_strangers_and_late_ends_are_refused(rig: Rig) -> None:
    episode = await rig.claim()
    body = {"episode_uuid": episode.uuid, "task_id": "a", "workflow_output": {"reward": 1}}
    response = await rig.client.post("/end_episode", json=body | {"client_uuid": "stranger"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "episode_not_found")
    # a stranger's abort changes nothing, and says so without an error
    aborted = await rig.post("/abort_episode", client_uuid="stranger", episode_uuid=episode.uuid)
    assert aborted["success"] and "not yours" in aborted["error"]
    assert (await rig.post("/can_continue_episode", client_uuid="stranger", episode_uuid=episode.uuid)) == {
        "can_continue": False
    }
    assert (await rig.post("/can_continue_episode", client_uuid="me", episode_uuid=episode.uuid))["can_continue"]
    for _ in range(2):
        assert (await rig.post("/abort_episode", client_uuid="me", episode_uuid=episode.uuid))["success"]
    response = await rig.client.post("/end_episode", json=body | {"client_uuid": "me", "idempotency_key": "e"})
    assert (response.status_code, response.json()["error"]["code"]) == (409, "episode_aborted")


async def test_bad_requests(rig: Rig) -> None:
    bad: list[tuple[str, dict[str, Any], str]] = [
        ("/claim_episode", {"client_uuid": ""}, "client_uuid"),
        ("/claim_episode", {"client_uuid": "me", "episode_type": "test"}, "episode_type"),
        ("/claim_episode", {"client_uuid": "me", "wait_seconds": 61}, "wait_seconds"),
        ("/claim_group", {"client_uuid": "me", "count": 5}, "count"),
        ("/end_group", {"client_uuid": "me", "task_id": "", "ends": []}, "task_id"),
        (
            "/end_episode",
            {"client_uuid": "me", "episode_uuid": "e", "task_id": "a", "workflow_output": {"reward": "much"}},
            "workflow_output.reward",
        ),
    ]
    for path, body, param in bad:
        response = await rig.client.post(path, json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), path


async def test_a_repeated_claim_and_a_repeated_end_over_http(rig: Rig) -> None:
    claim = {"client_uuid": "me", "count": 2, "idempotency_key": "c1", "wait_seconds": 5}
    first = await rig.post("/claim_group", **claim)
    assert await rig.post("/claim_group", **claim) == first
    assert first["openai_base_url"].endswith(f"/groups/{first['group_uuid']}/v1") and first["openai_api_key"]
    assert len(rig.controller.pool.running) == 2
    ends = [{"episode_uuid": e["episode_uuid"], "workflow_output": {"reward": 1}} for e in first["episodes"]]
    body = {"client_uuid": "me", "task_id": "a", "ends": ends}
    answers = [await rig.post("/end_group", **body, idempotency_key="e1") for _ in range(2)]
    assert answers[0] == answers[1]
    response = await rig.client.post("/end_group", json=body | {"idempotency_key": "e2"})
    assert (response.status_code, response.json()["error"]["code"]) == (409, "episode_ended")
    reused = await rig.client.post("/claim_group", json=claim | {"count": 3})
    assert (reused.status_code, reused.json()["error"]["code"]) == (409, "idempotency_key_reused")


async def test_a_claim_that_was_granted_while_its_answer_was_lost_is_joined(rig: Rig) -> None:
    full = await rig.post("/claim_group", client_uuid="me", count=4)
    body = {"wait_seconds": 30, "idempotency_key": "k"}
    works = [asyncio.create_task(rig.claim(**body)) for _ in range(3)]
    await rig.eventually(lambda: len(rig.controller.episodes.claims) == 1)
    await rig.post("/abort_episode", client_uuid="me", episode_uuid=full["episodes"][0]["episode_uuid"])
    claimed = await asyncio.wait_for(asyncio.gather(*works), 10)
    assert len({(one.uuid, one.key) for one in claimed}) == 1
    assert len(rig.controller.pool.running) == 4


async def test_a_claim_that_is_withdrawn_is_answered_at_once(rig: Rig) -> None:
    full = await rig.post("/claim_group", client_uuid="me", count=4)
    waits = asyncio.create_task(rig.post("/claim_episode", client_uuid="me", wait_seconds=60, idempotency_key="k"))
    await rig.eventually(lambda: len(rig.controller.episodes.claims) == 1)
    assert await rig.post("/withdraw_claim", client_uuid="me", idempotency_key="k") == {"success": True, "error": None}
    async with asyncio.timeout(30):
        assert not (await waits)["success"]
    assert full["success"] and len(rig.controller.episodes.claims) == 0


async def test_what_a_withdrawn_claim_was_granted_is_aborted_on_disk(rig: Rig) -> None:
    episode = await rig.claim(idempotency_key="k")
    await rig.post("/withdraw_claim", client_uuid="me", idempotency_key="k")
    body = {"client_uuid": "me", "episode_uuid": episode.uuid, "task_id": "a", "workflow_output": {"reward": 1}}
    late = await rig.client.post("/end_episode", json=body | {"idempotency_key": "e"})
    assert (late.status_code, late.json()["error"]["code"]) == (409, "episode_aborted")


async def test_what_was_acknowledged_is_there_after_a_restart(tmp_path: Path) -> None:
    config = ServerConfig(run_dir=tmp_path)
    claim = {"client_uuid": "me", "idempotency_key": "c"}
    end: dict[str, Any] = {"client_uuid": "me", "task_id": "a", "workflow_output": {"reward": 1}}
    told: list[Any] = []
    for life in (1, 2, 3):
        app = create_app(config)
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", verify=False) as client,
        ):
            controller: Controller = app.state.controller
            if life == 1:
                controller.sync_job(JOB)
                controller.boot()
                controller.rollout_ready(ready("127.0.0.1:1"))
            claimed = (await client.post("/claim_episode", json=claim)).json()
            assert claimed["success"], "a repetition is answered in any state of the engine"
            if life == 2:
                body = end | {"episode_uuid": claimed["episode_uuid"]}
                answer = (await client.post("/end_episode", json=body)).json()
                assert answer["success"] and "no completed LLM call" in answer["error"]
            told.append(claimed["episode_uuid"])
            information = (await client.get("/status")).json()["pool"]
            counts = information["running_episodes"], information["dropped_episodes"]
            assert counts == ((1, 0) if life == 1 else (0, 1))
            assert life != 3 or (await client.post("/end_episode", json=body)).json() == answer
    assert len(set(told)) == 1


async def test_a_background_task_that_fails_is_told(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> int:
        raise KeyError("nobody")

    monkeypatch.setattr(rig.controller.pool, "expire", fails)
    await rig.claim(discard_episode_timeout=0.01)
    await rig.eventually(lambda: any("expire has ended" in record.message for record in caplog.records))
