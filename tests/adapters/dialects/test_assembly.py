"""A stream put together says what the plain answer said."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.dialects import SampledAnswer
from adapters.dialects.assembly import Assembly
from adapters.dialects.chat_answers import chunks_of
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
