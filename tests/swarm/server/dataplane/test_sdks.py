"""The episode endpoint under the SDKs of Anthropic and OpenAI, over a real socket.

What these SDKs send and read otherwise is shown by :mod:`tests.clients` and :mod:`tests.adapters.dialects`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.standins.vllm import (
    PROMPT,
    completion_chunk,
    role_chunk,
    streamed,
    token_chunk,
    usage_chunk,
)
from tests.swarm.server.conftest import Claimed

if TYPE_CHECKING:
    import anthropic

pytestmark = pytest.mark.anyio


HI: Any = {"role": "user", "content": "hi"}


@pytest.fixture
async def claude(episode: Claimed) -> AsyncGenerator[anthropic.AsyncAnthropic]:
    import anthropic

    # this SDK adds /v1 itself
    base_url = episode.base_url.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=base_url, api_key=episode.key, max_retries=0) as client:
        yield client


@pytest.fixture
async def sdk(episode: Claimed) -> AsyncGenerator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=episode.base_url, api_key=episode.key, max_retries=0) as client:
        yield client


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
    import anthropic

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
