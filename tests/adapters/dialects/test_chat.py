"""Chat Completions: what is parsed, what is refused, and that deltas say what the body says."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.dialects import ChatDialect, SampledAnswer
from adapters.dialects.chat import without_lines
from adapters.dialects.chat_answers import chunks_of, completion_of
from swarm.errors import RequestError, UpstreamError
from tests.adapters.dialects import answers

CHAT = ChatDialect()
HELLO = {"role": "user", "content": "hello"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
FILE = {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBE"}}
USAGE = {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}


def answer(message: dict[str, Any], **more: Any) -> SampledAnswer:
    return SampledAnswer(**{"model": "tiny", "message": message, "finish_reason": "stop", "usage": USAGE, **more})


def joined(chunks: Iterable[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """The message that a client assembles from the deltas of one choice."""
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return answers.whole([choice["delta"] for choice in choices])


def test_parse_keeps_unknown_fields_and_reads_the_known() -> None:
    body = {
        "model": "tiny",
        "messages": [{**HELLO, "odd": 1}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "n": 2,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    request = CHAT.parse(body)
    assert (request.model, request.stream, request.include_usage, request.choices) == ("tiny", True, True, 2)
    assert json.loads(CHAT.sampling_body(request.body, "tiny")) == {
        "model": "tiny",
        "messages": [{**HELLO, "odd": 1}],
        "chat_template_kwargs": {"enable_thinking": False},
    }


def test_parse_fills_in_what_openai_leaves_optional() -> None:
    request = CHAT.parse({"messages": [HELLO], "n": None, "stream": None, "stream_options": None})
    assert (request.model, request.stream, request.include_usage, request.choices) == (None, False, False, 1)


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({"max_tokens": 5.0}, {"max_tokens": 5}),
        ({"max_completion_tokens": " 5 ", "seed": "7"}, {"max_completion_tokens": 5, "seed": 7}),
        ({"temperature": "0.7", "top_p": "1e-1"}, {"temperature": 0.7, "top_p": 0.1}),
        ({"logprobs": "false", "include_reasoning": 0}, {"logprobs": False, "include_reasoning": False}),
        ({"n": "2", "stream": "true"}, {"n": 2, "stream": True}),
        (
            {"stream": True, "stream_options": {"include_usage": "on"}},
            {"stream": True, "stream_options": {"include_usage": True}},
        ),
    ],
)
def test_numbers_and_flags_are_read_as_vllm_reads_them(given: dict[str, Any], read: dict[str, Any]) -> None:
    request, plain = (CHAT.parse({"messages": [HELLO], **fields}) for fields in (given, read))
    assert request == plain
    types = {name: type(value) for name, value in request.body.items()}
    assert types == {name: type(value) for name, value in plain.body.items()}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": ["hello"]}, "messages.0"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"model": 3}, "model"),
        ({"n": 0}, "n"),
        ({"n": "two"}, "n"),
        ({"stream": "perhaps"}, "stream"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": "nan"}, "temperature"),
        ({"max_tokens": {}}, "max_tokens"),
        ({"max_tokens": 5.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"logprobs": "perhaps"}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 2, "logprobs": False}, "top_logprobs"),
        ({"tools": [3]}, "tools.0"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
    ],
)
def test_parse_names_the_wrong_field(change: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        CHAT.parse({"messages": [HELLO], **change})
    assert caught.value.param == param
    assert param in caught.value.message


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"web_search_options": {}}, "web_search_options"),
        ({"store": True}, "store"),
        ({"verbosity": "low"}, "verbosity"),
        ({"tools": [TOOL, {"type": "custom", "custom": {"name": "x"}}]}, "tools.1"),
        ({"messages": [{"role": "user", "content": [FILE]}]}, "messages.0.content.0"),
    ],
)
def test_parse_notes_what_is_left_out(change: dict[str, Any], path: str) -> None:
    (note,) = CHAT.parse({"messages": [HELLO], **change}).left_out
    assert note.startswith(f"{path}: ")


def test_parse_changes_what_vllm_would_refuse_without_need() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a'}}
    request = CHAT.parse(
        {
            "messages": [
                HELLO,
                {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": None},
                {"role": "user", "content": [{"type": "text", "text": "see"}, FILE]},
            ],
            "tools": [],
            "tool_choice": "auto",
            "stream_options": {},
            "function_call": "none",
            "service_tier": "flex",
            "prediction": {"type": "content", "content": "x"},
        }
    )
    fit = {**call, "function": {"name": "f", "arguments": '{"INVALID_JSON": "{\\"a"}'}}
    told = {"type": "text", "text": "[A file 'a.pdf' was here; this model cannot read it.]"}
    assert (
        request.messages
        == request.body["messages"]
        == [
            HELLO,
            {"role": "assistant", "content": None, "refusal": None, "tool_calls": [fit]},
            {"role": "tool", "tool_call_id": "c", "content": ""},
            {"role": "user", "content": [{"type": "text", "text": "see"}, told]},
        ]
    )
    assert not {"tools", "tool_choice"} & request.body.keys()


@given(answers.deltas())
def test_any_stream_given_back_is_what_it_said(deltas: list[dict[str, Any]]) -> None:
    message = {"role": "assistant", "content": None, **joined(answers.streamed(deltas))}
    body = CHAT.parse({"messages": [HELLO, message, HELLO]}).body
    assert answers.joined([body["messages"][1]]) == answers.joined(deltas)
    for call in body["messages"][1].get("tool_calls", []):
        # as vLLM reads them
        assert isinstance(json.loads(call["function"]["arguments"] or "{}") or {}, dict)


@pytest.mark.parametrize(("levels", "fits"), [(100, True), (101, False), (900, False)])
def test_parse_bounds_the_nesting(levels: int, fits: bool) -> None:
    odd: Any = 1
    for level in range(levels - 1):
        odd = {"deeper": odd} if level % 2 else [odd]
    body = {"messages": [HELLO], "odd": odd}
    if fits:
        assert CHAT.parse(body).body == body
    else:
        with pytest.raises(RequestError, match="100 levels"):
            CHAT.parse(body)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "\ud800"])
def test_sampling_body_refuses_what_json_cannot_encode(value: Any) -> None:
    with pytest.raises(RequestError):
        CHAT.sampling_body({"messages": [HELLO], "odd": value}, "tiny")


def test_answer_reads_a_completion_and_keeps_its_extras() -> None:
    body = {
        "id": "x",
        "model": "tiny",
        "choices": [{"index": 0, "message": HELLO, "finish_reason": "stop", "stop_reason": 2, "token_ids": [1]}],
        "usage": USAGE,
        "system_fingerprint": "fp",
    }
    read = SampledAnswer.from_completion(body)
    assert read.choice_extra == {"stop_reason": 2, "token_ids": [1]}
    assert read.body_extra == {"system_fingerprint": "fp"}
    assert read.text == "hello"


@pytest.mark.parametrize(
    "body", [None, {}, {"choices": []}, {"choices": [{"message": {}}]}, {"choices": [{"finish_reason": "stop"}]}]
)
def test_answer_refuses_a_malformed_completion(body: object) -> None:
    with pytest.raises(UpstreamError):
        SampledAnswer.from_completion(body)


def test_completion_has_one_choice_per_answer_and_adds_their_tokens() -> None:
    first = answer({"role": "assistant", "content": "a"}, choice_extra={"stop_reason": None})
    body = completion_of([first, answer({"role": "assistant", "content": "b"})], "chatcmpl-1")
    assert [(c["index"], c["message"]["content"]) for c in body["choices"]] == [(0, "a"), (1, "b")]
    assert body["usage"] == {"prompt_tokens": 4, "completion_tokens": 4, "total_tokens": 8}
    assert (body["id"], body["object"], body["model"]) == ("chatcmpl-1", "chat.completion", "tiny")
    assert body["choices"][0]["stop_reason"] is None


@given(st.text(), st.text())
def test_deltas_join_to_the_message(content: str, reasoning: str) -> None:
    message = {"role": "assistant", "content": content, "reasoning": reasoning, "annotations": [{"a": 1}]}
    got = joined(list(chunks_of([answer(message)], "id", include_usage=False)))
    assert got.pop("reasoning", "") == reasoning
    assert got == {"role": "assistant", "content": content, "annotations": [{"a": 1}]}


def test_a_stream_has_role_words_finish_reason_and_usage_in_order() -> None:
    message = {"role": "assistant", "content": "The capital of France\nis Paris."}
    told = answer(message, finish_reason="length", choice_extra={"stop_reason": 2})
    chunks = list(chunks_of([told], "id", include_usage=True, last={"swarm": {"reward": 0.5}}))
    *pieces, finish, usage = chunks
    assert pieces[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    words = [chunk["choices"][0]["delta"]["content"] for chunk in pieces[1:]]
    assert words == ["The", " capital", " of", " France", "\nis", " Paris."]
    assert (finish["choices"][0]["finish_reason"], finish["choices"][0]["stop_reason"]) == ("length", 2)
    assert finish["swarm"] == {"reward": 0.5}
    assert (usage["choices"], usage["usage"]) == ([], USAGE)
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert {(chunk["id"], chunk["object"]) for chunk in chunks} == {("id", "chat.completion.chunk")}


def test_tool_calls_stream_id_and_name_first_then_arguments() -> None:
    calls = [
        {"id": f"call_{k}", "type": "function", "function": {"name": f"f{k}", "arguments": '{"city": "Paris", "n": 1}'}}
        for k in range(2)
    ]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    chunks = list(chunks_of([answer(message, finish_reason="tool_calls")], "id", include_usage=False))
    (first,) = chunks[1]["choices"][0]["delta"]["tool_calls"]
    assert first == {**calls[0], "index": 0, "function": {"name": "f0", "arguments": ""}}
    assert joined(chunks)["tool_calls"] == calls


@pytest.mark.parametrize("tokens", [["Par", "is"], ["other"]])
def test_logprobs_stream_with_their_tokens(tokens: list[str]) -> None:
    logprobs = {"content": [{"token": token, "logprob": -0.1} for token in tokens]}
    chunks = list(
        chunks_of([answer({"role": "assistant", "content": "Paris"}, logprobs=logprobs)], "id", include_usage=False)
    )
    assert joined(chunks)["content"] == "Paris"
    streamed = [entry for c in chunks for entry in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == logprobs["content"]


def test_several_choices_stream_one_after_the_other() -> None:
    answers = [answer({"role": "assistant", "content": text}) for text in ("one", "two words")]
    chunks = list(chunks_of(answers, "id", include_usage=False, last={"swarm": {}}))
    assert [joined(chunks, index)["content"] for index in (0, 1)] == ["one", "two words"]
    assert [index for index, chunk in enumerate(chunks) if "swarm" in chunk] == [len(chunks) - 1]


@pytest.mark.parametrize("in_parts", [False, True])
def test_many_lines_at_the_head_take_no_long_time(in_parts: bool) -> None:
    """Nobody else is answered meanwhile."""
    head, number = "billing: 1", 300_000
    content: Any = [{"type": "text", "text": head}] * number if in_parts else f"{head}\n" * number
    kept: Any = [{"type": "text", "text": "Be kind."}] if in_parts else "Be kind."
    began = time.thread_time()
    body, dropped = without_lines(
        {"messages": [{"role": "system", "content": content + kept}, HELLO]}, [re.compile("billing:.*")]
    )
    assert time.thread_time() - began < 3
    assert dropped == [head] * number
    assert body["messages"] == [{"role": "system", "content": kept}, HELLO]
