"""Streams through the gateway: chunks, keep-alives, errors after the headers, disconnects. All over sockets."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from swarm.states import EngineState
from tests.gateway.conftest import OpenGateway
from tests.standins.swarm import Swarm

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


async def test_a_syncing_engine_keeps_the_stream_alive_until_it_rolls(swarm: Swarm, open_gateway: OpenGateway) -> None:
    await swarm.set_state(EngineState.WEIGHT_SYNCING)
    async with open_gateway(keepalive_seconds=0.05) as http, http.stream("POST", CHAT, json=BODY) as response:
        lines = response.aiter_lines()
        assert await anext(lines) == ": keep-alive"
        await swarm.set_state(EngineState.ROLLING)
        rest = "\n".join([line async for line in lines])
    assert events(rest)[-1] == "[DONE]"
