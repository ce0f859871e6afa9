"""Legacy Completions: what is carried and refused; a stream says the plain body, log-probabilities included."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.dialects import CompletionsDialect
from adapters.dialects.chat_answers import chunks_of, completion_of
from adapters.dialects.dialect import SampledAnswer
from adapters.dialects.jsons import decode
from adapters.dialects.sse import SseDecoder
from swarm.errors import RequestError, UpstreamError

DIALECT = CompletionsDialect()
USAGE = {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}


def test_a_prompt_is_carried_as_it_is() -> None:
    call = DIALECT.parse(
        {"model": "m", "prompt": "Once", "n": 2, "logprobs": 3, "stop": ["."], "top_k": 5, "odd": {"a": 1}, "user": "u"}
    )
    assert call.body == {
        "model": "m",
        "prompt": "Once",
        "max_tokens": 16,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 3,
        "stop": ["."],
        "top_k": 5,
        "odd": {"a": 1},
        "user": "u",
    }
    assert (call.model, call.choices, call.stream) == ("m", 2, False)
    assert call.messages == [{"role": "user", "content": "Once"}]


def test_token_ids_are_carried_and_are_no_conversation() -> None:
    call = DIALECT.parse(
        {"prompt": [[1, 2]], "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
    )
    assert call.body == {
        "prompt": [1, 2],
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert (call.messages, call.stream, call.include_usage) == ([], True, True)


def test_what_a_stream_is_to_say_of_its_usage_is_carried() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    call = DIALECT.parse({"prompt": "a", "stream": True, "stream_options": options})
    assert (call.include_usage, call.body["stream_options"]) == (True, options)
    opening = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "usage": {"prompt_tokens": 1}}
    assert DIALECT.stream({}).take(opening) == b"", "it has no text, and is no usage chunk"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"echo": "perhaps"}, "echo"),
        ({"echo": True, "logprobs": 1}, "logprobs"),
        ({"echo": True, "prompt": [1]}, "echo"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "nine"}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"messages": []}, "messages"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_fields_that_cannot_be_carried_are_named(change: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        DIALECT.parse({"prompt": "Once", **change})
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("neutral", "choices"),
    [({"suffix": "", "best_of": 1, "echo": False, "logprobs": None}, 1), ({"n": 3, "best_of": 3}, 3)],
)
def test_values_that_ask_for_nothing_leave_the_request_as_it_is(neutral: dict[str, Any], choices: int) -> None:
    call = DIALECT.parse({"prompt": "Once", **neutral})
    plain = DIALECT.parse({"prompt": "Once", **({"n": choices} if choices > 1 else {})})
    assert (call, call.choices, call.left_out) == (plain, choices, ())


def test_numbers_and_flags_are_read_as_vllm_reads_them() -> None:
    given = {"max_tokens": "9", "temperature": "0.5", "logprobs": 2.0, "seed": "7", "echo": "no"}
    read = {"max_tokens": 9, "temperature": 0.5, "logprobs": 2, "seed": 7}
    given |= {"return_token_ids": "true", "include_stop_str_in_output": "no"}
    read |= {"return_token_ids": True, "include_stop_str_in_output": False}
    call, plain = (DIALECT.parse({"prompt": "Once", **fields}) for fields in (given, read))
    assert call == plain and {type(call.body[name]) for name in ("max_tokens", "seed", "top_logprobs")} == {int}


@st.composite
def answers(draw: st.DrawFn) -> list[SampledAnswer]:
    """One to three answers, each with log-probabilities of its tokens or without."""
    told: list[SampledAnswer] = []
    with_logprobs = draw(st.booleans())
    for _ in range(draw(st.integers(1, 3))):
        tokens = draw(st.lists(st.text(min_size=1, max_size=4), max_size=4))
        entries = [
            {
                "token": token,
                "logprob": -0.25,
                "bytes": list(token.encode()),
                "top_logprobs": [{"token": "x", "logprob": -1.5, "bytes": [120]}],
            }
            for token in tokens
        ]
        told.append(
            SampledAnswer(
                model="tiny",
                message={"role": "assistant", "content": "".join(tokens)},
                finish_reason=draw(st.sampled_from(["stop", "length"])),
                usage=USAGE,
                logprobs={"content": entries} if with_logprobs else None,
                choice_extra={"stop_reason": None},
            )
        )
    return told


@given(answers(), st.booleans(), st.booleans())
def test_any_stream_says_the_plain_body(told: list[SampledAnswer], echo: bool, include_usage: bool) -> None:
    data = {"prompt": "Once ", "echo": "yes" if echo else "no"}
    plain = DIALECT.answer(data, completion_of(told, "chatcmpl-7"))
    stream = DIALECT.stream(data)
    sent = b"".join(stream.take(chunk) for chunk in chunks_of(told, "chatcmpl-7", include_usage=include_usage))
    *events, done = SseDecoder().feed(sent + stream.end())
    assert done == "[DONE]"
    joined: dict[int, dict[str, Any]] = {}
    usage: Any = None
    for event in map(decode, events):
        assert (event["id"], event["object"], event["model"]) == ("cmpl-7", "text_completion", "tiny")
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            whole = joined.setdefault(choice["index"], {"text": "", "logprobs": None})
            whole["text"] += choice.pop("text")
            logprobs = choice.pop("logprobs")
            if logprobs is not None:
                before = whole["logprobs"] or {key: [] for key in logprobs}
                whole["logprobs"] = {key: before[key] + logprobs[key] for key in logprobs}
            whole |= choice
    assert [joined[index] for index in sorted(joined)] == plain["choices"]
    assert usage == (plain["usage"] if include_usage else None)
    assert plain["id"] == "cmpl-7"
    for choice, answer in zip(plain["choices"], told, strict=True):
        assert choice["text"] == ("Once " if echo else "") + answer.text
        if choice["logprobs"] is not None:
            assert "".join(choice["logprobs"]["tokens"]) == answer.text
            assert all(set(best) >= {"x"} for best in choice["logprobs"]["top_logprobs"])


@pytest.mark.parametrize("completion", [{}, {"choices": []}, {"choices": [{"finish_reason": "stop"}]}])
def test_a_malformed_completion_is_refused(completion: dict[str, Any]) -> None:
    with pytest.raises(UpstreamError):
        DIALECT.answer({}, completion)


def test_the_tokens_of_the_prompt_stand_in_each_choice() -> None:
    """As vLLM has them, so that those of several prompts are told apart."""
    message = {"role": "assistant", "content": "so so"}
    answers = [
        SampledAnswer(
            "m", message, "stop", USAGE, choice_extra={"token_ids": [3]}, body_extra={"prompt_token_ids": [1, 2]}
        )
        for _ in range(2)
    ]
    plain = DIALECT.answer({}, completion_of(answers, "chatcmpl-1"))
    assert "prompt_token_ids" not in plain
    assert [choice["prompt_token_ids"] for choice in plain["choices"]] == [[1, 2], [1, 2]]
    stream, decoder = DIALECT.stream({}), SseDecoder()
    chunks = [stream.take(chunk) for chunk in chunks_of(answers, "chatcmpl-1", include_usage=False)]
    events = [decode(event) for event in decoder.feed(b"".join(chunks))]
    assert not any("prompt_token_ids" in event for event in events)
    with_them = [choice for event in events for choice in event["choices"] if "prompt_token_ids" in choice]
    assert [(choice["index"], choice["prompt_token_ids"]) for choice in with_them] == [(0, [1, 2]), (1, [1, 2])]


def test_tokens_whose_text_is_held_back_are_streamed_too() -> None:
    """As by vLLM: half a character, or what may become a stop text, has no text yet."""
    stream, decoder = DIALECT.stream({}), SseDecoder()
    pieces = [("", [5], None), ("\u00e9", [6], None), ("", [7], "stop")]
    for text, token_ids, finish in pieces:
        choice = {"index": 0, "delta": {"content": text}, "token_ids": token_ids, "finish_reason": finish}
        (event,) = decoder.feed(stream.take({"id": "chatcmpl-1", "model": "m", "choices": [choice]}))
        (sent,) = decode(event)["choices"]
        assert (sent["text"], sent["token_ids"], sent["finish_reason"]) == (text, token_ids, finish)
