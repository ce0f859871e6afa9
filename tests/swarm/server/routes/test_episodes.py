"""Routes of episodes over a real socket: claims that wait, ends that repeat, and strangers."""

from __future__ import annotations

import asyncio

import pytest

from swarm.protocol import NO_EPISODES, POST_ROLLING, ClaimGroupResponse, PoolInformation
from swarm.states import EngineState
from tests.swarm.server.conftest import Rig

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
        assert ended == {"success": True, "error": None}
    info = PoolInformation.model_validate((await rig.client.get("/get_current_batch_rollout_pool_information")).json())
    assert (info.completed_tasks, info.completed_episodes, info.tasks) == (1, 2, {"a": 2})


async def test_a_claim_that_cannot_be_served_says_why(rig: Rig) -> None:
    await rig.post("/claim_group", client_uuid="me", count=4)
    answer = await rig.post("/claim_episode", client_uuid="me", wait_seconds=0.01)
    assert (answer["success"], answer["fail_cause"]) == (False, NO_EPISODES)
    rig.controller._to(EngineState.ROLLING_POST, "")
    assert (await rig.post("/claim_group", client_uuid="me", count=1))["fail_cause"] == POST_ROLLING


async def test_a_waiting_claim_is_served_when_an_episode_ends(rig: Rig) -> None:
    group = await rig.post("/claim_group", client_uuid="me", count=4)
    waiter = asyncio.create_task(rig.claim(wait_seconds=30))
    await rig.eventually(lambda: len(rig.controller.claims) == 1)
    await rig.post("/abort_episode", client_uuid="me", episode_uuid=group["episodes"][0]["episode_uuid"])
    await asyncio.wait_for(waiter, 10)


async def test_a_caller_that_leaves_gives_up_its_place(rig: Rig) -> None:
    group = await rig.post("/claim_group", client_uuid="me", count=4)
    waiter = asyncio.create_task(rig.claim(wait_seconds=30))
    await rig.eventually(lambda: len(rig.controller.claims) == 1)
    waiter.cancel()
    await rig.eventually(lambda: len(rig.controller.claims) == 0)
    await rig.post("/abort_episode", client_uuid="me", episode_uuid=group["episodes"][0]["episode_uuid"])
    assert rig.controller.pool.running == 3


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
    response = await rig.client.post("/end_episode", json=body | {"client_uuid": "me"})
    assert (response.status_code, response.json()["error"]["code"]) == (409, "episode_aborted")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
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
    ],
)
async def test_bad_requests(rig: Rig, path: str, body: dict[str, object], param: str) -> None:
    response = await rig.client.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
