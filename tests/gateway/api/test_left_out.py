"""What cannot be carried to the model is left out; the answer, the request log and the log say so."""

from __future__ import annotations

import json
import logging
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.api.conftest import saying
from tests.gateway.conftest import Http, OpenGateway
from tests.standins.swarm import Swarm, error

pytestmark = pytest.mark.anyio

HI: dict[str, Any] = {"role": "user", "content": "hi"}
#: The first requests of Claude Code and of Codex, without most of their words.
CLAUDE_CODE: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 32000,
    "stream": True,
    "system": [{"type": "text", "text": "You are a Claude agent.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}]},
        {"role": "system", "content": "Available agent types: claude"},
    ],
    "tools": [{"name": "Bash", "input_schema": {"type": "object"}, "eager_input_streaming": True}],
    "metadata": {"user_id": "u"},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
}
CODEX: dict[str, Any] = {
    "model": "tiny",
    "stream": True,
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "You are Codex."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
    ],
    "tools": [
        {"type": "function", "name": "exec_command", "strict": False, "parameters": {"type": "object"}},
        {
            "type": "namespace",
            "name": "multi_agent_v1",
            "description": "Tools for sub-agents.",
            "tools": [{"type": "function", "name": "spawn", "strict": False, "parameters": {"type": "object"}}],
        },
        {"type": "web_search", "external_web_access": True},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "client_metadata": {"session_id": "s"},
}


@pytest.mark.parametrize(
    ("path", "body", "left_out"),
    [
        ("/v1/messages", CLAUDE_CODE, ["context_management"]),
        ("/v1/responses", CODEX, ["tools.1.description", "tools.2", "reasoning.summary"]),
        ("/v1/chat/completions", {"model": "tiny", "messages": [HI], "stream": True, "store": True}, ["store"]),
    ],
)
async def test_agents_are_answered_and_told(
    gateway: Http, path: str, body: dict[str, Any], left_out: list[str]
) -> None:
    for stream, policy in product((True, False), ("best", "first")):
        answer = await gateway.post(path, json=body | {"stream": stream}, headers={"x-swarm-policy": policy})
        assert answer.status_code == 200 and "word" in answer.text
        told = answer.headers["x-swarm-left-out"].split("; ")
        assert [note.partition(":")[0] for note in told] == left_out


async def test_the_engines_refusal_tells_too_and_what_is_whole_does_not(gateway: Http, swarm: Swarm) -> None:
    body = {"model": "tiny", "max_tokens": 9, "messages": [HI], "unheard": 1}
    swarm.answer = lambda *_: error(400, "too long")
    refused = await gateway.post("/v1/messages", json=body)
    assert (refused.status_code, refused.headers["x-swarm-left-out"]) == (400, "unheard: unknown field")
    swarm.answer = saying("x")
    del body["unheard"]
    assert "x-swarm-left-out" not in (await gateway.post("/v1/messages", json=body)).headers


async def test_the_logs_tell_each_kind_once_and_each_request(
    open_gateway: OpenGateway, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "requests.jsonl"
    turns: list[dict[str, Any]] = [HI]
    with caplog.at_level(logging.WARNING, "gateway.runtime"):
        async with open_gateway(request_log={"path": path}) as http:
            for _ in range(3):
                turns = [*turns, {**HI, "unheard": 1}]
                assert (await http.post("/v1/messages", json={"max_tokens": 9, "messages": turns})).is_success
    assert [record.getMessage() for record in caplog.records if "left out" in record.getMessage()] == [
        "a field was left out of a request (logged once for its kind): messages.1.unheard: unknown field"
    ]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["left_out"] for line in lines] == [
        ["messages.1.unheard: unknown field"],
        *[["messages.*.unheard: unknown field"]] * 2,
    ]
