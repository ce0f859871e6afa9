"""A stream put together says what the plain answer said."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.dialects import SampledAnswer
from adapters.dialects.chat_answers import Assembly, Unfolding, chunks_of, parts_of
from swarm.errors import UpstreamError

CALL: dict[str, Any] = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "é  b"}'}}
texts = st.none() | st.text(max_size=40)


@given(texts, texts, st.integers(0, 3))
def test_what_was_cut_is_put_together(content: str | None, reasoning: str | None, calls: int) -> None:
    message: dict[str, Any] = {"role": "assistant", "content": content or None}
    if reasoning:
        message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = [CALL | {"id": f"c{number}"} for number in range(calls)]
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    answer = SampledAnswer(
        "m", message, "stop", usage, choice_extra={"stop_reason": 7}, body_extra={"system_fingerprint": "f"}
    )
    assembly = Assembly()
    for chunk in chunks_of([answer], "id", include_usage=True):
        assembly.take(chunk)
    whole = assembly.answer()
    assert (whole.message["content"] or None) == message["content"]
    assert {k: v for k, v in whole.message.items() if k != "content"} == {
        k: v for k, v in message.items() if k != "content"
    }
    assert (whole.finish_reason, whole.usage, whole.choice_extra) == ("stop", usage, {"stop_reason": 7})
    assert whole.body_extra == {"system_fingerprint": "f"}


@pytest.mark.parametrize("index", [{}, {"index": 0}, {"index": None}])
def test_calls_with_one_index_stay_apart(index: dict[str, Any]) -> None:
    """Some servers give all calls index 0, or none; others say id and name of a call with each of its deltas."""
    assembly, unfolding = Assembly(), Unfolding()
    for number in (1, 2):
        for arguments in ('{"a":', f"{number}}}"):
            function = {"name": "look", "arguments": arguments}
            delta = {"tool_calls": [{"id": f"c{number}", "type": "function", "function": function, **index}]}
            chunk = {"id": "i", "choices": [{"index": 0, "delta": {"content": "", **delta}}]}
            assembly.take(chunk)
            unfolding.take(chunk)
    assembly.take({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
    calls = assembly.answer().message["tool_calls"]
    assert [(call["id"], call["function"]["arguments"]) for call in calls] == [("c1", '{"a":1}'), ("c2", '{"a":2}')]
    assert [(part.call_id, part.text) for part in unfolding.parts] == [("c1", '{"a":1}'), ("c2", '{"a":2}')]


def test_a_call_without_an_index_is_no_text() -> None:
    unfolding = Unfolding()
    call = {"index": None, "id": "c1", "function": {"name": "look", "arguments": "{}"}}
    for delta in ({"content": "hm"}, {"tool_calls": [call]}):
        unfolding.take({"id": "i", "choices": [{"index": 0, "delta": delta}]})
    assert [(part.kind, part.text) for part in unfolding.parts] == [("text", "hm"), ("call", "{}")]


@pytest.mark.parametrize(
    "said",
    [{"content": None, "refusal": "No."}, {"content": [{"type": "text", "text": "N"}, {"type": "text", "text": "o."}]}],
)
def test_a_refusal_and_a_text_in_parts_are_texts_in_other_dialects(said: dict[str, Any]) -> None:
    """As upstreams give them."""
    message = {"role": "assistant", **said}
    unfolding = Unfolding()
    unfolding.take({"id": "i", "choices": [{"index": 0, "delta": message}]})
    for parts in (parts_of(message), unfolding.parts):
        assert [(part.kind, part.text) for part in parts] == [("text", "No.")]


@pytest.mark.parametrize("unnamed", [{}, {"id": None}, {"id": ""}])
@pytest.mark.parametrize("index", [{}, {"index": 0}])
def test_calls_without_an_id_get_one_and_stay_apart(unnamed: dict[str, Any], index: dict[str, Any]) -> None:
    """Gemini's and LM Studio's may have an empty one; in other dialects a result names its call."""
    calls = [
        {**unnamed, **index, "type": "function", "function": {"name": "look", "arguments": f"[{k}]"}} for k in range(2)
    ]
    assembly, unfolding = Assembly(), Unfolding()
    for chunk in ({"delta": {"tool_calls": calls}}, {"delta": {}, "finish_reason": "tool_calls"}):
        for reader in (assembly, unfolding):
            reader.take({"id": "i", "choices": [{"index": 0, **chunk}]})
    joined = assembly.answer().message["tool_calls"]
    assert [call["function"] for call in joined] == [call["function"] for call in calls]
    for parts in (parts_of({"role": "assistant", "content": None, "tool_calls": calls}), unfolding.parts):
        assert [(part.name, part.text) for part in parts] == [("look", "[0]"), ("look", "[1]")]
        assert parts[0].call_id and parts[1].call_id and parts[0].call_id != parts[1].call_id


def test_an_empty_finish_reason_is_no_end() -> None:
    """Some servers give one with each chunk (SGLang 0.4, Ollama 0.1)."""
    assembly, unfolding = Assembly(), Unfolding()
    call = {"index": 0, "id": "c1", "function": {"name": "look", "arguments": ""}}
    more = {"index": 0, "function": {"arguments": "{}"}}
    deltas: list[dict[str, Any]] = [{"content": "h"}, {"content": "m"}, {"tool_calls": [call]}, {"tool_calls": [more]}]
    for delta in deltas:
        chunk = {"id": "i", "choices": [{"index": 0, "delta": delta, "finish_reason": ""}]}
        assembly.take(chunk)
        unfolding.take(chunk)
    assert [(part.kind, part.text) for part in unfolding.parts] == [("text", "hm"), ("call", "{}")]
    for stream in (assembly.answer, unfolding.end):
        with pytest.raises(UpstreamError):
            stream()


def test_log_probabilities_are_joined() -> None:
    assembly = Assembly()
    for token in ("a", "b"):
        entry = {"content": [{"token": token, "logprob": -1.0}]}
        assembly.take({"choices": [{"index": 0, "delta": {"content": token}, "logprobs": entry, "token_ids": [1]}]})
    assembly.take({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
    answer = assembly.answer()
    assert answer.logprobs == {"content": [{"token": "a", "logprob": -1.0}, {"token": "b", "logprob": -1.0}]}
    assert (answer.text, answer.choice_extra) == ("ab", {"token_ids": [1, 1]})


def test_an_answer_without_an_end_is_none() -> None:
    assembly = Assembly()
    assembly.take({"choices": [{"index": 0, "delta": {"content": "a"}}]})
    with pytest.raises(UpstreamError, match="ended before"):
        assembly.answer()
