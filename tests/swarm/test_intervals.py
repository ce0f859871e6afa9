"""The formulas against published values, and against many draws."""

from __future__ import annotations

import math
import random

import pytest

from swarm.intervals import mean_interval, student_quantile, trend_interval, values_to_tell, welch_interval


@pytest.mark.parametrize(
    ("probability", "freedom", "value"),
    # a table of Student's t; a normal quantile for many degrees of freedom
    [
        (0.975, 1, 12.706),
        (0.975, 2, 4.303),
        (0.975, 5, 2.571),
        (0.995, 3, 5.841),
        (0.95, 10, 1.812),
        (0.975, 1e4, 1.960),
    ],
)
def test_student_quantiles_are_those_of_the_table(probability: float, freedom: float, value: float) -> None:
    assert student_quantile(probability, freedom) == pytest.approx(value, abs=6e-4)


def test_welchs_interval_is_that_of_a_worked_example() -> None:
    one, other = [27.5, 21.0, 19.0, 23.6, 17.0, 17.9], [27.1, 22.0, 20.8, 23.4, 23.4, 23.5]
    told = welch_interval(one, other, 0.95)
    assert told.mean == pytest.approx(21.0 - 23.3666667)
    # by hand: variances 15.724 and 4.4827, so a standard error of 1.8351, and 7.64 degrees of freedom
    assert (told.high - told.low) / 2 == pytest.approx(1.8351 * 2.326, rel=2e-3)
    assert mean_interval([1.0], 0.95).low == float("-inf")


@pytest.mark.slow
def test_one_in_twenty_intervals_misses_the_mean() -> None:
    draw = random.Random(1)
    missed = 0
    for _ in range(600):
        told = welch_interval([draw.gauss(0, 1) for _ in range(3)], [draw.gauss(0, 1) for _ in range(3)], 0.95)
        missed += not told.low <= 0 <= told.high
    # Welch's approximation is conservative at three values
    assert 0.02 < missed / 600 < 0.06


def test_the_ends_of_a_trend_are_the_slopes_with_a_bayes_factor_of_one_over_alpha() -> None:
    draw = random.Random(3)
    values = {place: 0.02 * place + draw.gauss(0, 0.1) for place in range(1, 31)}
    told = trend_interval(values, 0.95)
    middle, mean = 15.5, sum(values.values()) / 30
    squares = sum((place - middle) ** 2 for place in values)
    for end in (told.low, told.high):
        # likelihoods of what is left of a level, with the slope of this end, and with its normal prior around that
        left = {place: value - mean - end / 29 * (place - middle) for place, value in values.items()}
        along = sum((place - middle) * value for place, value in left.items())
        level = sum(value**2 for value in left.values())
        factor = (level / (level - along**2 / (25 + squares))) ** (29 / 2) / math.sqrt(1 + squares / 25)
        assert factor == pytest.approx(20)
    assert told.low < 0.02 * 29 < told.high and told.mean == pytest.approx((told.low + told.high) / 2)


def test_few_values_and_values_on_a_line_have_a_trend_too() -> None:
    assert trend_interval({1: 0.5}, 0.95) == trend_interval({}, 0.95) == (0.0, -math.inf, math.inf)
    assert trend_interval({1: 0.5, 2: 0.7, 3: 0.9}, 0.95).high == math.inf
    assert trend_interval({place: 0.1 for place in (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144)}, 0.95) == (0.0, 0.0, 0.0)
    # places that are far from each other are as many steps of training
    assert trend_interval({0: 1.0, 50: 2.0, 100: 3.0, 150: 4.0}, 0.95).mean == pytest.approx(3.0)


@pytest.mark.slow
def test_who_looks_after_each_value_is_misled_in_one_run_of_twenty() -> None:
    draw, misled = random.Random(4), 0
    for _ in range(300):
        values = {place: draw.gauss(0, 1) for place in range(1, 81)}
        looks = (dict(list(values.items())[:count]) for count in range(3, 81))
        misled += any(not told.low <= 0 <= told.high for told in (trend_interval(seen, 0.95) for seen in looks))
    assert misled / 300 < 0.06


@pytest.mark.slow
def test_so_many_values_tell_a_difference_four_times_in_five() -> None:
    draw, told = random.Random(2), 0
    wanted = values_to_tell(0.25, 1.0, 0.95)
    # the textbook's number of pairs for a standardised difference of a quarter
    assert wanted == 126
    for _ in range(400):
        told += mean_interval([draw.gauss(0.25, 1.0) for _ in range(wanted)], 0.95).low > 0
    assert 0.75 < told / 400 < 0.86


def test_no_number_of_values_tells_no_difference() -> None:
    assert values_to_tell(0.0, 1.0, 0.95) is None
