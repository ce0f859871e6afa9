"""Anthropic's SDK, unmodified, through a gateway process and a swarm server process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.clients.stack import MODEL, SECONDS, Stack

if TYPE_CHECKING:
    import anthropic

pytestmark = pytest.mark.slow

HI: Any = {"role": "user", "content": "Hello, Grüße!"}
SAID = "You said: Hello, Grüße!"
WEATHER: Any = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture
def sdk(served: Stack) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with anthropic.Anthropic(base_url=served.url, api_key="any", timeout=SECONDS) as client:
        yield client


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_messages(served: Stack, sdk: anthropic.Anthropic) -> None:
    with served.trains(1):
        message = sdk.messages.create(model=MODEL, max_tokens=100, system="Be kind.", messages=[HI])
    assert (text_of(message), message.stop_reason, message.role) == (SAID, "end_turn", "assistant")
    assert message.usage.input_tokens > 0 and message.usage.output_tokens > 0


def test_streamed(served: Stack, sdk: anthropic.Anthropic) -> None:
    with (
        served.trains(1),
        sdk.messages.stream(model=MODEL, max_tokens=100, messages=[HI]) as stream,
    ):
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(pieces) > 1 and "".join(pieces) == text_of(final) == SAID
    assert final.usage.output_tokens >= len(pieces), "words, of a token or more each"


@pytest.mark.parametrize("streamed", [False, True])
def test_tools(served: Stack, sdk: anthropic.Anthropic, streamed: bool) -> None:
    question: Any = {"role": "user", "content": [{"type": "text", "text": "How is it in Rome and Oslo?"}]}
    ask: Any = {"model": MODEL, "max_tokens": 100, "tools": [WEATHER]}
    with served.trains(2):
        if streamed:
            with sdk.messages.stream(**ask, messages=[question]) as stream:
                message: Any = stream.get_final_message()
        else:
            message = sdk.messages.create(**ask, messages=[question])
        uses = [block for block in message.content if block.type == "tool_use"]
        results: Any = [{"type": "tool_result", "tool_use_id": use.id, "content": "fine"} for use in uses]
        talk: Any = [
            question,
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": results},
        ]
        last = sdk.messages.create(**ask, messages=talk)
    assert [use.input for use in uses] == [{"city": "Rome"}, {"city": "Oslo"}]
    assert message.stop_reason == "tool_use"
    assert text_of(last) == "The tools say: fine, fine."


@pytest.mark.parametrize("streamed", [False, True])
def test_the_sdk_runs_tools_by_itself(served: Stack, sdk: anthropic.Anthropic, streamed: bool) -> None:
    from anthropic import beta_tool

    @beta_tool
    def weather(city: str) -> str:
        """The weather in a city."""
        return f"{city} is sunny"

    ask: Any = {"model": MODEL, "max_tokens": 100, "tools": [weather], "stream": streamed}
    question: Any = {"role": "user", "content": 'CALL weather {"city": "Rome"}'}
    with served.trains(2):
        turns: Any = sdk.beta.messages.tool_runner(**ask, messages=[question])
        called, told = [turn.get_final_message() if streamed else turn for turn in turns]
    assert text_of(told) == "The tools say: Rome is sunny."
    # it sends the results alone, unless it is told that its conversation is not kept
    assert told.usage.input_tokens > called.usage.input_tokens


def test_images(served: Stack, sdk: anthropic.Anthropic) -> None:
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    # answered, but not trained: the trainer is given token ids alone
    with served.trains(0):
        message = sdk.messages.create(model=MODEL, max_tokens=100, messages=[{"role": "user", "content": [image]}])
    assert text_of(message) == "You said: [image_url]"


def test_counting_trains_nothing(served: Stack, sdk: anthropic.Anthropic) -> None:
    with served.trains(0):
        one = sdk.messages.count_tokens(model=MODEL, messages=[HI])
        two = sdk.messages.count_tokens(model=MODEL, messages=[HI], system="Be kind.")
    assert 0 < one.input_tokens < two.input_tokens


def test_async(served: Stack) -> None:
    import anthropic

    async def ask() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=served.url, api_key="any", timeout=SECONDS) as sdk:
            asked: Any = {"model": MODEL, "max_tokens": 100, "messages": [HI]}
            plain, again = await asyncio.gather(sdk.messages.create(**asked), sdk.messages.create(**asked))
            async with sdk.messages.stream(**asked) as stream:
                streamed = "".join([piece async for piece in stream.text_stream])
            return [text_of(plain), text_of(again), streamed]

    with served.trains(3):
        assert asyncio.run(ask()) == [SAID] * 3


def test_errors_are_the_sdks_own_and_train_nothing(served: Stack, sdk: anthropic.Anthropic) -> None:
    import anthropic

    with served.trains(0):
        with pytest.raises(anthropic.NotFoundError):
            sdk.messages.create(model="other", max_tokens=9, messages=[HI])
        with pytest.raises(anthropic.BadRequestError, match="container"):
            sdk.messages.create(model=MODEL, max_tokens=9, messages=[HI], container="c")
