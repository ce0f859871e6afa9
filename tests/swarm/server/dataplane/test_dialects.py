"""The episode endpoint in other dialects: the SDKs of Anthropic and OpenAI over a real socket, and raw calls."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from swarm.server.engine.controller import Controller
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
async def test_a_cut_messages_stream_raises(claude: anthropic.AsyncAnthropic, episode: Claimed) -> None:
    reasoning = token_chunk([5], delta={"reasoning": "hm"})
    episode.rig.vllm.script.append(streamed(role_chunk(), reasoning, token_chunk([], "abort")))
    with pytest.raises(anthropic.APIError, match="cannot be continued"):
        async with claude.messages.stream(model="tiny", max_tokens=20, messages=[HI]) as stream:
            await stream.until_done()
    assert not episode.calls
    assert episode.rig.controller.pool.open(episode.uuid, episode.key).quarantine_reason


@pytest.mark.slow
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


@pytest.mark.slow
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


ASKS: dict[str, dict[str, Any]] = {
    "messages": {"messages": [HI], "max_tokens": 20},
    "responses": {"input": "hi"},
}
ENDS = {"messages": "message_delta", "responses": "response.completed"}


def request(episode: Claimed, path: str, **more: Any) -> httpx.Request:
    headers = {"x-api-key": episode.key}
    return episode.rig.client.build_request(
        "POST", f"{episode.base_url}/{path}", json=ASKS[path] | more, headers=headers
    )


@pytest.mark.parametrize("path", ASKS)
async def test_the_end_is_told_once_it_is_on_disk(
    rig: Rig, episode: Claimed, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.vllm.script.append(streamed(role_chunk(), token_chunk([5]), token_chunk([6], "stop"), usage_chunk(2)))
    on_disk: list[bool] = []
    synced = Controller.synced

    async def watched(controller: Controller) -> None:
        assert ENDS[path] not in told
        await synced(controller)
        on_disk.append(True)

    monkeypatch.setattr(Controller, "synced", watched)
    told = ""
    response = await rig.client.send(request(episode, path, stream=True), stream=True)
    async for text in response.aiter_text():
        told += text
        assert on_disk or ENDS[path] not in told
    await response.aclose()
    assert f"event: {ENDS[path]}\ndata: " in told
    assert [call.response_ids for call in episode.calls] == [[5, 6]]
    assert response.headers["x-swarm-policy-version"] == "0"


@pytest.mark.parametrize("path", ASKS)
async def test_an_episode_that_is_over_takes_no_calls(rig: Rig, episode: Claimed, path: str) -> None:
    assert (await rig.client.send(request(episode, path))).status_code == 200
    await episode.end()
    response = await rig.client.send(request(episode, path))
    chat = await episode.chat()
    assert response.status_code == chat.status_code
    assert response.json()["error"]["message"] == chat.json()["error"]["message"]
    assert response.headers["x-should-retry"] == chat.headers["x-should-retry"]


@pytest.mark.parametrize("path", ASKS)
async def test_an_answer_that_makes_no_sense_is_not_trained(rig: Rig, episode: Claimed, path: str) -> None:
    call = {"type": "function", "function": {"arguments": "{}"}}
    rig.vllm.script.append(plain([5], message={"role": "assistant", "content": None, "tool_calls": [call]}))
    response = await rig.client.send(request(episode, path))
    assert response.status_code == 502
    assert "without an id or a name" in response.json()["error"]["message"]
    assert rig.controller.pool.open(episode.uuid, episode.key).quarantine_reason
