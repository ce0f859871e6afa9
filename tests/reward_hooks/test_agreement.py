"""Kendall's tau against its definition, and flips."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_hooks.offline import flip_rate, kendall_tau

SCORES = st.lists(st.integers(0, 5), min_size=2, max_size=8)


@pytest.mark.parametrize(
    ("scores", "reference", "tau"),
    [
        ([1, 2, 3], [10, 20, 30], 1.0),
        ([3, 2, 1], [10, 20, 30], -1.0),
        ([1, 3, 2], [1, 2, 3], 1 / 3),
        ([1, 1, 2], [1, 2, 3], 2 / 6**0.5),
        ([1, 1, 1], [1, 2, 3], 0.0),
        ([1, 2, 3], [1, 1, 1], None),
        ([1], [1], None),
    ],
)
def test_tau(scores: list[float], reference: list[float], tau: float | None) -> None:
    assert kendall_tau(scores, reference) == (None if tau is None else pytest.approx(tau))


@given(SCORES)
def test_tau_is_one_with_itself_and_minus_one_with_its_opposite(scores: list[int]) -> None:
    whole = None if len(set(scores)) == 1 else pytest.approx(1.0)
    opposite = None if len(set(scores)) == 1 else pytest.approx(-1.0)
    assert kendall_tau(scores, scores) == whole
    assert kendall_tau([-score for score in scores], scores) == opposite


@given(SCORES)
def test_bounds_and_symmetry(scores: list[int]) -> None:
    other = sorted(scores)
    tau, rate = kendall_tau(scores, other), flip_rate(scores, other)
    assert tau is None or -1 - 1e-9 <= tau <= 1 + 1e-9
    assert rate == flip_rate(other, scores)
    assert flip_rate(scores, scores) == 0.0


@pytest.mark.parametrize(
    ("scores", "again", "rate"),
    [([1, 2, 3], [3, 2, 1], 1.0), ([1, 2, 3], [1, 3, 2], 1 / 3), ([1, 2], [1, 1], 0.5), ([1], [1], None)],
)
def test_flips(scores: list[float], again: list[float], rate: float | None) -> None:
    assert flip_rate(scores, again) == (None if rate is None else pytest.approx(rate))


def test_lists_of_two_lengths_are_refused() -> None:
    with pytest.raises(ValueError):
        kendall_tau([1, 2], [1])
    with pytest.raises(ValueError):
        flip_rate([1, 2], [1])
