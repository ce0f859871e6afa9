"""The episode endpoint under the real OpenAI SDK, as an agent uses it."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import openai
import pytest

from tests.standins.vllm import (
    ENGINE_MODEL,
    PROMPT,
    completion_chunk,
    role_chunk,
    status,
    streamed,
    token_chunk,
    usage_chunk,
)
from tests.swarm.server.conftest import Claimed, Rig

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def episode(rig: Rig) -> Claimed:
    return await rig.claim()


@pytest.fixture
async def sdk(rig: Rig, episode: Claimed) -> AsyncGenerator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=episode.base_url, api_key=episode.key, max_retries=2) as client:
        yield client


async def test_plain(sdk: openai.AsyncOpenAI, episode: Claimed) -> None:
    answer = await sdk.chat.completions.create(model="tiny", messages=MESSAGES)
    assert answer.choices[0].message.content == "t1 t2"
    assert answer.usage is not None and answer.usage.completion_tokens == 2
    assert len(episode.calls) == 1
    assert [model.id async for model in sdk.models.list()] == ["tiny"]


async def test_a_stream_over_a_weight_sync(sdk: openai.AsyncOpenAI, episode: Claimed) -> None:
    episode.rig.vllm.script.extend(
        [
            streamed(role_chunk(), token_chunk([5]), token_chunk([], "abort")),
            streamed(completion_chunk([6], "stop", [*PROMPT, 5]), usage_chunk(1, 4)),
        ]
    )
    stream = await sdk.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "t5 t6 "
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 2
    assert [call.response_ids for call in episode.calls] == [[5, 6]]


async def test_an_episode_serves_its_policy_by_any_name(sdk: openai.AsyncOpenAI, episode: Claimed) -> None:
    answer = await sdk.chat.completions.create(model="placeholder", messages=MESSAGES)
    assert answer.model == "tiny"
    assert episode.rig.vllm.requests[-1][1]["model"] == ENGINE_MODEL


async def test_errors_have_their_sdk_class(sdk: openai.AsyncOpenAI, episode: Claimed) -> None:
    with pytest.raises(openai.AuthenticationError):
        await sdk.with_options(api_key="wrong").chat.completions.create(model="tiny", messages=MESSAGES)
    payload = {"error": {"message": "context too long", "type": "BadRequestError", "param": None, "code": 400}}
    episode.rig.vllm.script.append(status(400, payload))
    with pytest.raises(openai.BadRequestError, match="context too long"):
        await sdk.chat.completions.create(model="tiny", messages=MESSAGES)
    assert len(episode.rig.vllm.requests) == 1


async def test_a_stream_that_cannot_be_continued_raises(sdk: openai.AsyncOpenAI, episode: Claimed) -> None:
    reasoning = token_chunk([5], delta={"reasoning": "hm"})
    episode.rig.vllm.script.append(streamed(role_chunk(), reasoning, token_chunk([], "abort")))
    stream = await sdk.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="cannot be continued"):
        async for _ in stream:
            pass
