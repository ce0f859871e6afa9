"""Calls while the engine is away, goes away, comes back elsewhere, or has several replicas."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from msgspec import structs
from starlette.responses import Response

from swarm.link.messages import RolloutReady
from swarm.states import EngineStates, TrainerState, VllmState
from swarm.tokens import Sampled
from tests.ports import free_ports
from tests.standins.vllm import (
    ENGINE_MODEL,
    ScriptedVllm,
    plain,
    role_chunk,
    status,
    streamed,
    token_chunk,
    usage_chunk,
)
from tests.standins.vllm import listening as serving
from tests.swarm.server.conftest import Rig, ready
from tests.swarm.server.dataplane.group import claim_group

pytestmark = pytest.mark.anyio


def unreachable() -> str:
    """An address of this machine at which nobody listens."""
    return f"127.0.0.1:{free_ports(1)[0]}"


def assert_offline(response: httpx.Response) -> None:
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_offline")
    assert int(response.headers["retry-after"]) >= 1
    assert response.headers["x-should-retry"] == "true"


@pytest.mark.parametrize("streaming", [False, True])
async def test_while_no_engine_serves_calls_are_told_to_come_back(rig: Rig, streaming: bool) -> None:
    episode, group = await rig.claim(), await claim_group(rig)
    rig.controller.offline("killed by a test")
    assert_offline(await episode.chat(stream=streaming))
    rig.controller.boot()
    assert_offline(await episode.chat(stream=streaming))
    assert_offline(await group.chat(stream=streaming))
    rig.controller.rollout_ready(ready(rig.vllm_address, 1))
    rig.vllm.default = plain([1])
    assert (await episode.chat()).status_code == (await group.chat()).status_code == 200


async def test_a_call_that_is_told_to_come_back_keeps_its_episode(rig: Rig) -> None:
    episode, group = await rig.claim(), await claim_group(rig)
    rig.controller.offline("killed by a test")
    rig.controller.boot()
    before = {one.episode_uuid: one.last_active for one in rig.controller.pool.running.values()}
    assert len(before) == 1 + len(group.members)
    assert_offline(await episode.chat())
    assert_offline(await group.chat())
    # the refused call is activity: a client that retries as it is told does not lose its episode to the idle timeout
    assert all(one.last_active > before[one.episode_uuid] for one in rig.controller.pool.running.values())


async def test_a_call_in_flight_is_told_that_its_engine_is_gone_and_works_with_the_next(rig: Rig) -> None:
    rig.vllm.default = rig.vllm.hang()
    episode = await rig.claim()
    call = asyncio.create_task(episode.chat())
    await rig.eventually(lambda: bool(rig.vllm.requests))
    rig.controller.offline("killed by a test")
    assert_offline(await asyncio.wait_for(call, 10))
    await asyncio.wait_for(rig.vllm.cancelled.wait(), 10)
    rig.controller.boot()
    rig.controller.rollout_ready(ready(rig.vllm_address, 1))
    rig.vllm.default = plain([7])
    assert (await episode.chat()).status_code == 200
    assert [call.response_ids for call in episode.calls] == [[7]]


@pytest.mark.parametrize(
    ("sampled", "versions"),
    [
        (None, (0, 1, [])),
        ({"chatcmpl-1": {0: 1}}, (0, 1, [(0, 0), (1, 1)])),
        ({"chatcmpl-1": {0: 2**31 - 1}}, (0, 0, [])),
        ({"chatcmpl-2": {0: 1}}, (1, 1, [])),
    ],
)
async def test_a_call_outlives_a_weight_sync_where_episodes_run_on_and_names_its_tokens_versions(
    rig: Rig, sampled: Sampled | None, versions: tuple[int, int, list[tuple[int, int]]]
) -> None:
    rig.controller.rollout_ready(structs.replace(ready(rig.vllm_address), serving="always"))
    synced = asyncio.Event()

    async def late(body: dict[str, Any]) -> Response:
        await synced.wait()
        return plain([7, 8])(body)

    rig.vllm.script.append(late)
    episode = await rig.claim()
    call = asyncio.create_task(episode.chat())
    await rig.eventually(lambda: bool(rig.vllm.requests))
    rig.controller.weight_sync_begins()
    rig.controller.weights_synced(1, sampled)
    synced.set()
    assert (await call).headers["x-swarm-policy-version"] == "1"
    [recorded] = episode.calls
    assert (recorded.min_policy_version, recorded.max_policy_version, recorded.versions) == versions
    await episode.end()
    assert rig.controller.pool.information().completed_episodes == 1


async def test_calls_with_one_request_id_are_told_apart_over_a_weight_sync(rig: Rig) -> None:
    """The stand-in names its requests as vLLM does, and tells of both at the sync: one has a token, the other two."""
    rig.controller.rollout_ready(structs.replace(ready(rig.vllm_address), serving="always"))
    synced = asyncio.Event()
    names: list[str] = []

    async def late(body: dict[str, Any]) -> Response:
        names.append(name := f"chatcmpl-{body.get('request_id') or len(names)}")
        await synced.wait()
        return plain([7, 8, 9], id=name)(body)

    rig.vllm.default = late
    episodes = [await rig.claim(), await rig.claim()]
    calls: list[asyncio.Task[httpx.Response]] = []
    for episode in episodes:
        calls.append(asyncio.create_task(episode.chat(request_id="mine")))
        await rig.eventually(lambda: len(names) == len(calls))
    rig.controller.weight_sync_begins()
    rig.controller.weights_synced(1, {name: {0: tokens} for tokens, name in enumerate(names, 1)})
    synced.set()
    await asyncio.gather(*calls)
    assert [episode.calls[0].versions for episode in episodes] == [[(0, 0), (1, 1)], [(0, 0), (2, 1)]]


async def test_a_stream_that_its_engine_leaves_half_said_is_not_trained(rig: Rig) -> None:
    rig.vllm.script.append(rig.vllm.hang(role_chunk(), token_chunk([5])))
    group = await claim_group(rig)
    response = await rig.client.send(group.request(stream=True), stream=True)
    received = b""
    async with asyncio.timeout(10):
        async for part in response.aiter_bytes():
            received += part
            if b"t5" in received and rig.controller.engine.state.name != "OFFLINE":
                rig.controller.offline("killed by a test")
    last = json.loads(received.decode().split("\n\n")[-2].removeprefix("data: "))
    assert last["error"]["code"] == "engine_offline"
    assert all("a stream was cut" in why for why in group.quarantined)


async def test_a_stream_that_has_said_nothing_yet_is_not_held_against_its_episode(rig: Rig) -> None:
    rig.vllm.script.append(rig.vllm.hang(role_chunk()))
    group = await claim_group(rig)
    call = asyncio.create_task(group.chat(stream=True))
    await rig.eventually(lambda: bool(rig.vllm.requests))
    rig.controller.offline("killed by a test")
    assert_offline(await asyncio.wait_for(call, 10))
    assert not any(group.quarantined)


@pytest.mark.parametrize("outlives", [True, False])
async def test_a_stream_that_is_being_read_may_outlive_its_episode(rig: Rig, outlives: bool) -> None:
    synced = asyncio.Event()
    rig.vllm.script.append(
        streamed(role_chunk(), token_chunk([5]), synced.wait, token_chunk([6], finish="stop"), usage_chunk(2))
    )
    episode = await rig.claim()
    [kept] = rig.controller.pool.running.values()
    request = episode.request(stream=True)
    if outlives:
        request.headers["x-swarm-outlive"] = "1"
    response = await rig.client.send(request, stream=True)
    received = b""
    async with asyncio.timeout(30):
        async for part in response.aiter_bytes():
            received += part
            if b"t5" in received and not synced.is_set():
                rig.controller.pool.follow(EngineStates(VllmState.PAUSED, TrainerState.COMPUTING))
                synced.set()
    assert (b"t6" in received and b"[DONE]" in received) is outlives
    assert (b"episode_deleted" in received) is not outlives
    assert not kept.calls


async def test_a_call_that_has_not_begun_does_not_outlive_its_episode(rig: Rig) -> None:
    rig.vllm.default = rig.vllm.hang()
    episode = await rig.claim()
    request = episode.request(stream=True)
    request.headers["x-swarm-outlive"] = "1"
    call = asyncio.create_task(rig.client.send(request))
    await rig.eventually(lambda: rig.vllm.streaming == 1)
    rig.controller.pool.follow(EngineStates(VllmState.PAUSED, TrainerState.COMPUTING))
    response = await asyncio.wait_for(call, 30)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "episode_deleted")


# ------------------------------------------------------------------ replicas


def rolling(rig: Rig, *addresses: str) -> None:
    """Let the engine serve at ``addresses``."""
    message = RolloutReady(addresses=list(addresses), model=ENGINE_MODEL, policy_version=0, next_step=1)
    rig.controller.rollout_ready(message)


async def test_calls_go_around_a_replica_that_cannot_be_reached(rig: Rig) -> None:
    away = unreachable()
    rolling(rig, away, rig.vllm_address)
    # so many prompts that some are the unreachable one's
    for at in range(16):
        episode = await rig.claim(episode_type="eval")
        response = await episode.chat(messages=[{"role": "user", "content": f"question {at}"}])
        assert response.status_code == 200
        await episode.end()
    rows = {row.address: row for row in rig.app.state.data_plane.replicas.rows()}
    assert (rows[away].healthy, rows[away].calls, rows[away].failures) == (False, 1, 1)
    assert (rows[rig.vllm_address].healthy, rows[rig.vllm_address].calls) == (True, 16)


async def test_a_failing_replica_gives_way_to_another(rig: Rig) -> None:
    broken = ScriptedVllm()
    broken.default = status(500, {"error": {"message": "boom"}})
    async with serving(broken.app) as url:
        rolling(rig, url.removeprefix("http://"), rig.vllm_address)
        for at in range(24):
            episode = await rig.claim(episode_type="eval")
            response = await episode.chat(messages=[{"role": "user", "content": f"question {at}"}])
            assert response.status_code == 200
            # and stays there
            assert (await episode.chat()).status_code == 200
            await episode.end()
    assert 0 < len(broken.requests) <= 24 and len(rig.vllm.requests) == 48


async def test_a_replica_that_answers_again_is_used_again(rig: Rig) -> None:
    late = ScriptedVllm()
    address = unreachable()
    rolling(rig, address)
    episode = await rig.claim()
    call = asyncio.create_task(episode.chat())
    rows = rig.app.state.data_plane.replicas.rows
    await rig.eventually(lambda: any(not row.healthy for row in rows()))
    assert not call.done()
    async with serving(late.app, port=int(address.split(":")[1])):
        response: httpx.Response = await asyncio.wait_for(call, 20)
        assert response.status_code == 200
        assert [row.healthy for row in rows()] == [True]


@pytest.mark.parametrize("overrides", [{"call_timeout": 0.3}])
async def test_waiting_for_a_replica_ends_with_the_deadline_of_the_call(rig: Rig) -> None:
    rolling(rig, unreachable())
    response = await (await rig.claim()).chat()
    assert (response.status_code, response.json()["error"]["code"]) == (504, "upstream_timeout")


async def test_calls_of_one_episode_run_together_on_its_replica(rig: Rig) -> None:
    other = ScriptedVllm()
    meeting = asyncio.Barrier(8)

    async def meet(body: dict[str, Any]) -> Any:
        await meeting.wait()
        return plain([1])(body)

    rig.vllm.default = other.default = meet
    async with serving(other.app) as url:
        rolling(rig, url.removeprefix("http://"), rig.vllm_address)
        episode = await rig.claim()
        # their prompts differ: that they meet at one place is the episode's doing
        calls = [episode.chat(messages=[{"role": "user", "content": f"{at}"}]) for at in range(8)]
        async with asyncio.timeout(10):
            responses = await asyncio.gather(*calls)
    assert {response.status_code for response in responses} == {200}
    assert sorted((len(other.requests), len(rig.vllm.requests))) == [0, 8]
    assert len(episode.calls) == 8


async def test_an_engine_that_is_back_at_once_does_not_answer_calls_of_the_one_before(rig: Rig) -> None:
    rig.vllm.default = rig.vllm.hang()
    episode = await rig.claim()
    call = asyncio.create_task(episode.chat())
    await rig.eventually(lambda: bool(rig.vllm.requests))
    rig.controller.offline("killed by a test")
    rig.controller.boot()
    rig.controller.rollout_ready(ready(rig.vllm_address, 1))
    assert_offline(await asyncio.wait_for(call, 10))
