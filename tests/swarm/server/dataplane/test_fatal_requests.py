"""Requests that kill vLLM's core, over real sockets: two deaths, then a 500 for good; all others are answered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse, Response

from swarm.status import EngineFailure
from tests.standins.vllm import POISON, listening, plain
from tests.swarm.server.conftest import Rig, ready

pytestmark = pytest.mark.anyio

POISONED: list[Any] = [{"role": "user", "content": f"{POISON} apple"}]


async def restarted(rig: Rig) -> None:
    """Another engine serves."""
    rig.controller.engine.died("vLLM died: RuntimeError: no", cause="RuntimeError: no")
    rig.controller.offline("vLLM died")
    rig.vllm.dead.clear()
    rig.controller.boot()
    rig.controller.rollout_ready(ready(rig.vllm_address, version=rig.controller.engine.policy_version))


async def asked(rig: Rig, **body: Any) -> httpx.Response:
    return await rig.client.post("/v1/chat/completions", json={"messages": POISONED, **body})


async def kills(rig: Rig, **body: Any) -> httpx.Response:
    """The answer to a request that kills the core, and to nobody else, once the engine has gone."""
    return await killing(rig, asked(rig, **body))


async def killing(rig: Rig, asking: Coroutine[Any, Any, httpx.Response]) -> httpx.Response:
    task = asyncio.create_task(asking)
    await rig.vllm.dead.wait()
    await rig.eventually(lambda: task.done() or not rig.app.state.data_plane.replicas.rows()[0].healthy)
    if not rig.app.state.data_plane.replicas.suspects:
        # it is refused
        await task
    await restarted(rig)
    return await task


@pytest.mark.parametrize("stream", [False, True])
async def test_the_second_death_refuses_the_request_and_the_engine_is_not_asked_again(
    rig: Rig, tmp_path: Path, stream: bool
) -> None:
    first = await kills(rig, stream=stream)
    assert (first.status_code, first.headers["x-should-retry"]) == (503, "true")
    # the same in another form
    second = await kills(rig, stream=not stream, n=2)
    assert (second.status_code, second.headers["x-should-retry"]) == (500, "false"), second.text
    assert second.json()["error"]["code"] == "fatal_request" and "refused" in second.json()["error"]["message"]
    before = len(rig.vllm.requests)
    episode = await rig.claim()
    third = await episode.chat(messages=POISONED)
    assert (third.status_code, third.headers["x-should-retry"]) == (500, "false")
    assert len(rig.vllm.requests) == before == 2
    [record] = (tmp_path / "refused").glob("*.json")
    assert "apple" not in record.read_text() and json.loads(record.read_text())["deaths"] == 2
    assert (await episode.chat()).status_code == 200
    record.unlink()
    assert (await kills(rig)).status_code == 503, "whoever runs the server has allowed it"


async def test_the_budget_of_restarts_is_not_spent(rig: Rig) -> None:
    for number in range(4):
        for _ in range(2):
            await kills(rig, temperature=number / 10)
        assert (await (await rig.claim()).chat()).status_code == 200
    failure = rig.controller.engine.failure
    assert failure is not None and (failure.count, failure.unexplained, failure.repeated) == (8, 0, False)
    assert "refused from now on" in failure.reason


async def test_an_engine_that_dies_of_everything_is_given_up(rig: Rig) -> None:
    async def one(number: int) -> EngineFailure:
        await kills(rig, temperature=number / 10)
        assert rig.controller.engine.failure is not None
        return rig.controller.engine.failure

    assert not (await one(1)).repeated
    assert (await one(2)).repeated, "it answered nobody in between"
    assert (await (await rig.claim()).chat()).status_code == 200
    assert not (await one(3)).repeated


async def test_those_in_flight_at_a_death_are_asked_alone_and_answered(rig: Rig) -> None:
    go, inside, most = asyncio.Event(), set[str](), list[int]()

    async def counted(body: dict[str, Any]) -> Response:
        inside.add(name := body["messages"][0]["content"])
        most.append(len(inside))
        await go.wait()
        inside.discard(name)
        reply = plain([1, 2])(body)
        assert isinstance(reply, Response)
        return reply

    async def user(number: int) -> int:
        answer = await asked(rig, messages=[{"role": "user", "content": f"user {number}"}])
        while answer.status_code == 503:
            answer = await asked(rig, messages=[{"role": "user", "content": f"user {number}"}])
        return answer.status_code

    rig.vllm.default = counted
    users = [asyncio.create_task(user(number)) for number in range(4)]
    await rig.eventually(lambda: len(inside) == 4)
    first = await kills(rig)
    assert first.status_code == 503
    inside.clear()
    most.clear()
    go.set()
    assert await asyncio.gather(*users) == [200] * 4
    assert max(most) == 1, "all of them are suspects"
    assert (await kills(rig)).status_code == 500


async def test_a_replica_that_fails_a_call_and_lives_has_not_died(rig: Rig) -> None:
    rig.vllm.script.extend([lambda body: JSONResponse({"error": {"message": "no"}}, 500)] * 3)
    assert (await asked(rig, messages=[{"role": "user", "content": "hi"}])).status_code == 200
    assert rig.app.state.data_plane.replicas.rows()[0].healthy
    assert not rig.app.state.data_plane.replicas.suspects


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
async def test_other_calls_are_looked_at_as_well(rig: Rig, path: str) -> None:
    body = {"prompt": POISON, "input": POISON}

    statuses = [(await killing(rig, rig.client.post(path, json=body))).status_code for _ in range(2)]
    assert statuses == [503, 500]


async def test_a_process_that_is_gone_has_died_too(rig: Rig) -> None:
    """No ``/health``, and no answer at all."""

    async def cut(scope: Any, receive: Any, send: Any) -> None:
        raise ConnectionResetError

    async with listening(cut) as url:
        rig.controller.offline("moved")
        rig.controller.boot()
        rig.controller.rollout_ready(ready(url.removeprefix("http://")))
        asking = asyncio.create_task(asked(rig))
        await rig.eventually(lambda: bool(rig.app.state.data_plane.replicas.suspects))
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
