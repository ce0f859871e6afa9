"""How often a judge that prefers places changes the order of answers when they are shuffled."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from reward_hooks import Candidate
from reward_hooks.judges import Judge
from reward_hooks.offline import flip_rate, kendall_tau
from tests.reward_hooks.judges.conftest import OpenJudge
from tests.reward_hooks.judges.scripted import TASK, ScriptedJudge, answers, context

pytestmark = pytest.mark.anyio

SIZE = 8


def first_wins(place: int, count: int) -> float:
    """Half a point of nine for the first place."""
    return 0.5 if place == 0 else 0.0


def first_wins_much(place: int, count: int) -> float:
    """A point and a half of nine for the first place."""
    return 1.5 if place == 0 else 0.0


def early_wins(place: int, count: int) -> float:
    """Three points of nine for the first place, falling evenly to none for the last."""
    return 3.0 * (1 - place / max(1, count - 1))


def ends_win(place: int, count: int) -> float:
    """A point and a half of nine for the first and the last place."""
    return 1.5 if place in (0, count - 1) else 0.0


def groups(count: int, seed: int = 1) -> list[list[Candidate]]:
    draw = random.Random(seed)
    return [answers(*(round(draw.uniform(0, 6), 2) for _ in range(SIZE))) for _ in range(count)]


async def flips(judge: Judge, count: int = 60, seed: int = 2) -> tuple[float, float]:
    """Mean flip rate when a group is shuffled, and mean tau of the first order with the truth."""
    draw = random.Random(seed)
    rates: list[float] = []
    taus: list[float] = []
    for number, group in enumerate(groups(count)):
        order = draw.sample(range(SIZE), SIZE)
        first = await judge.on_compute_relative_reward(TASK, group, context(f"{number}"))
        again = await judge.on_compute_relative_reward(TASK, [group[index] for index in order], context(f"{number}'"))
        values = [0.0] * SIZE
        for place, index in enumerate(order):
            values[index] = again[place].value
        rate = flip_rate([one.value for one in first], values)
        tau = kendall_tau([one.value for one in first], [float(one.text.split()[-1]) for one in group])
        assert rate is not None
        assert tau is not None
        rates.append(rate)
        taus.append(tau)
    return sum(rates) / len(rates), sum(taus) / len(taus)


@pytest.mark.parametrize("settings", [{}, {"max_comparisons": 12}], ids=["all pairs", "12 of 28 pairs"])
@pytest.mark.parametrize("bias", [first_wins_much, early_wins])
@pytest.mark.parametrize("logprobs", [False, True])
async def test_pairwise_in_both_orders_never_flips(
    scripted: ScriptedJudge, open_judge: OpenJudge, settings: dict[str, Any], bias: Any, logprobs: bool
) -> None:
    scripted.bias, scripted.logprobs = bias, logprobs
    rate, tau = await flips(open_judge("pairwise", endpoint={"cache_entries": 0}, **settings), count=5)
    assert rate == 0.0
    assert tau > 0.5


@pytest.mark.parametrize("kind", ["listwise", "pairwise", "pointwise", "score_model"])
async def test_a_judge_without_a_bias_recovers_the_order(
    scripted: ScriptedJudge, open_judge: OpenJudge, kind: str
) -> None:
    scripted.logprobs = True
    judge = open_judge(kind, endpoint={"base_url": scripted.url} if kind == "score_model" else None)
    rate, tau = await flips(judge, count=14)
    assert rate == 0.0
    assert tau >= 0.9


async def test_a_judge_that_sees_only_places_makes_ties(scripted: ScriptedJudge, open_judge: OpenJudge) -> None:
    scripted.bias = lambda place, count: 100.0 if place == 0 else 0.0
    rewards = await open_judge("pairwise").on_compute_relative_reward(TASK, answers(1, 5, 9), context())
    assert [one.value for one in rewards] == [0.0, 0.0, 0.0]
    assert all(one.components["contradicted"] == 1.0 for one in rewards)


@pytest.mark.parametrize("bias", [first_wins, first_wins_much, early_wins, ends_win])
async def test_listwise_is_free_of_what_a_judge_gives_to_places(
    scripted: ScriptedJudge, open_judge: OpenJudge, bias: Callable[[int, int], float]
) -> None:
    scripted.bias, scripted.logprobs = bias, True
    rate, tau = await flips(open_judge("listwise"), count=12)
    assert rate == 0.0
    assert tau == 1.0


@pytest.mark.parametrize("bias", [first_wins, first_wins_much, early_wins, ends_win])
async def test_rounding_to_whole_scores_hides_some_of_what_a_judge_gives_to_places(
    scripted: ScriptedJudge, open_judge: OpenJudge, bias: Callable[[int, int], float]
) -> None:
    scripted.bias = bias
    rate, tau = await flips(open_judge("listwise"))
    assert rate <= 0.05
    assert tau > 0.85
    every_turn, _ = await flips(open_judge("listwise", orders=SIZE), count=5)
    assert every_turn == 0.0


@pytest.mark.parametrize(("bias", "orders"), [(early_wins, 1), (first_wins_much, 1), (first_wins_much, 2)])
async def test_fewer_orders_leave_a_strong_preference_in(
    scripted: ScriptedJudge, open_judge: OpenJudge, bias: Callable[[int, int], float], orders: int
) -> None:
    scripted.bias, scripted.logprobs = bias, True
    rate, _ = await flips(open_judge("listwise", orders=orders), count=30)
    assert rate > 0.05


async def test_the_position_bias_is_a_component(scripted: ScriptedJudge, open_judge: OpenJudge) -> None:
    scripted.bias, scripted.logprobs = early_wins, True
    rewards = await open_judge("listwise").on_compute_relative_reward(TASK, answers(1, 2, 3, 4, 5), context())
    assert [one.components["place_swing"] for one in rewards] == pytest.approx([3 / 9] * 5)


async def test_each_group_has_an_order_of_its_own(scripted: ScriptedJudge, open_judge: OpenJudge) -> None:
    judge = open_judge("listwise", orders=1)
    for group in range(20):
        await judge.on_compute_relative_reward(TASK, answers(1, 2, 3), context(f"{group}"))
    # 6 orders of three answers; the cache answers those that come again
    assert 4 <= len(scripted.bodies) <= 6
