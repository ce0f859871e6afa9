"""Streams through the gateway: chunks, keep-alives, errors after the headers, disconnects. All over sockets."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse, Response

from swarm.states import EngineState
from tests.gateway.conftest import OpenGateway
from tests.gateway.stand_in import Swarm, completion, error

pytestmark = pytest.mark.anyio

BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "stream": True}
CHAT = "/v1/chat/completions"


def events(text: str) -> list[Any]:
    return [
        json.loads(line[6:]) if line != "data: [DONE]" else "[DONE]"
        for line in text.split("\n")
        if line.startswith("data: ")
    ]


async def test_chunks_spell_the_best_answer_and_end_with_done(swarm: Swarm, gateway: httpx.AsyncClient) -> None:
    response = await gateway.post(CHAT, json={**BODY, "stream_options": {"include_usage": True}})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-request-id"]
    assert (response.headers["x-swarm-policy-version"], response.headers["x-swarm-trained"]) == ("7", "true")
    assert float(response.headers["x-swarm-reward"]) == pytest.approx(0.4)
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])
    assert text == "word word word word"
    assert chunks[-1]["usage"]["completion_tokens"] == 3
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-2]["swarm"] == {
        "policy_version": 7,
        "reward": 0.4,
        "reward_mean": 0.25,
        "trained": True,
        "drop_reason": None,
    }
    assert (swarm.bodies, swarm.calls) == ([{"model": "tiny", "messages": BODY["messages"]}], [4])
    assert len(swarm.ends) == 1


async def test_a_waiting_stream_is_kept_alive(swarm: Swarm, open_gateway: OpenGateway) -> None:
    go = asyncio.Event()

    async def waits(body: dict[str, Any], number: int) -> Response:
        await go.wait()
        return JSONResponse(completion("late"))

    swarm.answer = waits
    async with open_gateway(keepalive_seconds=0.05) as http, http.stream("POST", CHAT, json=BODY) as response:
        lines = response.aiter_lines()
        seen = [await anext(lines) for _ in range(4)]
        assert seen == [": keep-alive", ""] * 2
        assert "x-swarm-trained" not in response.headers
        go.set()
        rest = "\n".join([line async for line in lines])
    assert "late" in rest and '"trained":true' in rest and rest.strip().endswith("data: [DONE]")


async def test_an_error_before_the_headers_has_its_own_status(swarm: Swarm, gateway: httpx.AsyncClient) -> None:
    async def refuses(body: dict[str, Any], number: int) -> Response:
        return error(400, "too long")

    swarm.answer = refuses
    response = await gateway.post(CHAT, json=BODY)
    assert (response.status_code, response.json()["error"]["message"]) == (400, "too long")


async def test_an_error_after_the_headers_is_an_event_that_ends_the_stream(
    swarm: Swarm, open_gateway: OpenGateway
) -> None:
    go = asyncio.Event()

    async def fails(body: dict[str, Any], number: int) -> Response:
        await go.wait()
        return error(500, "boom")

    swarm.answer = fails
    async with open_gateway(keepalive_seconds=0.05) as http, http.stream("POST", CHAT, json=BODY) as response:
        assert response.status_code == 200
        lines = response.aiter_lines()
        await anext(lines)
        go.set()
        rest = "\n".join([line async for line in lines])
    [event] = events(rest)
    assert event["error"]["code"] == "engine_failed" and event["error"].keys() == {"message", "type", "param", "code"}
    await swarm.until(lambda: not swarm.open_episodes)


async def test_a_disconnect_cancels_every_sample_and_aborts_every_episode(
    swarm: Swarm, open_gateway: OpenGateway
) -> None:
    async def hangs(body: dict[str, Any], number: int) -> Response:
        await asyncio.Event().wait()
        raise AssertionError

    swarm.answer = hangs
    async with open_gateway(keepalive_seconds=0.05) as http:
        async with http.stream("POST", CHAT, json=BODY) as response:
            await anext(response.aiter_lines())
            await swarm.until(lambda: swarm.sampling == 4)
        await swarm.until(lambda: swarm.cancelled == 4 and not swarm.open_episodes)
        status = (await http.get("/status")).json()
        assert (status["in_flight"], status["groups"]["dropped"]) == (0, {"request_cancelled": 1})


async def test_a_syncing_engine_keeps_the_stream_alive_until_it_rolls(swarm: Swarm, open_gateway: OpenGateway) -> None:
    await swarm.set_state(EngineState.WEIGHT_SYNCING)
    async with open_gateway(keepalive_seconds=0.05) as http, http.stream("POST", CHAT, json=BODY) as response:
        lines = response.aiter_lines()
        assert await anext(lines) == ": keep-alive"
        await swarm.set_state(EngineState.ROLLING)
        rest = "\n".join([line async for line in lines])
    assert events(rest)[-1] == "[DONE]"
