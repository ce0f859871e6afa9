"""openai-python, unmodified, through a gateway process and a swarm server process: what the user sees, and what of it
is in the pool to be trained."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.clients.stack import MODEL, SECONDS, Stack
from tests.standins.models import GIVES_UP

pytestmark = pytest.mark.slow

HI: Any = {"role": "user", "content": "Hello, Grüße!"}
SAID = "You said: Hello, Grüße!"
WEATHER: Any = {
    "name": "weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


class Visit(BaseModel):
    city: str
    days: int
    sights: list[str]


@pytest.fixture
def sdk(served: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.base_url, api_key="any", timeout=SECONDS) as client:
        yield client


def test_chat(served: Stack, sdk: openai.OpenAI) -> None:
    with served.trains(1):
        answer = sdk.chat.completions.create(model=MODEL, messages=[HI])
    assert answer.choices[0].message.content == SAID
    assert (answer.choices[0].finish_reason, answer.model) == ("stop", MODEL)
    assert answer.usage is not None and answer.usage.completion_tokens > 0
    assert [model.id for model in sdk.models.list()] == [MODEL]


@pytest.mark.parametrize(("policy", "rewards"), [("best", (0.0, 1.0)), ("first", (1.0, 1.0))])
def test_chat_streamed(served: Stack, sdk: openai.OpenAI, policy: str, rewards: tuple[float, ...]) -> None:
    with served.trains(1, rewards=rewards):
        stream = sdk.chat.completions.create(
            model=MODEL,
            messages=[HI],
            stream=True,
            stream_options={"include_usage": True},
            extra_headers={"x-swarm-policy": policy},
        )
        chunks = list(stream)
    deltas = [choice.delta.content for chunk in chunks for choice in chunk.choices if choice.delta.content]
    assert len(deltas) > 1
    assert "".join(deltas) == SAID
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens >= len(deltas)


def test_both_answers_of_a_group(served: Stack, sdk: openai.OpenAI) -> None:
    with served.trains(1):
        answer = sdk.chat.completions.create(model=MODEL, messages=[HI], n=2)
    assert [choice.message.content for choice in answer.choices] == [SAID, GIVES_UP]


def test_images_and_instructions(served: Stack, sdk: openai.OpenAI) -> None:
    parts: Any = [
        {"type": "text", "text": "What is this? "},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    ]
    # answered, but not trained: the trainer is given token ids alone
    with served.trains(0):
        answer = sdk.chat.completions.create(
            model=MODEL, messages=[{"role": "system", "content": "Be kind."}, {"role": "user", "content": parts}]
        )
    assert answer.choices[0].message.content == "You said: What is this? [image_url]"


@pytest.mark.parametrize("streamed", [False, True])
def test_tools(served: Stack, sdk: openai.OpenAI, streamed: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": "How is it in Rome and Oslo?"}]
    tools: Any = [{"type": "function", "function": WEATHER | {"strict": True}}]
    with served.trains(2):
        if streamed:
            with sdk.chat.completions.stream(model=MODEL, messages=messages, tools=tools) as stream:
                message = stream.get_final_completion().choices[0].message
        else:
            message = sdk.chat.completions.create(model=MODEL, messages=messages, tools=tools).choices[0].message
        calls: list[Any] = list(message.tool_calls or [])
        messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        messages += [{"role": "tool", "tool_call_id": call.id, "content": f"{call.id} is fine"} for call in calls]
        last = sdk.chat.completions.create(model=MODEL, messages=_without_parsed(messages), tools=tools)
    assert [call.function.arguments for call in calls] == ['{"city": "Rome"}', '{"city": "Oslo"}']
    assert last.choices[0].message.content == "The tools say: call_0 is fine, call_1 is fine."


def _without_parsed(messages: list[Any]) -> list[Any]:
    """The SDK adds what it parsed to the calls of a streamed answer; as a request that is no OpenAI field."""
    for message in messages:
        for call in message.get("tool_calls") or []:
            call["function"].pop("parsed_arguments", None)
    return messages


def test_structured_output(served: Stack, sdk: openai.OpenAI) -> None:
    with served.trains(2):
        plain = sdk.chat.completions.parse(model=MODEL, messages=[HI], response_format=Visit)
        with sdk.chat.completions.stream(model=MODEL, messages=[HI], response_format=Visit) as stream:
            streamed = stream.get_final_completion()
    for answer in (plain, streamed):
        assert answer.choices[0].message.parsed == Visit(city="Rome", days=7, sights=["Rome"])


def test_raw_prompts(served: Stack, sdk: openai.OpenAI) -> None:
    with served.trains(3):
        one = sdk.completions.create(model=MODEL, prompt="Once", max_tokens=50)
        two = sdk.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=50, stream=True)
        texts = {0: "", 1: ""}
        for choice in (choice for chunk in two for choice in chunk.choices):
            texts[choice.index] += choice.text
    assert one.choices[0].text == " goes on after 'Once'"
    assert texts == {0: " goes on after 'a'", 1: " goes on after 'b'"}


def test_responses(served: Stack, sdk: openai.OpenAI) -> None:
    with served.trains(2):
        first = sdk.responses.create(model=MODEL, input="Hello", instructions="Be kind.")
        second = sdk.responses.create(model=MODEL, input="And now?", previous_response_id=first.id)
    assert (first.output_text, second.output_text) == ("You said: Hello", "You said: And now?")
    assert first.usage is not None and second.usage is not None
    # the second prompt holds the first question and its answer
    assert second.usage.input_tokens > first.usage.output_tokens
    assert sdk.responses.retrieve(first.id).output_text == first.output_text
    sdk.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(first.id)


def test_responses_streamed(served: Stack, sdk: openai.OpenAI) -> None:
    with served.trains(2):
        with sdk.responses.stream(model=MODEL, input="Hello") as stream:
            events = list(stream)
            first = stream.get_final_response()
        again = sdk.responses.create(model=MODEL, input="On", previous_response_id=first.id, stream=True)
        last = [event for event in again if event.type == "response.completed"]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 1 and "".join(deltas) == first.output_text == "You said: Hello"
    assert [event.response.output_text for event in last] == ["You said: On"]


@pytest.mark.parametrize("streamed", [False, True])
def test_responses_use_tools(served: Stack, sdk: openai.OpenAI, streamed: bool) -> None:
    ask: Any = {"model": MODEL, "tools": [{"type": "function", "strict": True, **WEATHER}]}
    with served.trains(2):
        if streamed:
            with sdk.responses.stream(**ask, input="How is it in Rome and Oslo?") as stream:
                response: Any = stream.get_final_response()
        else:
            response = sdk.responses.create(**ask, input="How is it in Rome and Oslo?")
        calls = [item for item in response.output if item.type == "function_call"]
        results: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "fine"} for call in calls]
        last = sdk.responses.create(**ask, input=results, previous_response_id=response.id)
    assert [call.arguments for call in calls] == ['{"city": "Rome"}', '{"city": "Oslo"}']
    assert last.output_text == "The tools say: fine, fine."


def test_responses_structured(served: Stack, sdk: openai.OpenAI) -> None:
    with served.trains(1):
        response = sdk.responses.parse(model=MODEL, input="Where to?", text_format=Visit)
    assert response.output_parsed == Visit(city="Rome", days=7, sights=["Rome"])


def test_many_users_at_once(served: Stack) -> None:
    async def ask_all() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=served.base_url, api_key="any", timeout=SECONDS) as sdk:

            async def ask(number: int) -> str | None:
                messages: Any = [{"role": "user", "content": f"I am {number}"}]
                if number % 2:
                    return (
                        (await sdk.chat.completions.create(model=MODEL, messages=messages)).choices[0].message.content
                    )
                stream = await sdk.chat.completions.create(model=MODEL, messages=messages, stream=True)
                return "".join([choice.delta.content or "" async for chunk in stream for choice in chunk.choices])

            return await asyncio.gather(*(ask(number) for number in range(16)))

    with served.trains(16):
        answers = asyncio.run(ask_all())
    assert answers == [f"You said: I am {number}" for number in range(16)]


def test_errors_are_the_sdks_own_and_train_nothing(served: Stack, sdk: openai.OpenAI) -> None:
    with served.trains(0):
        with pytest.raises(openai.NotFoundError):
            sdk.chat.completions.create(model="other", messages=[HI])
        with pytest.raises(openai.BadRequestError) as refused:
            sdk.chat.completions.create(model=MODEL, messages=[HI], modalities=["text", "audio"])
    assert refused.value.param == "modalities"


def test_what_is_not_to_be_trained_is_not(served: Stack, sdk: openai.OpenAI) -> None:
    with served.trains(0):
        answer = sdk.chat.completions.create(model=MODEL, messages=[HI], extra_headers={"x-swarm-train": "false"})
    assert answer.choices[0].message.content == SAID
