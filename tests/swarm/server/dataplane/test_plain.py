"""Plain answers: what is read the quick way is what the slow way gives, for whatever vLLM may say."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import TokenTruthError
from swarm.job import TrainJob
from swarm.server.dataplane.plain import PlainAnswer, read
from swarm.server.dataplane.recording import Recorder
from swarm.server.dataplane.requests import prepare
from swarm.tokens import as_lists
from tests.swarm.server.vllm import PROMPT, plain_choice

#: what vLLM 0.28 says beside what the stand-in does
MORE_OF_ANSWER = (
    "service_tier",
    "system_fingerprint",
    "prompt_logprobs",
    "prompt_text",
    "kv_transfer_params",
    "ec_transfer_params",
    "metrics",
)


def answer(*choices: dict[str, Any], **changes: Any) -> dict[str, Any]:
    count = sum(len(choice["token_ids"] or ()) for choice in choices)
    usage = {"prompt_tokens": len(PROMPT), "completion_tokens": count, "total_tokens": len(PROMPT) + count}
    head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m"}
    return {**head, "choices": list(choices), "usage": usage, "prompt_token_ids": PROMPT} | changes


def told(said: Any, *, samples: int = 2, logprobs: bool = False, pieces: bool = False) -> PlainAnswer:
    """What is read of ``said``; the slow way if the caller asks for the log-probabilities."""
    body = {"messages": [{"role": "user", "content": "hi"}], "logprobs": logprobs}
    call = prepare(body, "train", TrainJob(model="m"), "m", samples, pieces=pieces)
    return read(said if isinstance(said, bytes) else json.dumps(said).encode(), call)


def is_quick(said: Any) -> bool:
    return told(said).sampled is not None


def outcomes(one: PlainAnswer) -> list[Any]:
    recorder = Recorder(0, 2)
    recorder.add(one.body, one.sampled)
    return [
        outcome.code if isinstance(outcome, TokenTruthError) else as_lists(outcome) | {"call_id": ""}
        for outcome in recorder.calls(1)
    ]


def without_logprobs(body: dict[str, Any]) -> dict[str, Any]:
    return body | {"choices": [choice | {"logprobs": None} for choice in body["choices"]]}


def test_what_vllm_says_is_read_by_type() -> None:
    full = answer(
        plain_choice([1, 2], index=1), plain_choice([3], routed_experts=None), **dict.fromkeys(MORE_OF_ANSWER)
    )
    assert is_quick(full) and is_quick(answer(plain_choice([])))


VALUES = st.none() | st.booleans() | st.integers() | st.floats(max_value=0) | st.text(max_size=3)
TOKENS = st.lists(st.integers(0, 255), max_size=3)
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "token": st.text(max_size=3),
        "logprob": st.floats(-30, 0) | st.sampled_from([-9999.0, 0, -1, 1e-308]) | VALUES,
        "bytes": st.none() | st.lists(st.integers(0, 255), max_size=3),
        "top_logprobs": st.just([]),
    },
)
CHOICES = st.builds(
    lambda tokens, changes, dropped: {k: v for k, v in (plain_choice(tokens) | changes).items() if k != dropped},
    TOKENS,
    st.fixed_dictionaries(
        {"index": st.integers(0, 1)},
        optional={
            "logprobs": st.none() | st.fixed_dictionaries({"content": st.none() | st.lists(ENTRIES, max_size=3)}),
            "token_ids": st.none() | TOKENS,
            "finish_reason": st.sampled_from([None, "stop", "abort"]),
            "stop_reason": VALUES,
            "routed_experts": VALUES,
            "message": st.fixed_dictionaries({"content": st.none() | st.text(max_size=5)}, optional={"x": VALUES}),
            "new": VALUES,
        },
    ),
    st.none() | st.sampled_from(["finish_reason", "token_ids", "logprobs", "stop_reason"]),
)


@given(
    st.lists(CHOICES, max_size=2),
    st.fixed_dictionaries({}, optional={name: VALUES for name in ("id", "created", "metrics", "new")}),
    st.booleans(),
)
def test_both_ways_give_the_same(choices: list[dict[str, Any]], changes: dict[str, Any], spaced: bool) -> None:
    said = answer(plain_choice([1]), **changes) | {"choices": choices}
    separators = None if spaced else (",", ":")
    content = json.dumps(said, ensure_ascii=spaced, separators=separators).encode(errors="surrogatepass")
    for pieces in (False, True):
        quick, slow = told(content, pieces=pieces), told(content, logprobs=True, pieces=pieces)
        assert slow.sampled is None
        assert without_logprobs(quick.body) == without_logprobs(slow.body)
        assert outcomes(quick) == outcomes(slow)


@pytest.mark.parametrize(
    "said",
    [
        answer(plain_choice([1], new=1)),
        answer(plain_choice([1]), new=1),
        answer(plain_choice([1], logprobs=None)),
        answer(plain_choice([1], token_ids=None)),
        answer(plain_choice([1], token_ids=[1.5])),
        answer(plain_choice([1], token_ids=[True])),
        *(answer(plain_choice([1], token_ids=[number])) for number in (-1, 2**31, 2**64 - 1, 2**70)),
        answer(plain_choice([1]), prompt_token_ids=[2**31]),
        answer(plain_choice([1], message=None)),
        answer(plain_choice([1], logprobs={"content": [{"logprob": None}]})),
        answer(plain_choice([1]), usage=None),
        answer(plain_choice([1]), prompt_token_ids=None),
    ],
)
def test_any_other_form_is_read_the_slow_way(said: dict[str, Any]) -> None:
    assert not is_quick(said)
    assert told(said).body == said


def test_a_number_that_no_log_probability_can_be_is_told_however_it_was_read() -> None:
    [choice] = (one := answer(plain_choice([1], logprobs={"content": [{"logprob": -9999.0}]})))["choices"]
    assert is_quick(one)
    assert outcomes(told(answer(choice, plain_choice([2], index=1))))[0] == "logprob_missing"


def test_the_pieces_of_tokens_without_bytes_are_those_of_their_text() -> None:
    entries = [{"token": "é", "logprob": -1, "bytes": None}, {"token": "x", "logprob": -1}]
    [choice] = told(
        answer(plain_choice([1, 2], message={"content": "éx"}, logprobs={"content": entries})), pieces=True
    ).body["choices"]
    assert (choice["pieces"], choice["logprobs"]) == ([1, 1], None)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"null", b"\xff"])
def test_what_is_no_object_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError):
        told(content)


def test_half_of_a_surrogate_pair_is_no_obstacle() -> None:
    said = json.dumps(answer(plain_choice([1], message={"content": "\ud800"}))).encode()
    assert told(said).body["choices"][0]["message"]["content"] == "\ud800"


def test_every_field_of_the_installed_vllm_is_known() -> None:
    """Else each of its answers would be read the slow way."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("vLLM is not installed")
    source = Path(spec.submodule_search_locations[0]) / "entrypoints/openai/chat_completion/protocol.py"
    fields = {
        node.name: [
            one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
        ]
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.ClassDef)
    }
    choice = dict.fromkeys(fields["ChatCompletionResponseChoice"]) | plain_choice([1])
    assert is_quick(dict.fromkeys(fields["ChatCompletionResponse"]) | answer(choice))
