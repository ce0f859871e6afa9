"""Sampling fields of a request: what vLLM refuses is refused, and what a trained answer does not heed is named."""

from __future__ import annotations

from typing import Any

import pytest

from swarm.errors import RequestError
from swarm.job import TrainJob
from swarm.sampling import DROPPED, NEUTRAL, check_sampling, not_as_asked

JOB = TrainJob(model="tiny", max_response_length=100, temperature=0.9)
HARMLESS: dict[str, Any] = {
    **NEUTRAL,
    "temperature": 0.9,
    "use_beam_search": False,
    "length_penalty": 1,
    "logit_bias": {},
    "bad_words": [],
    "min_tokens": 0,
    "max_tokens": 100,
    "allowed_token_ids": None,
}
HEEDED_BY_NOBODY: dict[str, Any] = {
    "temperature": 1,
    "top_p": 0.9,
    "top_k": 1,
    "min_p": 0.1,
    "presence_penalty": 1,
    "frequency_penalty": -1,
    "repetition_penalty": 1.1,
    "seed": 0,
    "use_beam_search": True,
    "length_penalty": 0.5,
    "logit_bias": {"1": -100},
    "allowed_token_ids": [1],
    "bad_words": ["x"],
    "min_tokens": 1,
    "thinking_token_budget": 5,
}


def test_each_field_is_named_once_and_no_other() -> None:
    names = [name for name, _ in not_as_asked(HEEDED_BY_NOBODY | {"stop": ["x"]}, JOB, episode_type="train")]
    assert names == list(HEEDED_BY_NOBODY)
    assert set(names) == {"temperature", *NEUTRAL, *DROPPED}
    assert not_as_asked(HEEDED_BY_NOBODY, JOB, episode_type="eval") == []
    short = JOB.model_copy(update={"max_turn_length": 8})
    assert not_as_asked({"max_tokens": 9}, short, episode_type="eval") == [
        ("max_tokens", "answers end at 8 tokens, raise job.max_turn_length for longer ones")
    ]
    assert not_as_asked({"max_tokens": 9}, short, episode_type=None) == []
    assert not_as_asked(HARMLESS | {"top_k": 0}, JOB, episode_type="train") == []
    check_sampling(HEEDED_BY_NOBODY)
    check_sampling(HARMLESS)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("temperature", -1, "temperature must be non-negative, got -1.0."),
        ("temperature", 2.1, "temperature must be in [0, 2], got 2.1."),
        ("temperature", "hot", "temperature: Input should be a valid number"),
        ("top_p", 0, "top_p must be in (0, 1], got 0.0."),
        ("top_k", -2, "top_k must be 0 (disable), or at least 1, got -2."),
        ("top_k", 1.5, "top_k: Input should be a valid integer"),
        ("min_p", 1.1, "min_p must be in [0, 1], got 1.1."),
        ("presence_penalty", 3, "presence_penalty must be in [-2, 2], got 3.0."),
        ("frequency_penalty", -3, "frequency_penalty must be in [-2, 2], got -3.0."),
        ("repetition_penalty", 0, "repetition_penalty must be greater than zero, got 0.0."),
        ("min_tokens", -1, "min_tokens must be greater than or equal to 0, got -1."),
        ("seed", 2**63, "seed: Input should be less than"),
        ("logit_bias", {"a": 1}, "logit_bias: Input should be a valid integer"),
        ("allowed_token_ids", [], "allowed_token_ids: List should have at least 1 item"),
        ("bad_words", [""], "bad_words: String should have at least 1 character"),
    ],
)
def test_what_vllm_refuses_is_refused(name: str, value: Any, words: str) -> None:
    with pytest.raises(RequestError) as raised:
        check_sampling({name: value})
    assert words in raised.value.message and raised.value.param == name
