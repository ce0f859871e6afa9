"""Exact and fuzzy matches, against definitions written another way."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_hooks import Task
from reward_hooks.builtin.verifiable.match import Exact, Fuzzy, normalised, token_f1
from swarm.errors import ConfigError, HookError
from tests.reward_hooks.making import answered, values


@given(st.text(max_size=40), st.text(max_size=40))
def test_similarity_is_bounded_symmetric_and_1_for_equals(text: str, other: str) -> None:
    assert 0.0 <= token_f1(text, other) <= 1.0
    assert token_f1(text, other) == pytest.approx(token_f1(other, text))
    assert token_f1(text, text) == 1.0


def test_f1_of_the_docstring() -> None:
    assert token_f1("not in paris", "in paris") == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("The  Cat.", "cat"),
        ("A", "a"),
        ("(A).", "a"),
        ("!?", "!?"),
        ("an apple, a day", "apple day"),
        ("", ""),
        ("1½ ❤️👨‍👩‍👧!", "1½"),
    ],
)
def test_normalisation(text: str, same: str) -> None:
    assert normalised(text) == same


def test_exact_takes_any_accepted_answer() -> None:
    task = answered(["Paris", "city of light", 7])
    assert values(Exact(), ["paris.", "The City of Light", "7", "Rome", ""], task) == [1, 1, 1, 0, 0]
    # a vowel sign is no punctuation: these are four words
    hindi = Task(task_id="t", metadata={"answer": "दिन"})
    assert values(Exact(), ["दिन।", "दान", "दीन", "दन"], hindi) == [1, 0, 0, 0]
    assert values(Exact(extract=r"Answer: (\w+)"), ["Answer: Rome. Answer: Paris", "Paris"], task) == [1, 0]


def test_fuzzy_is_the_best_over_accepted_answers() -> None:
    task = answered(["red green", "blue"])
    assert values(Fuzzy(), ["blue", "red", "pink"], task) == [1.0, 0.666667, 0.0]


@pytest.mark.parametrize("answer", [None, "", " ", [], ["a", None], {"a": 1}, True])
def test_without_a_reference_there_is_no_reward(answer: Any) -> None:
    for hook in (Exact(), Fuzzy()):
        with pytest.raises(HookError, match=r"metadata\['answer'\]") as caught:
            values(hook, ["x"], answered(answer))
        assert caught.value.code == "no_reference"
    with pytest.raises(HookError):
        values(Exact(), ["x"], Task(task_id="t"))


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ConfigError):
        Exact(extract="(")
