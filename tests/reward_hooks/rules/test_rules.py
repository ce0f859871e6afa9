"""The built-in rules: what each factor punishes, their bounds, and their combination."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_hooks import Candidate, HookContext, HookRunner, Task, load_hooks
from reward_hooks.rules import Concise, Json, Matches, Repetition, Rule, Weighted
from reward_hooks.rules.concise import score
from reward_hooks.rules.text import distinct_share
from swarm.errors import ConfigError

QUESTION = "Why are Python strings immutable?"
GOOD = "Python strings are immutable for speed and as dict keys."
TASK = Task(task_id="t", main_query=QUESTION)


def candidate(text: str, finish_reason: str = "stop") -> Candidate:
    return Candidate(index=0, message={"role": "assistant", "content": text}, text=text, finish_reason=finish_reason)


def test_a_short_complete_answer_gets_nearly_full_marks() -> None:
    reward = score(GOOD, "stop", QUESTION)
    assert reward.value > 0.9
    assert all(value == 1.0 for name, value in reward.components.items() if name != "concise")


@pytest.mark.parametrize(
    ("factor", "text", "finish_reason"),
    [
        ("finished", GOOD, "length"),
        ("finished", "", "stop"),
        ("on_topic", "Cats sleep because the night is for hunting and play.", "stop"),
        ("substance", "Python strings are immutable.", "stop"),
        ("complete", GOOD.rstrip("."), "stop"),
        ("fluent", "Python strings are immutable, speed: python strings are immutable, keys.", "stop"),
        ("fluent", "Python strings immutable speed hashing dict keys interning memory.", "stop"),
        ("fluent", "Python strings are immutable §§§§§ ¶¶¶¶¶ for speed and hashing.", "stop"),
        ("concise", GOOD[:-1] + " and so on" * 12 + ".", "stop"),
    ],
)
def test_each_factor_has_its_fault(factor: str, text: str, finish_reason: str) -> None:
    reward = score(text, finish_reason, QUESTION)
    assert reward.components[factor] < score(GOOD, "stop", QUESTION).components[factor]
    assert reward.value < score(GOOD, "stop", QUESTION).value


def test_length_is_full_marks_then_a_line_then_nothing() -> None:
    def marks(words: int) -> float:
        return score("word " * words, "stop", QUESTION, 10, 20).components["concise"]

    assert [marks(words) for words in (1, 10, 15, 20, 40)] == [1.0, 1.0, 0.5, 0.0, 0.0]


def test_the_reason_names_the_weakest_factor() -> None:
    assert score(GOOD, "length", QUESTION).reason.startswith("finished 0.00")
    assert score("Python strings are immutable for speed and hashing.", "stop", QUESTION).reason == ""


def test_a_question_without_content_words_asks_for_no_topic() -> None:
    assert score("Blue is a color.", "stop", "why?").components["on_topic"] == 1.0


@given(st.text(), st.text(), st.sampled_from(["stop", "length", "abort", ""]))
def test_concise_is_total_and_bounded(text: str, question: str, finish_reason: str) -> None:
    reward = score(text, finish_reason, question)
    assert 0.0 <= reward.value <= 1.0
    assert all(0.0 <= value <= 1.0 for value in reward.components.values())


@pytest.mark.parametrize(("full", "zero"), [(0, 10), (10, 10), (20, 10)])
def test_concise_refuses_lengths_in_the_wrong_order(full: int, zero: int) -> None:
    with pytest.raises(ConfigError):
        Concise(full, zero)


@pytest.mark.parametrize(
    ("rule", "text", "value"),
    [
        (Matches(r"Answer: \d+"), " Answer: 42\n", 1.0),
        (Matches(r"Answer: \d+"), "The Answer: 42", 0.0),
        (Json(), '{"a": 1}', 1.0),
        (Json(), " [1, 2] ", 1.0),
        (Json(), "{'a': 1}", 0.0),
        (Json(), "NaN", 0.0),
        (Json(), "", 0.0),
        (Json(), "[" * 100_000, 0.0),
        (Json(), '```json\n{"a": 1}\n```', 0.0),
        (Json(fenced=True), '```json\n{"a": 1}\n```', 1.0),
        (Json(fenced=True), 'Here: ```json\n{"a": 1}\n```', 0.0),
        (Json(("a", "b")), '{"a": 1, "b": 2}', 1.0),
        (Json(("a", "b")), '{"a": 1}', 0.0),
        (Json(("a",)), "[1]", 0.0),
        (Repetition(), "all of these words are new", 1.0),
        (Repetition(), "again and again and again and again", 2 / 5),
        (Repetition(), "two words", 1.0),
        (Repetition(), " ", 0.0),
        (Repetition(1), "ДА да", 0.5),
    ],
)
def test_format_and_repetition(rule: Rule, text: str, value: float) -> None:
    reward = rule.judge(TASK, candidate(text))
    assert reward.value == pytest.approx(value)
    assert bool(reward.reason) == (value < 1.0) or not text.strip()


@given(st.text(), st.integers(1, 5))
def test_repetition_is_bounded(text: str, n: int) -> None:
    assert 0.0 <= distinct_share(text, n) <= 1.0


def test_wrong_arguments_are_told() -> None:
    with pytest.raises(ConfigError, match="no regular expression"):
        Matches("(")
    with pytest.raises(ConfigError):
        Repetition(0)
    with pytest.raises(ConfigError):
        Weighted()
    with pytest.raises(ConfigError):
        Weighted((Repetition(), 0.0))


def test_rules_combine_by_weight_and_keep_their_components() -> None:
    reward = Weighted((Concise(), 3.0), (Matches("nothing"), 1.0)).judge(TASK, candidate(GOOD))
    alone = Concise().judge(TASK, candidate(GOOD))
    assert reward.value == pytest.approx(alone.value * 0.75)
    assert reward.components["concise"] == alone.value
    assert reward.components["concise.finished"] == 1.0
    assert reward.components["matches"] == 0.0
    assert "matches: does not match" in reward.reason


@pytest.mark.anyio
async def test_a_rule_runs_as_hooks() -> None:
    runner = HookRunner(load_hooks("reward_hooks.rules.concise:hooks"))
    group = await runner.score(TASK, [candidate(GOOD, "length"), candidate(GOOD)], HookContext(num_repeat=2))
    assert group.best == 1
    assert group.informative
