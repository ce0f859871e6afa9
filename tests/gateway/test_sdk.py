"""The OpenAI SDK, unmodified, against the gateway: sync and async, plain and streaming, tools, errors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse, Response

from tests import sdks
from tests.standins.swarm import Swarm, completion, error

pytestmark = pytest.mark.anyio

ASK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
async def client(gateway: httpx.AsyncClient) -> AsyncIterator[sdks.openai.AsyncOpenAI]:
    async with sdks.openai.AsyncOpenAI(base_url=f"{gateway.base_url}/v1", api_key="any", max_retries=0) as sdk:
        yield sdk


async def test_raw_response_carries_the_swarm_headers(client: sdks.openai.AsyncOpenAI) -> None:
    raw = await client.chat.completions.with_raw_response.create(**ASK)
    assert raw.headers["x-swarm-policy-version"] == "7"
    assert raw.request_id == raw.headers["x-request-id"]


async def test_stream(client: sdks.openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "word word word word"
    assert chunks[-1].usage is not None and chunks[-1].usage.prompt_tokens == 5
    assert chunks[-2].model_extra == {"swarm": chunks[-2].model_extra["swarm"]}
    assert chunks[-2].model_extra["swarm"]["trained"] is True


async def test_stream_helper_assembles_tool_calls(swarm: Swarm, client: sdks.openai.AsyncOpenAI) -> None:
    calls = [
        {"id": f"c{k}", "type": "function", "function": {"name": "look_up", "arguments": f'{{"city": "Rome {k}"}}'}}
        for k in range(2)
    ]

    async def with_tools(body: dict[str, Any], number: int) -> Response:
        return JSONResponse(completion(None, finish_reason="tool_calls", tool_calls=calls))

    swarm.answer = with_tools
    async with client.chat.completions.stream(**ASK) as stream:
        final = await stream.get_final_completion()
    message = final.choices[0].message
    assert [call.function.arguments for call in message.tool_calls or []] == [
        '{"city": "Rome 0"}',
        '{"city": "Rome 1"}',
    ]
    assert final.choices[0].finish_reason == "tool_calls"


async def test_errors_are_the_sdks_own(swarm: Swarm, client: sdks.openai.AsyncOpenAI) -> None:
    with pytest.raises(sdks.openai.NotFoundError) as missing:
        await client.chat.completions.create(**{**ASK, "model": "other"})
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(sdks.openai.BadRequestError):
        await client.chat.completions.create(**{**ASK, "messages": []})

    async def refuses(body: dict[str, Any], number: int) -> Response:
        return error(400, "too long")

    swarm.answer = refuses
    with pytest.raises(sdks.openai.BadRequestError, match="too long"):
        await client.chat.completions.create(**ASK)


async def test_a_failed_fan_out_is_not_retried_by_the_sdk(swarm: Swarm, gateway: httpx.AsyncClient) -> None:
    async def fails(body: dict[str, Any], number: int) -> Response:
        return error(500, "boom")

    swarm.answer = fails
    async with sdks.openai.AsyncOpenAI(base_url=f"{gateway.base_url}/v1", api_key="any", max_retries=3) as sdk:
        with pytest.raises(sdks.openai.APIStatusError):
            await sdk.chat.completions.create(**ASK)
    assert len(swarm.claims) == 1
