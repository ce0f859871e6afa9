"""The formulas against published values, and against many draws."""

from __future__ import annotations

import random

import pytest

from swarm.intervals import mean_interval, student_quantile, values_to_tell, welch_interval


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
