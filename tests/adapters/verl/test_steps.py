"""Sizes of mini-batches, metrics for people."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.verl.steps import mini_batch_groups, plain_metrics


@pytest.mark.parametrize(
    ("rows", "mini_batches", "groups"),
    [
        (32, 1, 8),  # B=8, N=4, one timeline each: verl's own size
        (32, 2, 4),
        (35, 1, 9),  # three more timelines: padded by one row, not by a second optimizer step
        (29, 1, 8),  # three trajectories are missing
        (40, 4, 3),  # 10 groups: 3, 3, 3 and 1 padded
        (20, 4, 1),  # 5 groups: five steps without padding rather than three with
        (1, 4, 1),
    ],
)
def test_size_for_groups_of_four(rows: int, mini_batches: int, groups: int) -> None:
    assert mini_batch_groups(rows, mini_batches, group_size=4, data_parallel=1) == groups


@given(st.integers(1, 5000), st.integers(1, 32), st.integers(2, 16), st.integers(1, 16))
def test_number_of_optimizer_steps_is_the_nearest_possible(rows: int, wanted: int, n: int, dp: int) -> None:
    size = mini_batch_groups(rows, wanted, group_size=n, data_parallel=dp) * n
    assert size % dp == 0
    steps, unit = math.ceil(rows / size), math.lcm(n, dp)
    units = math.ceil(rows / unit)
    assert abs(steps - wanted) == min(abs(math.ceil(units / k) - wanted) for k in range(1, units + 1))
    if units <= wanted:
        assert steps == units, "every mini-batch is the smallest that verl takes"
    if units >= wanted * (wanted - 1):
        assert steps == wanted
    if 3 * units >= (wanted + 1) * (wanted - 2):
        assert abs(steps - wanted) <= 1


class Scalar:
    """What numpy and torch scalars look like."""

    def __float__(self) -> float:
        return 0.5


def test_metrics_become_floats_and_non_finite_ones_are_counted() -> None:
    metrics: dict[str, Any] = {
        "loss": Scalar(),
        "rows": 3,
        "grad_norm": math.nan,
        "max": math.inf,
        "note": "text",
        "table": {"a": 1},
    }
    assert plain_metrics(metrics) == {"loss": 0.5, "rows": 3.0, "swarm/non_finite_metrics": 2.0}
