"""Digests: what counts as the same conversation, and what does not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.dialects.conversation import as_object, carried, written
from adapters.dialects.dialect import text_of
from gateway.sessions.memory import answered, digests_of, size_of
from tests.gateway.sessions.talk import assistant, user

CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": [2]}'}}


def call(arguments: str, call_id: str = "other") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "add", "arguments": arguments}}


@pytest.mark.parametrize(
    "sent_back",
    [
        assistant("Hello."),
        assistant("Hello.\n"),
        assistant([{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo."}]),  # type: ignore[arg-type]
        assistant("Hello.", tool_calls=[], refusal=None, reasoning_content="short", annotations=[]),
    ],
)
def test_an_answer_is_known_in_whatever_form_it_comes_back(sent_back: dict[str, Any]) -> None:
    asked = digests_of([user("hi")])
    known, _, _ = answered(asked, {"content": "Hello.", "role": "assistant", "refusal": None})
    later = digests_of([{"role": "system", "content": "It is noon."}, user("hi"), sent_back, user("and?")])
    assert [digest for digest, _ in later.answers] == [known]


@pytest.mark.parametrize(
    "given", [assistant("Four.", reasoning="2 and 2"), assistant("<think>2 and 2</think>\n\nFour.")]
)
@pytest.mark.parametrize("sent_back", ["Four.", "<think>2 and 2</think>Four.", "<think>\n2 and 2\n</think>\n\nFour."])
def test_an_answer_is_known_with_its_reasoning_before_it_and_without(given: dict[str, Any], sent_back: str) -> None:
    known, _, size = answered(digests_of([user("2+2?")]), given)
    assert size > len(given["content"])
    assert digests_of([user("2+2?"), assistant(sent_back)]).digest == known
    parts: Any = [{"type": "text", "text": text} for text in (sent_back[:9], sent_back[9:])]
    assert digests_of([user("2+2?"), assistant(parts)]).digest == known
    assert digests_of([user("2+2?"), assistant(sent_back.replace("Four", "Five"))]).digest != known
    cut = assistant("<think>2 and 2 are Four.")
    assert digests_of([user("2+2?"), cut]).digest != digests_of([user("2+2?"), assistant("<think>2 and")]).digest


@pytest.mark.parametrize("arguments", ['{"b":[2],"a":1}', '{ "a": 1, "b": [ 2 ] }'])
def test_calls_are_known_by_what_they_say(arguments: str) -> None:
    known, _, _ = answered(digests_of([user("add")]), assistant(None, tool_calls=[CALL]))
    [(sent, _)] = digests_of([user("add"), assistant("", tool_calls=[call(arguments)])]).answers
    assert sent == known


@pytest.mark.parametrize(
    "other",
    [
        assistant("Hello"),
        assistant("Hello.", tool_calls=[CALL]),
        {**assistant("Hello."), "role": "user"},
        assistant([{"type": "text", "text": "Hello."}, {"type": "image_url", "image_url": {"url": "data:x"}}]),  # type: ignore[arg-type]
    ],
)
def test_what_says_something_else_is_not_known(other: dict[str, Any]) -> None:
    known, _, _ = answered(digests_of([user("hi")]), assistant("Hello."))
    assert digests_of([user("hi"), other]).digest != known


def test_broken_arguments_are_compared_as_text() -> None:
    known, _, _ = answered(digests_of([user("add")]), assistant(None, tool_calls=[call("{broken")]))
    assert digests_of([user("add"), assistant(None, tool_calls=[call("{broken ")])]).digest == known
    assert digests_of([user("add"), assistant(None, tool_calls=[call("{other")])]).digest != known


@pytest.mark.parametrize("arguments", ["{broken ", "[1]", '"a"', "null", "", '{"a": NaN}', '{"a": "\\ud83d"}'])
def test_a_call_is_known_though_its_arguments_are_no_object(arguments: str) -> None:
    """They come back in one: vLLM takes no others, nor has Anthropic's format any."""
    known, _, _ = answered(digests_of([user("add")]), assistant(None, tool_calls=[call(arguments)]))
    for back in (carried(arguments), written(as_object(arguments))):
        assert digests_of([user("add"), assistant(None, tool_calls=[call(back)])]).digest == known
    assert digests_of([user("add"), assistant(None, tool_calls=[call('{"a": 1}')])]).digest != known


def test_numbers_beyond_64_bits_have_a_digest() -> None:
    message = user("x") | {"content": [{"type": "odd", "number": 2**70}]}
    assert digests_of([message]).digest != digests_of([user("x")]).digest


def test_text_is_of_parts_or_of_a_string() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image_url"}, {"type": "text", "text": "b"}, "odd"]
    assert (text_of({"content": parts}), text_of({"content": "c"}), text_of({"content": None})) == ("ab", "c", "")


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool"]), st.text(max_size=5)), max_size=8))
def test_each_answer_is_the_digest_of_the_messages_up_to_it(said: list[tuple[str, str]]) -> None:
    messages: list[dict[str, Any]] = [{"role": role, "content": text} for role, text in said]
    whole = digests_of(messages)
    positions = [index for index, (role, _) in enumerate(said) if role == "assistant"]
    assert [digest for digest, _ in whole.answers] == [digests_of(messages[: index + 1]).digest for index in positions]
    assert len(whole.sizes) == len(messages)


def test_sizes_are_bytes_of_json() -> None:
    assert size_of({"a": "é"}) == len('{"a":"é"}'.encode())
