"""Rounds of one run: figures of different hours differ by two to three times, so ratios are taken within a round."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any


def summary(rounds: Sequence[Any], *, ratio: bool = False) -> Any:
    """The figures of several rounds of one shape as one: the median of each number, and of each number below a name
    with ``ratio`` also the least and the most. What is not in all rounds, or no number, is as in the last one."""
    last = rounds[-1]
    if isinstance(last, dict):
        return {
            name: summary([row[name] for row in rounds], ratio=ratio or "ratio" in name)
            if all(isinstance(row, dict) and name in row for row in rounds)
            else last[name]
            for name in last
        }
    if not all(isinstance(figure, int | float) for figure in rounds):
        return last
    median = round(statistics.median(rounds), 3)
    return {"median": median, "least": min(rounds), "most": max(rounds)} if ratio and len(rounds) > 1 else median
