"""``/status``: what a monitor is shown, and who is shown what."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import httpx
import pytest

from swarm.credentials import TokenFile
from swarm.status import ServerStatus
from swarm.types import StepResult
from tests.standins.vllm import plain
from tests.swarm.server.conftest import Rig, ready

pytestmark = pytest.mark.anyio


async def status(rig: Rig, query: str = "") -> ServerStatus:
    answer = await rig.client.get(f"/status{query}")
    assert answer.status_code == 200, answer.text
    return ServerStatus.model_validate(answer.json())


async def test_a_monitor_sees_who_runs_what(rig: Rig) -> None:
    idle = await rig.claim("first", throttle_policy={"current_task_id": "a"}, discard_episode_timeout=100)
    await idle.chat()
    busy = await rig.claim("second")
    rig.vllm.script.append(rig.vllm.hang())
    async with httpx.AsyncClient(timeout=60, verify=False, trust_env=False) as http:
        request = busy.request()
        call = asyncio.create_task(http.send(request))
        await rig.eventually(lambda: any(one.in_flight for one in rig.controller.pool.running.values()))
        seen = await status(rig)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    first, second = seen.running
    assert (first.episode_uuid, first.client_uuid, first.task_id) == (idle.uuid, "first", "a")
    assert (first.calls, first.in_flight, first.idle_timeout) == (1, 0, 100)
    assert first.idle_seconds > 0 and 0 < first.seconds_left < 3600 and first.seconds >= first.idle_seconds
    assert (second.episode_uuid, second.in_flight, second.idle_seconds) == (busy.uuid, 1, 0.0)
    assert {row.client_uuid: row.running for row in seen.clients} == {"first": 1, "second": 1}
    assert [row.address for row in seen.replicas] == [rig.vllm_address]
    assert seen.replicas[0].calls == 2


async def test_a_monitor_sees_what_happened(rig: Rig) -> None:
    rig.vllm.script.append(plain([1, 2], logprobs=None))
    broken = await rig.claim()
    await broken.chat()
    await broken.end("z")
    await (await rig.claim()).end("c")
    for task, reward in (("a", 0.0), ("a", 1.0), ("b", 0.0), ("b", 1.0)):
        episode = await rig.claim()
        await episode.chat()
        await episode.end(task, reward)
    seen = await status(rig)
    assert seen.outcomes == {"trainable": 4, "untrainable": 2}
    assert sum(seen.quarantined.values()) == 1
    assert seen.dropped == {"no completed LLM call was recorded in the episode": 1}
    assert seen.pool is not None and seen.pool.tasks == {"a": 2, "b": 2}
    assert seen.rates is not None and seen.rates.episodes_per_minute > 0
    assert seen.rates.sampled_tokens_per_second > 0
    assert seen.journal is not None and seen.journal.commits > 0 and not seen.journal.error
    batch = await rig.controller.next_batch()
    rig.controller.step_done(StepResult(step=1, batch_id=batch.batch_id, metrics={}, seconds=3.0))
    rig.controller.rollout_ready(ready(rig.vllm_address, 1, batch.batch_id))
    seen = await status(rig)
    assert [step.step for step in seen.steps] == [1]
    assert seen.rates is not None and seen.rates.trained_tokens_per_second > 0


async def test_the_longest_idle_come_first_and_no_more_than_asked_for(rig: Rig) -> None:
    names = [(await rig.claim()).uuid for _ in range(4)]
    assert [one.episode_uuid for one in (await status(rig)).running] == names
    assert [one.episode_uuid for one in (await status(rig, "?episodes=2")).running] == names[:2]
    assert (await status(rig, "?episodes=0")).running == []


@pytest.mark.parametrize("overrides", [{"token": "all-scopes"}])
async def test_only_an_admin_sees_whole_names(rig: Rig, overrides: dict[str, Any], tmp_path: Path) -> None:
    """Whoever knows an episode's name and its client's could end it."""
    headers = {"authorization": "Bearer all-scopes"}
    store = TokenFile(tmp_path)
    tokens = {scope: store.create(scope, [scope]) for scope in ("read", "claim")}
    claimed = (await rig.client.post("/claim_episode", json={"client_uuid": "me"}, headers=headers)).json()
    name = claimed["episode_uuid"]
    for token, shown in (("all-scopes", name), (tokens["claim"], name[-8:]), (tokens["read"], name[-8:])):
        mine = {"authorization": f"Bearer {token}"}
        seen = (await rig.client.get("/status", headers=mine)).json()
        assert [one["episode_uuid"] for one in seen["running"]] == [shown]
        assert (name in (await rig.client.get("/metrics", headers=mine)).text) is False


@pytest.mark.parametrize("overrides", [{"max_episode_seconds": math.inf}])
async def test_a_cap_that_never_comes_is_a_long_one(rig: Rig, overrides: dict[str, Any]) -> None:
    """A status with an infinity could be read by nobody."""
    await rig.claim()
    [one] = (await status(rig)).running
    assert one.seconds_left > 29 * 86400
