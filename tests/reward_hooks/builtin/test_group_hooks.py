# ruff: noqa: RUF001 - signs that look like others are what is tested
"""Hooks that look at a group or at history: consensus, feedback, diversity, novelty; and sessions."""

from __future__ import annotations

from typing import Any

import pytest

from reward_hooks import Feedback, HookContext, HookRunner, Hooks, Reward, Session, Task, Turn, load_hooks
from reward_hooks.builtin.consensus import Consensus
from reward_hooks.builtin.feedback import ImplicitFeedback, UserFeedback
from reward_hooks.builtin.novelty import Diversity, Novelty
from swarm.errors import ConfigError, HookError
from tests.reward_hooks.making import CONTEXT, candidate, candidates, values

TASK = Task(task_id="t")


def test_consensus_by_share_and_by_majority() -> None:
    texts = ["1,000.50", "it is 1000.5", "2", "-0.0", "nothing"]
    assert values(Consensus(), texts) == [0.4, 0.4, 0.2, 0.2, 0]
    assert values(Consensus(by="majority"), texts) == [1, 1, 0, 0, 0]
    assert values(Consensus(by="majority"), ["1", "2", "2", "1", "3"]) == [1, 1, 1, 1, 0]


@pytest.mark.parametrize(
    ("extract", "texts"),
    [
        ("boxed", ["\\boxed{\\frac{1}{2}}", "so \\boxed{ \\frac{1}{2} }", "\\boxed{3}"]),
        ("boxed", ["\\boxed{\\frac{1}{\\sqrt{2}}}", "so \\boxed{\\frac{1}{ \\sqrt{2} }}", "\\boxed{\\frac{1}{2}}"]),
        ("boxed", ["\\boxed{\\dfrac{1}{2}}", "so \\boxed{\\tfrac{1}{2}}", "\\boxed{\\frac{1}{3}}"]),
        ("boxed", ["\\boxed{\\left(1, 2\\right)}", "\\boxed{(1,2)}", "\\boxed{(2,1)}"]),
        ("boxed", ["\\boxed{a \\leftarrow b}", "\\boxed{a\\leftarrow b}", "\\boxed{a \\rightarrow b}"]),
        ("boxed", ["\\boxed{-5}", "\\boxed{-5.0}", "\\boxed{5}"]),
        ("boxed", ["\\boxed{.5}", "\\boxed{ .5}", "\\boxed{5}"]),
        ("boxed", ["\\boxed{a-b}", "\\boxed{a - b}", "\\boxed{a+b}"]),
        ("boxed", ["\\boxed{1.5}", "\\boxed{1.50}", "\\boxed{15}"]),
        ("boxed", ["\\boxed{x^2-1}", "\\boxed{x^2 - 1}", "\\boxed{x^2+1}"]),
        ("boxed", ["\\boxed{\\$1{,}800}", "\\boxed{1\\,800}", "\\boxed{18}"]),
        ("boxed", ["\\boxed{18\\%}", "\\boxed{18%}", "\\boxed{1.8}"]),
        ("answer", ["The answer is −5.", "Answer: **-5**", "Answer: $5$"]),
        ("answer", ["The answer is \\(5\\).", "Answer: 5", "Answer: 6"]),
        ("number", ["−5", "It is -5.", "5"]),
        ("answer", ["The answer is **Paris**.", "Final answer: paris", "Answer: Rome"]),
        ("choice", ["I think A, no: B", "B.", "C"]),
        ("text", ["The same!", "same", "other"]),
        ("text", ["दिन।", "दिन", "दान"]),
        (r"x=(\w+)", ["x=1 x=7", "x=7", "x=1"]),
    ],
)
def test_answers_are_extracted(extract: str, texts: list[str]) -> None:
    assert values(Consensus(extract), texts) == pytest.approx([2 / 3, 2 / 3, 1 / 3], abs=1e-6)


@pytest.mark.parametrize(
    ("extract", "bad"),
    [
        ("answer", "answer: " + " " * 50_000 + "x" + " " * 50_000 + "y"),
        ("answer", "answer: " + "* " * 50_000),
        ("answer", "answer" * 50_000),
        ("boxed", "\\boxed{" * 50_000),
        ("number", "0." + "0" * 200_000 + "1"),
        (r"answer: (a+)+b", "answer: " + "a" * 60),
    ],
    ids=["spaces", "stars", "words", "boxes", "zeros", "pattern"],
)
def test_an_answer_that_is_hard_to_read_costs_the_others_nothing(extract: str, bad: str) -> None:
    good = "The answer: 1aab \\boxed{1} answer: aab"
    rewards = values(Consensus(extract), [good, bad, good])
    assert rewards[0] == rewards[2] >= 0.666
    assert rewards[1] < 0.5


def test_no_answers_no_consensus() -> None:
    with pytest.raises(HookError) as caught:
        values(Consensus(), ["none", ""])
    assert caught.value.code == "no_answers"
    for options in ({"extract": "("}, {"by": "vote"}):
        with pytest.raises(ConfigError):
            Consensus(**options)  # type: ignore[arg-type]


def rated(hook: Any, *given: tuple[str, dict[str, Any] | None]) -> list[float]:
    listed = [
        candidate(text, index, feedback=None if feedback is None else Feedback(**feedback))
        for index, (text, feedback) in enumerate(given)
    ]
    return [round(reward.value, 6) for reward in hook.on_compute_relative_reward(TASK, listed, CONTEXT)]


def test_feedback_goes_to_the_rated_answer_and_to_what_is_like_it() -> None:
    praised = ("one two three four five", {"rating": 1.0})
    alike, unlike = ("one two three four six", None), ("seven eight nine ten", None)
    assert rated(UserFeedback(), praised, alike, unlike, (praised[0], None)) == [1.0, 0.5, 0.0, 1.0]
    assert rated(UserFeedback(), (praised[0], {"rating": -0.5}), alike) == [-0.5, -0.25]


def test_signals_are_weighed_by_their_certainty() -> None:
    mixed = ("x", {"signals": {"copied": 1.0, "edited": 0.5, "unheard_of": 1.0}})
    assert rated(ImplicitFeedback(), mixed) == [pytest.approx((0.7 - 0.15) / 1.5, abs=1e-6)]
    assert rated(ImplicitFeedback({"unheard_of": -1.0}), mixed) == [-1.0]


def test_without_feedback_there_is_no_reward() -> None:
    for hook in (UserFeedback(), ImplicitFeedback()):
        with pytest.raises(HookError) as caught:
            rated(hook, ("a", None), ("b", {"comment": "hm"}), ("c", {"signals": {"copied": 0.0}}))
        assert caught.value.code == "no_feedback"
    with pytest.raises(HookError, match="1 of 2 answers"):
        rated(UserFeedback(others="refuse"), ("a", {"rating": 1.0}), ("b", None))
    with pytest.raises(ConfigError):
        ImplicitFeedback({"copied": 2.0})


def test_diversity_counts_likeness_to_the_others() -> None:
    assert values(Diversity(), ["a b c d", "a b c d", "x y z"]) == [0.5, 0.5, 1.0]
    assert values(Diversity(), ["दिन", "दान"]) == [1.0, 1.0]
    # equal answers earn the same wherever they stand: `scale: rank` tells any two numbers apart
    texts = ["c b b b a c c", "b b c b b c", "c b b c c b", "b b c b b c"]
    rewards = Diversity()(TASK, candidates(*texts), CONTEXT)
    assert rewards[1].value == rewards[3].value
    with pytest.raises(HookError):
        values(Diversity(), ["alone"])


def test_a_group_that_is_judged_again_is_not_compared_with_itself() -> None:
    hook = Novelty(history=4)
    context = CONTEXT.model_copy(update={"group_id": "g"})
    early, late = ["the cat sat on the mat", "it was a rainy day"], "a late one of other words"
    assert values(hook, early, context=context) == [1, 1]
    assert values(hook, [*early, late], context=context) == [1, 1, 1]
    # and each of its answers is remembered once
    assert values(hook, [*early, late, "new to all of them"]) == [0, 0, 0, 1]


def test_novelty_compares_with_earlier_groups_only_and_forgets() -> None:
    hook = Novelty(history=2)
    assert values(hook, ["a b c", "a b c"]) == [1.0, 1.0]
    assert values(hook, ["a b c", "x y z"]) == [0.0, 1.0]
    assert values(hook, ["q r s", "t u v"]) == [1.0, 1.0]
    assert values(hook, ["a b c"]) == [1.0]
    with pytest.raises(ConfigError):
        Novelty(0)


# -- whole sessions

TURN = Turn(completion_id="c1", request={"messages": []}, message={"role": "assistant", "content": "hi"}, reward=0.5)
SESSION = Session(session_id="s", turns=[TURN, TURN], feedback=Feedback(rating=1.0))


@pytest.mark.anyio
async def test_a_session_hook_is_loaded_and_gives_each_turn_a_reward(tmp_path: Any) -> None:
    (tmp_path / "on_compute_relative_reward.py").write_text(
        "def on_compute_relative_reward(task, candidates, context):\n    return [1.0]\n"
    )
    (tmp_path / "on_session_end.py").write_text(
        "def on_session_end(session, context):\n    return [session.feedback.rating for _ in session.turns]\n"
    )
    hooks = load_hooks(tmp_path)
    assert await HookRunner(hooks).end_session(SESSION, CONTEXT) == [Reward(value=1.0), Reward(value=1.0)]


@pytest.mark.anyio
@pytest.mark.parametrize("result", [[1.0], "12", [float("nan"), 1.0], float("inf")])
async def test_wrong_session_rewards_are_refused(result: Any) -> None:
    runner = HookRunner(Hooks(lambda *_: [], session_end=lambda session, context: result))
    with pytest.raises(HookError) as caught:
        await runner.end_session(SESSION, CONTEXT)
    assert caught.value.code == "hook_result"
    assert await HookRunner(Hooks(lambda *_: [])).end_session(SESSION, CONTEXT) is None


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("result", "outcome"), [(0.5, Reward(value=0.5)), (Reward(value=-1.0), Reward(value=-1.0)), (None, None)], ids=str
)
async def test_a_session_hook_may_give_one_outcome_or_none(result: Any, outcome: Reward | None) -> None:
    runner = HookRunner(Hooks(lambda *_: [], session_end=lambda session, context: result))
    assert await runner.end_session(SESSION, CONTEXT) == outcome


@pytest.mark.anyio
async def test_a_hook_that_cannot_score_raises_with_its_own_code() -> None:
    def refuses(*_: Any) -> list[float]:
        raise HookError("nothing to compare with", code="no_reference")

    with pytest.raises(HookError, match="gives no result: nothing to compare with") as caught:
        await HookRunner(Hooks(refuses)).score(TASK, candidates("a"), HookContext(num_repeat=1))
    assert caught.value.code == "no_reference"
