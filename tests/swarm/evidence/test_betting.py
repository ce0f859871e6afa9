"""Bets on paired differences: what is promised of any values, and of chance."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.evidence.betting import BETS, GRID, LowEnd, Wealth
from swarm.intervals import Interval

VALUES = st.floats(-1, 1)
MANY = st.lists(VALUES, max_size=40)


def wealth_of(values: list[float], most: float = 0.0) -> Wealth:
    wealth = Wealth(most)
    for value in values:
        wealth.add(value)
    return wealth


def interval(values: list[float], below: float, above: float) -> Interval:
    low, high = LowEnd(), LowEnd()
    for value in values:
        low.add(value)
        high.add(-value)
    return Interval(math.fsum(values) / max(1, len(values)), low.at(below), -high.at(above))


@given(values=MANY)
def test_the_evidence_is_the_mean_of_the_products(values: list[float]) -> None:
    products = [math.prod(1 + bet * value for value in values) for bet in BETS]
    assert wealth_of(values).log_evidence == pytest.approx(math.log(sum(products) / len(BETS)), abs=1e-9)


@given(most=st.floats(-0.99, 0.99), chance=st.floats(0, 1))
def test_at_the_bound_no_bet_wins_on_average(most: float, chance: float) -> None:
    # values -1 and 1 with the mean `most` are the extreme case of the hypothesis
    up = (1 + most) / 2
    won, lost = wealth_of([1.0], most), wealth_of([-1.0], most)
    for more, less in zip(won.logs, lost.logs, strict=True):
        assert up * math.exp(more) + (1 - up) * math.exp(less) == pytest.approx(1)


@given(values=MANY, place=st.integers(0, 40), higher=VALUES)
def test_a_larger_value_is_never_less_evidence(values: list[float], place: int, higher: float) -> None:
    if place >= len(values) or higher < values[place]:
        return
    raised = [*values[:place], higher, *values[place + 1 :]]
    assert wealth_of(raised).log_evidence >= wealth_of(values).log_evidence - 1e-9


@given(values=MANY, low=st.floats(-0.99, 0.99), high=st.floats(-0.99, 0.99))
def test_who_refutes_a_mean_refutes_all_below_it(values: list[float], low: float, high: float) -> None:
    low, high = sorted((low, high))
    assert wealth_of(values, low).log_evidence >= wealth_of(values, high).log_evidence - 1e-9


@given(values=MANY, order=st.randoms(use_true_random=False))
def test_the_order_of_values_is_irrelevant(values: list[float], order: random.Random) -> None:
    shuffled = order.sample(values, len(values))
    assert wealth_of(shuffled).log_evidence == pytest.approx(wealth_of(values).log_evidence, abs=1e-9)
    assert interval(shuffled, 0.05, 0.05) == interval(values, 0.05, 0.05)


@given(values=MANY)
def test_an_interval_holds_its_mean_and_is_the_mirror_of_the_mirrored_values(values: list[float]) -> None:
    mean, low, high = interval(values, 0.025, 0.025)
    assert -1 <= low <= mean <= high <= 1
    mirrored = interval([-value for value in values], 0.025, 0.025)
    assert (mirrored.low, mirrored.high) == (-high, -low)


@given(values=st.lists(VALUES, min_size=1, max_size=40))
def test_the_ends_of_an_interval_are_where_the_evidence_crosses(values: list[float]) -> None:
    low = interval(values, 0.05, 0.01).low
    assert low == -1 or wealth_of([min(1.0, value + 1e-9) for value in values], low).refutes(0.05)
    # values are rounded to a fifth of a step
    assert low + 2 / GRID >= 1 or not wealth_of(values, low + 2 / GRID).refutes(0.05)


@given(
    parts=st.lists(
        st.tuples(st.sampled_from([-1.0, -0.3, 0.0, 0.02, 0.7, 1.0]) | VALUES, st.integers(1, 300)), max_size=12
    )
)
def test_an_end_is_the_largest_refuted_mean_however_often_one_looked(parts: list[tuple[float, int]]) -> None:
    looked, values = LowEnd(), list[float]()
    for value, times in parts:
        values += [value] * times
        for _ in range(times):
            looked.add(value)
        found = looked.at(0.05)
        assert found == looked.at(0.05) == interval(values, 0.05, 0.05).low
        rounded = [math.floor(value * 5 * GRID + 1e-6) / (5 * GRID) for value in values]
        for mean, is_refuted in ((round(found * GRID), True), (round(found * GRID) + 1, False)):
            if -GRID < mean < GRID:
                assert wealth_of(rounded, mean / GRID).refutes(0.05) is is_refuted


def test_another_look_takes_two_tests_where_the_end_stayed(monkeypatch: pytest.MonkeyPatch) -> None:
    end, chance, tests = LowEnd(), random.Random(2), list[float]()
    for _ in range(300):
        end.add(chance.uniform(-0.8, 1))
    before = end.at(0.05)
    refutes = Wealth.refutes
    monkeypatch.setattr(Wealth, "refutes", lambda self, alpha: tests.append(self.most) or refutes(self, alpha))
    end.add(0.1)
    assert end.at(0.05) == before
    assert tests == [before, before + 1 / GRID]


def test_a_smaller_chance_of_error_widens_the_interval() -> None:
    values = [0.3, 0.5, -0.1, 0.4] * 20
    wide, narrow = interval(values, 0.01, 0.01), interval(values, 0.1, 0.1)
    assert wide.low < narrow.low < narrow.mean < narrow.high < wide.high
    assert interval([], 0.05, 0.05) == (0.0, -1.0, 1.0)


def test_equal_sides_are_rarely_told_apart_however_often_one_looks() -> None:
    chance = random.Random(5)
    alarms = 0
    for _ in range(200):
        wealth, alarmed = Wealth(), False
        for _ in range(400):
            wealth.add(chance.choice((-1.0, 1.0)))
            alarmed = alarmed or wealth.refutes(0.05)
        alarms += alarmed
    assert alarms <= 10
