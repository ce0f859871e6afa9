"""What cannot be carried to the model is left out; the answer, the request log and the log say so."""

from __future__ import annotations

import asyncio
import json
import logging
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import JSONResponse

from tests.gateway.api.conftest import saying
from tests.gateway.conftest import Http, OpenGateway, gateway_before
from tests.standins.swarm import Swarm, error, once
from tests.swarm.server import conftest as server

pytestmark = pytest.mark.anyio

overrides = server.overrides
rig = server.rig

RECORDED = Path(__file__).parents[2] / "adapters" / "dialects" / "recorded"
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
        ("/v1/messages", CLAUDE_CODE, ["context_management", "max_tokens"]),
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


@pytest.mark.parametrize("policy", ["best", "first"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/chat/completions", {"messages": [HI], "max_tokens": 101}, "max_tokens"),
        ("/v1/chat/completions", {"messages": [HI], "max_completion_tokens": 101}, "max_completion_tokens"),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 101}, "max_tokens"),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 101}, "max_output_tokens"),
        ("/v1/messages", {"messages": [HI], "max_tokens": 101}, "max_tokens"),
    ],
)
async def test_a_length_that_the_job_cuts_is_told(
    open_gateway: OpenGateway, swarm: Swarm, path: str, body: dict[str, Any], name: str, stream: bool, policy: str
) -> None:
    swarm.job = swarm.job.model_copy(update={"max_response_length": 100})
    headers = {"x-swarm-policy": policy}
    async with open_gateway() as http:
        answer = await http.post(path, json=body | {"stream": stream}, headers=headers)
        whole = await http.post(path, json=body | {"stream": stream, name: 100}, headers=headers)
    assert answer.status_code == whole.status_code == 200
    note = f"{name}: answers end at 100 tokens, raise job.max_response_length for longer ones"
    assert answer.headers["x-swarm-left-out"] == note
    assert "x-swarm-left-out" not in whole.headers


async def test_the_log_tells_the_field_to_raise_once(
    open_gateway: OpenGateway, swarm: Swarm, caplog: pytest.LogCaptureFixture
) -> None:
    swarm.job = swarm.job.model_copy(update={"max_response_length": 100})
    with caplog.at_level(logging.WARNING, "gateway.runtime"):
        async with open_gateway() as http:
            for asked in (200, 300, 400):
                await http.post("/v1/messages", json={"max_tokens": asked, "messages": [HI]})
    [line] = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert "raise job.max_response_length" in line


async def test_a_stream_that_waits_for_its_samples_tells_it_too(open_gateway: OpenGateway, swarm: Swarm) -> None:
    go = asyncio.Event()
    swarm.answer = once(go, saying("x"))
    body = {"messages": [HI], "temperature": 0.2, "stream": True}
    async with (
        open_gateway(keepalive_seconds=1.0) as http,
        http.stream("POST", "/v1/chat/completions", json=body) as answer,
    ):
        # the headers are here before any sample
        assert answer.headers["x-swarm-left-out"].startswith("temperature: ")
        go.set()
        assert "x" in (await answer.aread()).decode()


async def test_a_request_that_joins_another_is_told_the_same(gateway: Http, swarm: Swarm) -> None:
    body = {"messages": [HI], "temperature": 0.2}
    first, second = [
        await gateway.post("/v1/chat/completions", json=body, headers={"idempotency-key": "k"}) for _ in range(2)
    ]
    assert len(swarm.ends) == 1
    assert first.headers["x-swarm-left-out"] == second.headers["x-swarm-left-out"] != ""


SAMPLED: dict[str, Any] = {
    "temperature": 0,
    "top_p": 0.5,
    "top_k": 3,
    "seed": 7,
    "logit_bias": {"5": 1},
    "min_tokens": 2,
}


@pytest.mark.parametrize("sampling", ["trainer", "app"])
async def test_sampling_that_a_trained_answer_does_not_heed_is_told(
    open_gateway: OpenGateway, swarm: Swarm, sampling: str
) -> None:
    swarm.job = swarm.job.model_copy(update={"sampling": sampling})
    body = {"messages": [HI], **SAMPLED, "presence_penalty": 0, "repetition_penalty": 1}
    async with open_gateway() as http:
        answer = await http.post("/v1/chat/completions", json=body)
        message = await http.post("/v1/messages", json={"messages": [HI], "max_tokens": 9, "temperature": 0.2})
    if sampling == "app":
        assert not {"x-swarm-left-out"} & {*answer.headers, *message.headers}
        return
    assert dict(note.split(": ") for note in answer.headers["x-swarm-left-out"].split("; ")) == {
        "temperature": "trained answers are sampled at 1 (job.sampling is trainer)",
        "top_p": "trained answers are sampled at 1 (job.sampling is trainer)",
        "top_k": "trained answers are sampled at -1 (job.sampling is trainer)",
        **dict.fromkeys(
            ("seed", "logit_bias", "min_tokens"), "trained answers are sampled without it (job.sampling is trainer)"
        ),
    }
    assert message.headers["x-swarm-left-out"].startswith("temperature: ")


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


BILLING = "x-anthropic-billing-header: cc_version=2.1.330.{}; cc_entrypoint=sdk-cli;"
DROPPED = "system: the line x-anthropic-billing-header, which would defeat the prefix cache"


def claude_code(name: str, hash_: str) -> dict[str, Any]:
    """A recorded request of Claude Code with another hash of its conversation."""
    recorded = json.loads((RECORDED / f"{name}.json").read_text())["body"]
    recorded["system"][0]["text"] = BILLING.format(hash_)
    return recorded


@pytest.mark.parametrize(
    "name", ["claude_code_first_turn", "claude_code_2_1_330_first_turn", "claude_code_sub_agent", "claude_code_title"]
)
@pytest.mark.parametrize("train", ["true", "false"])
async def test_what_differs_with_each_conversation_is_left_out_of_the_prompts_head(
    rig: server.Rig, tmp_path: Path, name: str, train: str
) -> None:
    headers = {"x-swarm-train": train}
    async with gateway_before(str(rig.client.base_url), tmp_path, model_aliases=["claude-*"]) as http:
        for hash_ in ("839", "e2f"):
            answer = await http.post("/v1/messages", json=claude_code(name, hash_) | {"stream": False}, headers=headers)
            assert answer.status_code == 200, answer.text
            assert DROPPED in answer.headers["x-swarm-left-out"].split("; ")
    one, other = (body["messages"] for _, body in rig.vllm.requests)
    assert one == other and one[0]["content"][0]["text"].startswith("You are")


@pytest.mark.parametrize(
    ("system", "left"),
    [
        (BILLING, None),
        (BILLING + "\nBe kind.", "Be kind."),
        ("Be kind.\n" + BILLING, "Be kind.\n" + BILLING),
        (
            [{"type": "text", "text": BILLING}, {"type": "text", "text": "Be kind."}],
            [{"type": "text", "text": "Be kind."}],
        ),
    ],
)
async def test_only_lines_at_the_head_are_left_out(gateway: Http, swarm: Swarm, system: Any, left: Any) -> None:
    body = {"model": "tiny", "messages": [{"role": "system", "content": system}, HI]}
    answer = await gateway.post("/v1/chat/completions", json=body)
    assert swarm.bodies[0]["messages"] == [*([] if left is None else [{"role": "system", "content": left}]), HI]
    assert answer.headers.get("x-swarm-left-out") == (DROPPED if left != system else None)


@pytest.mark.parametrize(
    "messages", [[{"role": "system", "content": 5}, HI], [{"role": "system"}, HI], ["hi"], "hi", 5]
)
async def test_where_no_line_can_stand_the_engine_finds_the_fault(
    rig: server.Rig, tmp_path: Path, messages: Any
) -> None:
    asked: list[dict[str, Any]] = []

    def refusing(body: dict[str, Any]) -> JSONResponse:
        asked.append(body)
        return JSONResponse({"error": {"message": "no messages", "type": "BadRequestError", "code": 400}}, 400)

    rig.vllm.default = refusing
    async with gateway_before(str(rig.client.base_url), tmp_path) as http:
        refused = await http.post("/tokenize", json={"messages": messages})
        assert (refused.status_code, refused.json()["error"]["message"]) == (400, "no messages")
        assert asked[0]["messages"] == messages
        refused = await http.post("/v1/chat/completions", json={"model": "tiny", "messages": messages})
        assert (refused.status_code, refused.headers["x-should-retry"]) == (400, "false")


async def test_a_route_drops_the_lines_that_it_names(open_gateway: OpenGateway, swarm: Swarm) -> None:
    body = {"model": "tiny", "max_tokens": 9, "system": "Session \u00e9;1: x\n" + BILLING, "messages": [HI]}
    for lines, kept in (([], body["system"]), (["Session .*"], BILLING)):
        async with open_gateway(drop_lines=lines) as http:
            answer = await http.post("/v1/messages", json=body)
        assert swarm.bodies[-1]["messages"][0] == {"role": "system", "content": kept}
        assert ("Session ??1" in answer.headers.get("x-swarm-left-out", "")) == bool(lines)


async def test_lines_that_are_alike_are_named_once(open_gateway: OpenGateway) -> None:
    async with open_gateway() as http:
        body = {"model": "tiny", "max_tokens": 9, "system": (BILLING + "\n") * 99 + "Be kind.", "messages": [HI]}
        answer = await http.post("/v1/messages", json=body)
    assert answer.headers["x-swarm-left-out"] == DROPPED


async def test_the_tokens_that_are_counted_are_those_that_are_sampled_from(rig: server.Rig, tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []

    def counting(body: dict[str, Any]) -> JSONResponse:
        asked.append(body)
        return JSONResponse({"count": 7, "max_model_len": 100, "tokens": []})

    rig.vllm.default = counting
    async with gateway_before(str(rig.client.base_url), tmp_path) as http:
        body = {"model": "tiny", "system": BILLING + "\nBe kind.", "messages": [HI]}
        assert (await http.post("/v1/messages/count_tokens", json=body)).json() == {"input_tokens": 7}
    assert asked[0]["messages"] == [{"role": "system", "content": "Be kind."}, HI]
