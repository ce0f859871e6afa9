"""What is recorded of a call, whatever vLLM says: properties over all numbers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from swarm.server.dataplane.answers import Recorder, as_chat
from swarm.tokens import ModelCall
from tests.standins.vllm import plain_choice

COUNTS = st.integers(0, 4)
MISSING = "a sampled token has no log-probability"
NO_NUMBERS = "vLLM sent token ids or log-probabilities that are "


def answer(choices: list[dict[str, Any]], completion: int, prompt: int = 3) -> dict[str, Any]:
    return {
        "prompt_token_ids": [1, 2, 3],
        "choices": choices,
        "usage": {"prompt_tokens": prompt, "completion_tokens": completion},
    }


def problem_of(**changes: Any) -> str:
    """What is wrong with an answer of one token, so changed."""
    recorder = Recorder(0, 1)
    recorder.add(answer([plain_choice([1], **changes)], 1), "r")
    (outcome,) = recorder.calls(0)
    return outcome if isinstance(outcome, str) else ""


@given(st.lists(st.tuples(COUNTS, COUNTS), min_size=1, max_size=4), st.integers(-2, 2), st.integers(2, 4))
def test_a_call_comes_out_only_where_all_numbers_agree(counts: list[tuple[int, int]], off: int, prompt: int) -> None:
    choices = [
        plain_choice(list(range(logprobs)), index=index, token_ids=list(range(ids)))
        for index, (ids, logprobs) in enumerate(counts)
    ]
    recorder = Recorder(0, len(choices))
    told = sum(ids for ids, _ in counts) + off
    recorder.add(answer(choices, told, prompt), "r")
    low, high = sum(min(pair) for pair in counts), sum(max(pair) for pair in counts)
    for (ids, logprobs), outcome in zip(counts, recorder.calls(0), strict=True):
        good = ids == logprobs and low <= told <= high and prompt == 3
        assert isinstance(outcome, ModelCall) == good
        if isinstance(outcome, ModelCall):
            assert len(outcome.response_ids) == len(outcome.logprobs) == ids


@given(st.lists(st.lists(st.integers(0, 99), max_size=5), min_size=1, max_size=3), st.randoms())
def test_chunks_in_any_order_give_what_one_answer_gives(tokens: list[list[int]], random: Any) -> None:
    total = sum(map(len, tokens))
    whole = Recorder(1, len(tokens))
    whole.add(answer([plain_choice(ids, index=index) for index, ids in enumerate(tokens)], total), "r")
    pieces = [[(index, token) for token in ids] for index, ids in enumerate(tokens)]
    parts = Recorder(1, len(tokens))
    while any(pieces):
        index, token = random.choice([piece for piece in pieces if piece]).pop(0)
        parts.add({"choices": [plain_choice([token], index=index)]}, "r")
    parts.add(answer([], total), "r")
    for index, (one, other) in enumerate(zip(whole.calls(2), parts.calls(2), strict=True)):
        assert isinstance(one, ModelCall) and isinstance(other, ModelCall)
        assert one.response_ids.tolist() == tokens[index]
        assert one == replace(other, call_id=one.call_id, finish_reason=one.finish_reason)
        assert (one.min_policy_version, one.max_policy_version) == (1, 2)


def test_values_that_are_no_log_probability_are_told() -> None:
    for value in (None, True, "x", float("nan"), float("inf"), -9999.0):
        assert problem_of(logprobs={"content": [{"logprob": value}]}).startswith((MISSING, NO_NUMBERS))
    assert problem_of(logprobs={"content": [{"logprob": 0}]}) == ""
    mixed = {"content": [{"logprob": -0.5}, {"logprob": True}]}
    assert problem_of(token_ids=[1, 2], logprobs=mixed).startswith(("2 token ids, ", NO_NUMBERS))


@pytest.mark.parametrize("value", [1.5, None, "x", [1], 2**31, -(2**31) - 1, 2**64 - 1, 2**70])
def test_values_that_are_no_token_id_are_told(value: Any) -> None:
    assert problem_of(token_ids=[value]).startswith(NO_NUMBERS)
    recorder = Recorder(0, 1)
    recorder.add(answer([plain_choice([1])], 1) | {"prompt_token_ids": [1, 2, value]}, "r")
    (outcome,) = recorder.calls(0)
    assert isinstance(outcome, str) and outcome.startswith("vLLM sent prompt token ids that are ")


def test_choices_of_different_prompts_are_no_group() -> None:
    recorder = Recorder(0, 2)
    recorder.add(answer([plain_choice([1], index=0), plain_choice([1], index=1)], 2) | {"prompt_token_ids": [9]}, "r")
    recorder.add({"prompt_token_ids": [1, 2, 3]}, "r")
    assert recorder.calls(0) == ["the choices were sampled after different prompts"] * 2


def test_more_log_probabilities_than_tokens_of_a_completion_are_told() -> None:
    listed = {"tokens": ["a"], "token_logprobs": [-1.0, -2.0], "top_logprobs": [None]}
    choice = {"text": "a", "token_ids": [1], "prompt_token_ids": [1, 2, 3], "logprobs": listed}
    recorder = Recorder(0, 1)
    recorder.add(as_chat(answer([choice], 1), "message"), "r")
    assert recorder.calls(0) == ["1 token ids, 2 log-probabilities and 1 tokens by usage"]
