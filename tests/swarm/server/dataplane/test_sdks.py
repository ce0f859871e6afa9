"""The episode endpoint under the SDKs of Anthropic and OpenAI, over a real socket."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import anthropic
import openai
import pytest

from tests.standins.vllm import (
    PROMPT,
    completion_chunk,
    plain,
    role_chunk,
    streamed,
    token_chunk,
    usage_chunk,
)
from tests.swarm.server.conftest import Claimed, Rig

pytestmark = pytest.mark.anyio


HI: Any = {"role": "user", "content": "hi"}


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


LOOK = {"type": "function", "function": {"name": "look", "parameters": SCHEMA, "description": "Look."}}


CALLS = [
    {"id": f"call-{k}", "type": "function", "function": {"name": "look", "arguments": json.dumps({"city": city})}}
    for k, city in enumerate(("Rome", "Oslo"))
]


CALLING = {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": CALLS}


def calling_stream() -> Any:
    """Reasoning and two calls of tools, token by token."""
    deltas: list[dict[str, Any]] = [{"reasoning": "hm"}]
    for index, call in enumerate(CALLS):
        arguments = call["function"]["arguments"]
        deltas.append({"tool_calls": [{**call, "index": index, "function": {"name": "look", "arguments": ""}}]})
        deltas += [
            {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}
            for piece in (arguments[:5], arguments[5:])
        ]
    tokens = [token_chunk([5 + k], delta=delta) for k, delta in enumerate(deltas)]
    return streamed(role_chunk(), *tokens, token_chunk([99], "tool_calls", {}), usage_chunk(len(deltas) + 1))


@pytest.fixture
async def episode(rig: Rig) -> Claimed:
    return await rig.claim()


@pytest.fixture
async def claude(episode: Claimed) -> AsyncGenerator[anthropic.AsyncAnthropic]:
    # this SDK adds /v1 itself
    base_url = episode.base_url.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=base_url, api_key=episode.key, max_retries=0) as client:
        yield client


@pytest.fixture
async def sdk(episode: Claimed) -> AsyncGenerator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=episode.base_url, api_key=episode.key, max_retries=0) as client:
        yield client


def sent(episode: Claimed) -> dict[str, Any]:
    return episode.rig.vllm.requests[-1][1]


@pytest.mark.parametrize("as_stream", [False, True])
async def test_messages_use_tools(claude: anthropic.AsyncAnthropic, episode: Claimed, as_stream: bool) -> None:
    script = episode.rig.vllm.script
    script.append(calling_stream() if as_stream else plain([5, 6], "tool_calls", message=CALLING))
    tools: Any = [{"name": "look", "description": "Look.", "input_schema": SCHEMA}]
    asked: Any = {"model": "tiny", "max_tokens": 20, "tools": tools, "tool_choice": {"type": "auto"}}
    if as_stream:
        async with claude.messages.stream(**asked, messages=[HI]) as stream:
            message = await stream.get_final_message()
    else:
        message = await claude.messages.create(**asked, messages=[HI])
    assert message.stop_reason == "tool_use"
    assert [block.type for block in message.content] == ["thinking", "tool_use", "tool_use"]
    uses = [block for block in message.content if block.type == "tool_use"]
    assert [(use.id, use.name, use.input) for use in uses] == [
        ("call-0", "look", {"city": "Rome"}),
        ("call-1", "look", {"city": "Oslo"}),
    ]
    assert sent(episode)["tools"] == [LOOK]
    results: Any = [{"type": "tool_result", "tool_use_id": use.id, "content": "sunny"} for use in uses]
    turns: Any = [HI, {"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    await claude.messages.create(**asked, messages=turns)
    assert sent(episode)["messages"] == [
        HI,
        CALLING,
        *({"role": "tool", "tool_call_id": call["id"], "content": "sunny"} for call in CALLS),
    ]
    assert len(episode.calls) == 2


async def test_messages_stream_over_a_weight_sync(claude: anthropic.AsyncAnthropic, episode: Claimed) -> None:
    episode.rig.vllm.script.extend(
        [
            streamed(role_chunk(), token_chunk([5]), token_chunk([], "abort")),
            streamed(completion_chunk([6], "stop", [*PROMPT, 5]), usage_chunk(1, 4)),
        ]
    )
    async with claude.messages.stream(model="tiny", max_tokens=20, messages=[HI]) as stream:
        pieces = [text async for text in stream.text_stream]
        message = await stream.get_final_message()
    assert pieces == ["t5 ", "t6 "]
    assert (message.stop_reason, message.usage.input_tokens, message.usage.output_tokens) == ("end_turn", 3, 2)
    assert [call.response_ids for call in episode.calls] == [[5, 6]]


async def test_a_cut_messages_stream_raises(claude: anthropic.AsyncAnthropic, episode: Claimed) -> None:
    reasoning = token_chunk([5], delta={"reasoning": "hm"})
    episode.rig.vllm.script.append(streamed(role_chunk(), reasoning, token_chunk([], "abort")))
    with pytest.raises(anthropic.APIError, match="cannot be continued"):
        async with claude.messages.stream(model="tiny", max_tokens=20, messages=[HI]) as stream:
            await stream.until_done()
    assert not episode.calls
    assert episode.rig.controller.pool.open(episode.uuid, episode.key).quarantine_reason


async def test_responses_stream(sdk: openai.AsyncOpenAI, episode: Claimed) -> None:
    episode.rig.vllm.script.append(
        streamed(role_chunk(), token_chunk([5]), token_chunk([6]), token_chunk([7], "length"), usage_chunk(3))
    )
    async with sdk.responses.stream(model="tiny", input="hi") as stream:
        events = [event async for event in stream]
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 3,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    response = events[-1].response
    assert response.output_text == "t5 t6 t7 "
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage.output_tokens == 3
    assert [call.response_ids for call in episode.calls] == [[5, 6, 7]]


@pytest.mark.parametrize("as_stream", [False, True])
async def test_responses_use_tools(sdk: openai.AsyncOpenAI, episode: Claimed, as_stream: bool) -> None:
    script = episode.rig.vllm.script
    script.append(calling_stream() if as_stream else plain([5, 6], "tool_calls", message=CALLING))
    tools: Any = [{"type": "function", "name": "look", "description": "Look.", "parameters": SCHEMA}]
    if as_stream:
        async with sdk.responses.stream(model="tiny", input=[HI], tools=tools) as stream:
            response: Any = await stream.get_final_response()
    else:
        response = await sdk.responses.create(model="tiny", input=[HI], tools=tools)
    assert [item.type for item in response.output] == ["reasoning", "function_call", "function_call"]
    calls = response.output[1:]
    assert [(call.call_id, json.loads(call.arguments)["city"]) for call in calls] == [
        ("call-0", "Rome"),
        ("call-1", "Oslo"),
    ]
    assert sent(episode)["tools"] == [LOOK]
    outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"} for call in calls]
    given = [item.model_dump(exclude={"parsed_arguments"}) for item in response.output]
    await sdk.responses.create(model="tiny", input=[HI, *given, *outputs], tools=tools)
    assert sent(episode)["messages"] == [
        HI,
        CALLING,
        *({"role": "tool", "tool_call_id": call["id"], "content": "sunny"} for call in CALLS),
    ]
    assert len(episode.calls) == 2
