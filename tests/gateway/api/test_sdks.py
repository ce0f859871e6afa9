"""The SDKs of OpenAI and Anthropic, unmodified, against the gateway over sockets, in every dialect: sync and async,
plain and streamed, tools and structured output."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from tests import sdks
from tests.gateway.api.conftest import LOOK, calling, saying
from tests.gateway.conftest import OpenGateway
from tests.standins.swarm import Swarm, error

pytestmark = pytest.mark.anyio

BEST = "word word word word"
HI: Any = {"role": "user", "content": "hi"}
FUNCTION: Any = {"type": "function", "name": "look", "parameters": LOOK, "strict": True}
TOOL: Any = {"name": "look", "input_schema": LOOK}


class City(BaseModel):
    city: str


@pytest.fixture
async def sdk(gateway: httpx.AsyncClient) -> AsyncIterator[sdks.openai.AsyncOpenAI]:
    async with sdks.openai.AsyncOpenAI(base_url=f"{gateway.base_url}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture
async def claude(gateway: httpx.AsyncClient) -> AsyncIterator[sdks.anthropic.AsyncAnthropic]:
    async with sdks.anthropic.AsyncAnthropic(base_url=str(gateway.base_url), api_key="any", max_retries=0) as client:
        yield client


# ---------------------------------------------------------------------- Anthropic Messages


async def test_messages(claude: sdks.anthropic.AsyncAnthropic, swarm: Swarm) -> None:
    message = await claude.messages.create(model="tiny", max_tokens=9, messages=[HI], system="Be brief.")
    assert [block.text for block in message.content if block.type == "text"] == [BEST]
    assert (message.stop_reason, message.usage.input_tokens, message.usage.output_tokens) == ("end_turn", 5, 3)
    assert swarm.bodies[-1]["messages"] == [{"role": "system", "content": "Be brief."}, HI]
    assert message._request_id


async def test_messages_streamed(claude: sdks.anthropic.AsyncAnthropic, swarm: Swarm) -> None:
    swarm.answer = saying("It is sunny.", reasoning="hm hm")
    async with claude.messages.stream(model="tiny", max_tokens=9, messages=[HI]) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    plain = await claude.messages.create(model="tiny", max_tokens=9, messages=[HI])
    assert text == "It is sunny."
    assert [block.to_dict() for block in final.content] == [block.to_dict() for block in plain.content]
    assert [block.type for block in final.content] == ["thinking", "text"]
    assert (final.stop_reason, final.usage.output_tokens) == (plain.stop_reason, plain.usage.output_tokens)


@pytest.mark.parametrize("streamed", [False, True])
async def test_messages_use_tools(claude: sdks.anthropic.AsyncAnthropic, swarm: Swarm, streamed: bool) -> None:
    swarm.answer = calling("Rome", "Oslo")
    ask: Any = {"model": "tiny", "max_tokens": 9, "tools": [TOOL], "messages": [HI]}
    if streamed:
        async with claude.messages.stream(**ask) as stream:
            message = await stream.get_final_message()
    else:
        message = await claude.messages.create(**ask)
    uses = [block for block in message.content if block.type == "tool_use"]
    assert [(use.name, use.input) for use in uses] == [("look", {"city": "Rome"}), ("look", {"city": "Oslo"})]
    assert message.stop_reason == "tool_use"
    results: Any = [{"type": "tool_result", "tool_use_id": use.id, "content": "sunny"} for use in uses]
    back: Any = {"role": "assistant", "content": message.content}
    await claude.messages.create(**ask | {"messages": [HI, back, {"role": "user", "content": results}]})
    said = swarm.bodies[-1]["messages"]
    assert [turn["role"] for turn in said] == ["user", "assistant", "tool", "tool"]
    assert said[1]["reasoning"] == "hm"


async def test_messages_sync(gateway: httpx.AsyncClient) -> None:
    def ask() -> tuple[str, str]:
        with sdks.anthropic.Anthropic(base_url=str(gateway.base_url), api_key="any", max_retries=0) as client:
            plain = client.messages.create(model="tiny", max_tokens=9, messages=[HI])
            with client.messages.stream(model="tiny", max_tokens=9, messages=[HI]) as stream:
                text = "".join(stream.text_stream)
            return "".join(block.text for block in plain.content if block.type == "text"), text

    assert await asyncio.to_thread(ask) == (BEST, BEST)


async def test_messages_errors_have_their_sdk_class(claude: sdks.anthropic.AsyncAnthropic, swarm: Swarm) -> None:
    with pytest.raises(sdks.anthropic.NotFoundError):
        await claude.messages.create(model="other", max_tokens=9, messages=[HI])
    with pytest.raises(sdks.anthropic.BadRequestError) as refused:
        await claude.messages.create(model="tiny", max_tokens=9, messages=[HI], container="c")
    body: Any = refused.value.body
    assert (body["type"], body["error"]["type"], body["error"]["param"]) == (
        "error",
        "invalid_request_error",
        "container",
    )
    assert refused.value.response.headers["x-should-retry"] == "false"

    async def refuses(asked: dict[str, Any], number: int) -> Any:
        return error(400, "too long")

    swarm.answer = refuses
    with pytest.raises(sdks.anthropic.BadRequestError, match="too long"):
        await claude.messages.create(model="tiny", max_tokens=9, messages=[HI])


async def test_a_wrong_key_is_anthropics_error_too(open_gateway: OpenGateway) -> None:
    async with (
        open_gateway(api_keys=["right"]) as http,
        sdks.anthropic.AsyncAnthropic(base_url=str(http.base_url), api_key="wrong", max_retries=0) as claude,
    ):
        with pytest.raises(sdks.anthropic.AuthenticationError):
            await claude.messages.create(model="tiny", max_tokens=9, messages=[HI])


# ---------------------------------------------------------------------- OpenAI Responses


async def test_responses(sdk: sdks.openai.AsyncOpenAI) -> None:
    response = await sdk.responses.create(model="tiny", input="hi", instructions="Be brief.")
    assert (response.output_text, response.status) == (BEST, "completed")
    assert response.usage is not None and response.usage.total_tokens == 8


async def test_responses_streamed(sdk: sdks.openai.AsyncOpenAI, swarm: Swarm) -> None:
    swarm.answer = saying("It is sunny.", reasoning="hm hm")
    stream = await sdk.responses.create(model="tiny", input="hi", stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == "It is sunny."
    last = events[-1]
    assert last.type == "response.completed" and last.response.output_text == text
    plain = await sdk.responses.create(model="tiny", input="hi")
    assert [item.type for item in last.response.output] == [item.type for item in plain.output]


@pytest.mark.parametrize("streamed", [False, True])
async def test_responses_use_tools_and_go_on_from_what_was_kept(
    sdk: sdks.openai.AsyncOpenAI, swarm: Swarm, streamed: bool
) -> None:
    swarm.answer = calling("Rome")
    ask: Any = {"model": "tiny", "input": "hi", "tools": [FUNCTION]}
    if streamed:
        async with sdk.responses.stream(**ask) as stream:
            response = await stream.get_final_response()
    else:
        response = await sdk.responses.create(**ask)
    (call,) = [item for item in response.output if item.type == "function_call"]
    assert json.loads(call.arguments) == {"city": "Rome"}
    swarm.answer = saying("sunny")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "20 degrees"}
    second = await sdk.responses.create(model="tiny", previous_response_id=response.id, input=[result])
    assert (second.output_text, second.previous_response_id) == ("sunny", response.id)
    said = swarm.bodies[-1]["messages"]
    assert [turn["role"] for turn in said] == ["user", "assistant", "tool"]
    assert (said[0]["content"], said[2]["content"]) == ("hi", "20 degrees")
    third = await sdk.responses.create(model="tiny", previous_response_id=second.id, input="and now?")
    assert [turn["role"] for turn in swarm.bodies[-1]["messages"]] == ["user", "assistant", "tool", "assistant", "user"]
    assert third.previous_response_id == second.id


async def test_responses_are_kept_given_back_and_forgotten(sdk: sdks.openai.AsyncOpenAI) -> None:
    kept = await sdk.responses.create(model="tiny", input="hi")
    assert (await sdk.responses.retrieve(kept.id)).output_text == BEST
    await sdk.responses.delete(kept.id)
    with pytest.raises(sdks.openai.NotFoundError):
        await sdk.responses.retrieve(kept.id)
    with pytest.raises(sdks.openai.BadRequestError) as refused:
        await sdk.responses.create(model="tiny", input="hi", previous_response_id=kept.id)
    assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")
    unkept = await sdk.responses.create(model="tiny", input="hi", store=False)
    with pytest.raises(sdks.openai.NotFoundError):
        await sdk.responses.retrieve(unkept.id)


async def test_responses_structured(sdk: sdks.openai.AsyncOpenAI, swarm: Swarm) -> None:
    swarm.answer = saying('{"city": "Rome"}')
    response = await sdk.responses.parse(model="tiny", input="hi", text_format=City)
    assert response.output_parsed == City(city="Rome")
    assert swarm.bodies[-1]["response_format"]["type"] == "json_schema"


async def test_responses_sync(gateway: httpx.AsyncClient) -> None:
    def ask() -> tuple[str, str]:
        with sdks.openai.OpenAI(base_url=f"{gateway.base_url}/v1", api_key="any", max_retries=0) as client:
            plain = client.responses.create(model="tiny", input="hi").output_text
            with client.responses.stream(model="tiny", input="hi") as stream:
                return plain, stream.get_final_response().output_text

    assert await asyncio.to_thread(ask) == (BEST, BEST)


# ---------------------------------------------------------------------- Chat and Completions


async def test_chat_structured_and_tools(sdk: sdks.openai.AsyncOpenAI, swarm: Swarm) -> None:
    swarm.answer = saying('{"city": "Rome"}')
    parsed = await sdk.chat.completions.parse(model="tiny", messages=[HI], response_format=City)
    assert parsed.choices[0].message.parsed == City(city="Rome")
    swarm.answer = calling("Rome", "Oslo")
    tools: Any = [{"type": "function", "function": {"name": "look", "parameters": LOOK}}]
    async with sdk.chat.completions.stream(model="tiny", messages=[HI], tools=tools) as stream:
        streamed = await stream.get_final_completion()
    plain = await sdk.chat.completions.create(model="tiny", messages=[HI], tools=tools)
    for answer in (streamed, plain):
        calls = answer.choices[0].message.tool_calls or []
        assert [call.function.arguments for call in calls if call.type == "function"] == [
            '{"city": "Rome"}',
            '{"city": "Oslo"}',
        ]


async def test_completions(sdk: sdks.openai.AsyncOpenAI, swarm: Swarm) -> None:
    answer = await sdk.completions.create(model="tiny", prompt="Once", echo=True, n=2)
    assert [choice.text for choice in answer.choices] == [f"Once{BEST}", "Onceword word word"]
    assert (answer.object, answer.id[:5]) == ("text_completion", "cmpl-")
    assert swarm.bodies[-1]["prompt"] == "Once" and "messages" not in swarm.bodies[-1]
    stream = await sdk.completions.create(model="tiny", prompt="Once", stream=True)
    assert "".join([choice.text async for chunk in stream for choice in chunk.choices]) == BEST


@pytest.mark.parametrize("streamed", [False, True])
async def test_each_prompt_of_a_list_is_a_group_of_its_own(
    sdk: sdks.openai.AsyncOpenAI, swarm: Swarm, streamed: bool
) -> None:
    ask: Any = {"model": "tiny", "prompt": ["a", "b", "c"], "n": 2, "echo": True}
    texts: dict[int, str] = {}
    if streamed:
        stream = await sdk.completions.create(**ask, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        for choice in [choice for chunk in chunks for choice in chunk.choices]:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
        usage = chunks[-1].usage
        assert len({chunk.id for chunk in chunks}) == 1
    else:
        answer = await sdk.completions.create(**ask)
        texts = {choice.index: choice.text for choice in answer.choices}
        usage = answer.usage
    assert sorted(texts) == list(range(6))
    assert [texts[index][0] for index in range(6)] == ["a", "a", "b", "b", "c", "c"]
    assert usage is not None and usage.prompt_tokens == 15
    await swarm.until(lambda: len(swarm.ends) == 3)


async def test_completions_sync(gateway: httpx.AsyncClient) -> None:
    def ask() -> str:
        with sdks.openai.OpenAI(base_url=f"{gateway.base_url}/v1", api_key="any", max_retries=0) as client:
            return client.completions.create(model="tiny", prompt="Once").choices[0].text

    assert await asyncio.to_thread(ask) == BEST


async def test_one_prompt_that_fails_fails_the_list(sdk: sdks.openai.AsyncOpenAI, swarm: Swarm) -> None:
    async def refuses(asked: dict[str, Any], number: int) -> Any:
        return error(400, "too long") if asked["prompt"] == "b" else await saying("x")(asked, number)

    swarm.answer = refuses
    with pytest.raises(sdks.openai.BadRequestError, match="too long"):
        await sdk.completions.create(model="tiny", prompt=["a", "b"])
    await swarm.until(lambda: not swarm.open_episodes)


async def test_a_list_of_prompts_under_one_idempotency_key_trains_once(
    sdk: sdks.openai.AsyncOpenAI, swarm: Swarm
) -> None:
    ask: Any = {"model": "tiny", "prompt": ["a", "b"], "echo": True, "extra_headers": {"idempotency-key": "k"}}
    first, again = await sdk.completions.create(**ask), await sdk.completions.create(**ask)
    for answer in (first, again):
        assert [choice.text for choice in answer.choices] == [f"a{BEST}", f"b{BEST}"]
    assert len(swarm.claims) == 2
    with pytest.raises(sdks.openai.ConflictError, match="idempotency-key"):
        await sdk.completions.create(**ask | {"prompt": ["a", "c"]})
    assert len(swarm.open_episodes) == 0


async def test_an_idempotency_key_names_one_request(sdk: sdks.openai.AsyncOpenAI, swarm: Swarm) -> None:
    ask: Any = {"model": "tiny", "messages": [HI], "extra_headers": {"idempotency-key": "k"}}
    first, again = await asyncio.gather(*(sdk.chat.completions.create(**ask) for _ in range(2)))
    assert (first.id, len(swarm.claims)) == (again.id, 1)
    with pytest.raises(sdks.openai.ConflictError, match="idempotency-key"):
        await sdk.chat.completions.create(**ask | {"temperature": 0.5})
