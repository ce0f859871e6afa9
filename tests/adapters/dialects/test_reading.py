"""Answers of other servers, read back from each wire format: what was said is what is read."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.dialects import (
    DIALECTS,
    ChatDialect,
    CompletionsDialect,
    Dialect,
    MessagesDialect,
    SampledAnswer,
    answer_in,
)
from adapters.dialects.sse import DONE, encode_event
from swarm.errors import UpstreamError
from tests.adapters.dialects.answers import chunks, completion, joined, messages

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi"},
}
FINISHES = ("stop", "length")


def meaning(answer: SampledAnswer | dict[str, Any], *, calls: bool) -> Any:
    message = answer.message if isinstance(answer, SampledAnswer) else answer
    _, text, called = joined([{**message, "content": message.get("content") or ""}])
    return text, [one[1:] for one in called] if calls else []


def whole_of(dialect: Dialect, message: dict[str, Any], finish: str) -> bytes:
    return json.dumps(dialect.answer(BODIES.get(dialect.path, {}), completion(message, finish))).encode()


def stream_of(dialect: Dialect, found: list[Any]) -> bytes:
    if isinstance(dialect, ChatDialect):
        return b"".join([*(encode_event(chunk) for chunk in found), DONE])
    events = dialect.stream({**BODIES.get(dialect.path, {}), "stream": True})
    return b"".join([*(events.take(chunk) for chunk in found), events.end()])


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda one: one.path)
@settings(max_examples=60)
@given(data=st.data(), message=messages(), finish=st.sampled_from(FINISHES))
def test_a_whole_answer_and_a_stream_are_read_as_what_they_say(
    dialect: Dialect, data: st.DataObject, message: dict[str, Any], finish: str
) -> None:
    calls = not isinstance(dialect, CompletionsDialect)
    wanted = meaning(message, calls=calls)
    read = answer_in(dialect.path, [whole_of(dialect, message, finish)], streamed=False)
    assert meaning(read, calls=calls) == wanted
    if not (message["tool_calls"] and finish == "stop"):
        # the other formats have a finish of their own for calls
        assert read.finish_reason == finish
    assert (read.usage["prompt_tokens"] or 4, read.usage["completion_tokens"]) in {(4, 2), (1, 2)}
    stream = stream_of(dialect, data.draw(chunks(message, finish)))
    cut = data.draw(st.integers(0, len(stream)))
    streamed = answer_in(dialect.path, [stream[:cut], stream[cut:]], streamed=True)
    assert (meaning(streamed, calls=calls), streamed.finish_reason) == (wanted, read.finish_reason)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda one: one.path)
def test_integers_of_more_than_64_bits_stay_what_they_are(dialect: Dialect) -> None:
    call = {"id": "call-0", "type": "function", "function": {"name": "f", "arguments": f'{{"n": {10**20 + 1}}}'}}
    message = {"role": "assistant", "content": "so", "tool_calls": [call]}
    calls = not isinstance(dialect, CompletionsDialect)
    read = answer_in(dialect.path, [whole_of(dialect, message, "stop")], streamed=False)
    assert meaning(read, calls=calls) == meaning(message, calls=calls)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda one: one.path)
@given(data=st.data(), message=messages())
def test_half_a_stream_is_no_answer(dialect: Dialect, data: st.DataObject, message: dict[str, Any]) -> None:
    events = stream_of(dialect, data.draw(chunks(message, "stop"))).split(b"\n\n")
    ends = (b'"finish_reason":"stop"', b"message_stop", b"response.completed")
    last = next(place for place, event in enumerate(events) if any(end in event.replace(b": ", b":") for end in ends))
    half = b"\n\n".join(events[: data.draw(st.integers(0, last))])
    with pytest.raises(UpstreamError, match=r"cannot be read|ended before"):
        answer_in(dialect.path, [half + b"\n\n" if half else b""], streamed=True)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda one: one.path)
@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"choices": [], "content": 3, "output": 3}', b"\xff"])
def test_what_is_no_answer_is_refused(dialect: Dialect, body: bytes) -> None:
    for streamed in (False, True):
        with pytest.raises(UpstreamError):
            answer_in(dialect.path, [b"data: " + body + b"\n\n" if streamed else body], streamed=streamed)


def test_a_refusal_of_anthropics_and_an_unknown_address() -> None:
    body = {"content": [], "stop_reason": "refusal", "usage": {"output_tokens": 1}}
    read = answer_in(MessagesDialect.path, [json.dumps(body).encode()], streamed=False)
    assert (read.text, read.finish_reason) == ("", "content_filter")
    with pytest.raises(UpstreamError, match="are not read"):
        answer_in("/v1/embeddings", [b"{}"], streamed=False)


def test_all_messages_of_a_response_are_its_answer() -> None:
    """Models say what they are about to do in one, and the result in another, with tools of OpenAI's between them."""

    def message(text: str) -> dict[str, Any]:
        part = {"type": "output_text", "text": text, "annotations": []}
        return {"type": "message", "role": "assistant", "content": [part]}

    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    asked = {"type": "mcp_call", "id": "m", "name": "look", "arguments": "{}", "output": "found"}
    output = [message("I add. "), message("It is "), asked, message("four."), call]
    body = {"status": "completed", "output": output, "usage": {"output_tokens": 3}}
    read = answer_in("/v1/responses", [json.dumps(body).encode()], streamed=False)
    assert (read.text, read.finish_reason) == ("I add. It is four.", "tool_calls")
    assert [one["id"] for one in read.message["tool_calls"]] == ["c"]


@pytest.mark.parametrize("last", ["shell_call", "computer_call", "mcp_approval_request", "image_generation_call"])
def test_a_response_that_ends_with_what_no_chat_has_is_not_read(last: str) -> None:
    """It would be an empty answer, or the words before a call without the call."""
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]}
    for before in ([], [said]):
        output = [{"type": "reasoning", "summary": []}, *before, {"type": last, "id": "i", "status": "completed"}]
        for items in (output, [*output, {"type": "reasoning", "summary": []}]):
            body = json.dumps({"status": "completed", "output": items}).encode()
            with pytest.raises(UpstreamError, match=f"it ends with {last}"):
                answer_in("/v1/responses", [body], streamed=False)


def test_a_turn_of_anthropics_that_pauses_is_no_whole_answer() -> None:
    """The application sends it back, and the model goes on."""
    body = {"content": [{"type": "text", "text": "I search."}], "stop_reason": "pause_turn"}
    with pytest.raises(UpstreamError, match="pause"):
        answer_in(MessagesDialect.path, [json.dumps(body).encode()], streamed=False)


def test_a_text_in_parts_is_what_a_hook_is_given() -> None:
    """Mistral's servers give one, with the thinking before it as a part of another kind."""
    parts = [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, {"type": "text", "text": "fo"}]
    message = {"role": "assistant", "content": [*parts, {"type": "text", "text": "ur"}]}
    whole = json.dumps(completion(message, "stop")).encode()
    assert answer_in(ChatDialect.path, [whole], streamed=False).text == "four"
    deltas: list[dict[str, Any]] = [{"content": parts[:1]}, {"content": parts[1:]}, {"content": "ur"}]
    found = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    assert answer_in(ChatDialect.path, [stream_of(ChatDialect(), [*found, end])], streamed=True).text == "four"


def test_an_entry_in_the_table_of_dialects_is_read_here_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(ChatDialect):
        path = "/v1/plain"

        def read(self, body: dict[str, Any]) -> SampledAnswer:
            return SampledAnswer("any", {"role": "assistant", "content": body["text"]}, "stop")

        def read_stream(self, events: Iterable[dict[str, Any]]) -> SampledAnswer:
            return self.read({"text": "".join(event["text"] for event in events)})

    monkeypatch.setattr("adapters.dialects.DIALECTS", (*DIALECTS, Plain()))
    assert answer_in("/v1/plain", [b'{"text": "hi"}'], streamed=False).text == "hi"
    assert answer_in("/v1/plain", [b'data: {"text": "h"}\n\ndata: {"text": "i"}\n\n'], streamed=True).text == "hi"
