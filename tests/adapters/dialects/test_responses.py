"""OpenAI Responses: what is carried and what is refused, and that the events of a stream say the plain response."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.dialects import ResponsesDialect
from swarm.errors import RequestError, UpstreamError
from tests.adapters.dialects.answers import HEAD, chunks, completion, messages

DIALECT = ResponsesDialect()
HI = {"role": "user", "content": "hi"}
CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}


def parsed(*items: Any, **more: Any) -> dict[str, Any]:
    return DIALECT.parse({"input": list(items or [HI]), **more}).body


def test_settings_are_carried() -> None:
    tool = {
        "type": "function",
        "name": "look",
        "description": "Look.",
        "parameters": {"type": "object"},
        "strict": True,
    }
    schema = {"name": "n", "schema": {"type": "object"}, "strict": True}
    request = {
        "model": "m",
        "input": "hi",
        "instructions": "Be brief.",
        "temperature": 0.5,
        "top_p": 0.9,
        "max_output_tokens": 9,
        "user": "u",
        "tools": [tool],
        "tool_choice": {"type": "function", "name": "look"},
        "parallel_tool_calls": False,
        "text": {"format": {"type": "json_schema", **schema}},
        "reasoning": {"effort": "low"},
        "stream": True,
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "metadata": {"a": "b"},
    }
    function = {"name": "look", "description": "Look.", "parameters": {"type": "object"}, "strict": True}
    assert DIALECT.parse(request).body == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be brief."}, HI],
        "temperature": 0.5,
        "top_p": 0.9,
        "max_completion_tokens": 9,
        "user": "u",
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "look"}},
        "parallel_tool_calls": False,
        "response_format": {"type": "json_schema", "json_schema": schema},
        "reasoning_effort": "low",
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = DIALECT.answer(request, completion({"role": "assistant", "content": "a"}))
    assert {key: answer[key] for key in ("instructions", "tools", "temperature", "metadata")} == {
        key: request[key] for key in ("instructions", "tools", "temperature", "metadata")
    }


def test_items_of_one_turn_are_one_message() -> None:
    reasoning = {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    text = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "a", "annotations": []}],
    }
    output = {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "sunny"}]}
    body = parsed(HI, reasoning, text, CALL, {**CALL, "call_id": "c2"}, output, {**output, "call_id": "c2"}, text)
    calls = [{"id": k, "type": "function", "function": {"name": "look", "arguments": "{}"}} for k in ("c1", "c2")]
    assert body["messages"] == [
        HI,
        {"role": "assistant", "content": "a", "reasoning": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "c2", "content": "sunny"},
        {"role": "assistant", "content": "a"},
    ]


def test_a_developer_speaks_as_the_system() -> None:
    body = parsed({"role": "developer", "content": "b"}, HI, {"role": "developer", "content": "c"}, instructions="a")
    assert body["messages"] == [
        {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        HI,
        {"role": "system", "content": "c"},
    ]


def test_images() -> None:
    parts = [{"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": "data:x", "detail": "low"}]
    assert parsed({"role": "user", "content": parts})["messages"][0]["content"] == [
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": {"url": "data:x", "detail": "low"}},
    ]


@given(messages())
def test_an_answer_given_back_is_the_message_it_was(message: dict[str, Any]) -> None:
    output = DIALECT.answer({}, completion(message))["output"]
    back = parsed(HI, *output, HI)["messages"][1:-1]
    expected = {key: value for key, value in message.items() if value or key == "content"}
    expected["content"] = expected["content"] or None
    assert back == ([expected] if output else [])


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [3]}, "input.0"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input.0.encrypted_content"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input.0.content.0.type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "input.0.content.0.file_id",
        ),
        ({"input": [{**CALL, "arguments": {}}]}, "input.0.arguments"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"max_tool_calls": 3}, "max_tool_calls"),
        ({"conversation": "c"}, "conversation"),
        ({"max_output_tokens": "9"}, "max_output_tokens"),
    ],
)
def test_what_cannot_be_carried_is_named(change: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        DIALECT.parse({"input": "hi", **change})
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param in DIALECT.error(caught.value)["error"]["message"]


@pytest.mark.parametrize(
    ("finish", "status", "why"),
    [
        ("stop", "completed", None),
        ("tool_calls", "completed", None),
        ("length", "incomplete", {"reason": "max_output_tokens"}),
        ("content_filter", "incomplete", {"reason": "content_filter"}),
    ],
)
def test_statuses_and_usage(finish: str, status: str, why: Any) -> None:
    response = DIALECT.answer({}, completion({"role": "assistant", "content": "a"}, finish))
    assert (response["status"], response["incomplete_details"]) == (status, why)
    assert response["output"][-1]["status"] == status
    assert (response["id"], response["model"], response["created_at"]) == ("resp_7", "tiny", 5)
    assert response["usage"]["input_tokens_details"] == {"cached_tokens": 3}
    assert [response["usage"][key] for key in ("input_tokens", "output_tokens", "total_tokens")] == [4, 2, 6]


def assembled(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that a client puts together from the deltas alone; asserts that what is "done" says the same."""
    items: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            items.append({**event["item"]})
        elif kind == "content_part.added":
            items[-1]["content"] = [{**event["part"]}]
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            items[-1]["content"][event["content_index"]]["text"] += event["delta"]
        elif kind == "function_call_arguments.delta":
            items[-1]["arguments"] += event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert event["text"] == items[-1]["content"][0]["text"]
        elif kind == "function_call_arguments.done":
            assert (event["arguments"], event["name"]) == (items[-1]["arguments"], items[-1]["name"])
        elif kind == "content_part.done":
            assert event["part"] == items[-1]["content"][0]
        else:
            assert kind == "output_item.done"
            items[-1]["status"] = event["item"]["status"]
            assert items[-1] == event["item"]
        assert event.get("item_id", items[-1]["id"]) == items[-1]["id"]
        assert event["output_index"] == len(items) - 1
    return items


@given(st.data(), messages(), st.sampled_from(["stop", "length", "tool_calls"]))
def test_any_stream_says_the_plain_response(data: st.DataObject, message: dict[str, Any], finish: str) -> None:
    request = {"input": "hi", "temperature": 0.5}
    stream = DIALECT.events(request)
    events = [event for chunk in data.draw(chunks(message, finish)) for event in stream.take(chunk)]
    created, in_progress, *middle = events
    (last,) = stream.end()
    plain = DIALECT.answer(request, completion(message, finish))
    assert (created["type"], in_progress["type"]) == ("response.created", "response.in_progress")
    assert created["response"]["status"] == "in_progress" and created["response"]["output"] == []
    assert assembled(middle) == plain["output"]
    assert (last["type"], last["response"]) == (f"response.{plain['status']}", plain)
    assert [event["sequence_number"] for event in [*events, last]] == list(range(len(events) + 1))


def test_a_stream_that_fails_says_so() -> None:
    stream = DIALECT.events({})
    stream.take({**HEAD, "choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]})
    with pytest.raises(UpstreamError, match="no end"):
        stream.end()
    (event,) = stream.fail(UpstreamError("cut"))
    assert (event["type"], event["response"]["error"]["message"]) == ("response.failed", "cut")
    assert event["response"]["status"] == "failed"
    assert event["response"]["output"][0]["status"] == "incomplete"
