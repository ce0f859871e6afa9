"""Sizes of mini-batches, metrics for people."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.verl.steps import micro_batch_rows, mini_batch_rows, plain_metrics, spread_groups


@pytest.mark.parametrize(
    ("rows", "mini_batches", "micro", "size"),
    [
        (32, 1, 4, 32),
        (32, 2, 4, 16),
        (4, 1, 8, 4),  # fewer rows than a micro-batch holds
        (5, 1, 4, 6),  # two micro-batches of three, one row of padding
        (9, 1, 4, 9),  # three micro-batches of three
        (9, 2, 4, 6),  # 6 and 3: a row more than 8 is no optimizer step of its own
        (50, 10, 4, 5),  # ten steps as asked for, row by row, rather than nine without
        (35, 1, None, 35),
        (10, 4, None, 3),
        (1, 4, 4, 1),
    ],
)
def test_size_of_mini_batches(rows: int, mini_batches: int, micro: int | None, size: int) -> None:
    assert mini_batch_rows(rows, mini_batches, data_parallel=1, micro_batch=micro) == size


@given(st.integers(1, 5000), st.integers(1, 32), st.integers(1, 16), st.none() | st.integers(1, 16))
def test_any_number_of_rows_is_trained(rows: int, wanted: int, dp: int, micro: int | None) -> None:
    size = mini_batch_rows(rows, wanted, data_parallel=dp, micro_batch=micro)
    assert size % dp == 0
    steps = math.ceil(rows / size)
    padding = steps * size - rows
    assert steps <= wanted and padding < size
    assert steps == math.ceil(rows / (math.ceil(rows / (wanted * dp)) * dp)), "rounding to micro-batches cost a step"
    if rows >= dp * wanted * (wanted - 1):
        assert steps == wanted
    if wanted == 1 and micro is not None:
        each = micro_batch_rows(size // dp, micro)
        assert size // dp // each == math.ceil(math.ceil(rows / dp) / micro), "as few micro-batches as can be"


@given(st.integers(1, 500), st.integers(1, 16))
def test_micro_batches_divide_the_rows(rows: int, limit: int) -> None:
    size = micro_batch_rows(rows, limit)
    assert rows % size == 0 and 1 <= size <= limit
    assert not any(rows % larger == 0 for larger in range(size + 1, limit + 1))


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


def test_groups_stay_on_one_rank_and_ranks_compute_alike() -> None:
    # four groups of four: a long and a short one on each rank
    groups = [group for group in "abcd" for _ in range(4)]
    prompts = [{"a": 500, "b": 400, "c": 20, "d": 10}[group] for group in groups]
    parts = spread_groups(groups, prompts, [5] * 16, ranks=2)
    assert [{groups[row] for row in part} for part in parts] == [{"a", "d"}, {"b", "c"}]


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 900), st.integers(1, 99))), st.integers(1, 5))
def test_every_row_is_on_one_rank_and_groups_are_cut_for_want_of_room_only(
    rows: list[tuple[str, int, int]], ranks: int
) -> None:
    rows = rows[: len(rows) // ranks * ranks]
    groups, prompts, answers = ([row[n] for row in rows] for n in range(3))
    parts = spread_groups(groups, prompts, answers, ranks)  # type: ignore[arg-type]
    assert [len(part) for part in parts] == [len(rows) // ranks] * ranks
    assert sorted(row for part in parts for row in part) == list(range(len(rows)))
    for part in parts:
        order = [groups[row] for row in part]
        assert sum(a != b for a, b in itertools.pairwise(order)) == max(0, len(set(order)) - 1), "in pieces"
    pieces = sum(len({groups[row] for row in part}) for part in parts)
    # where a group is cut, a rank is full afterwards
    assert pieces <= len(set(groups)) + max(0, ranks - 1)
