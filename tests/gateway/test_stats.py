"""Counts: that kinds which come from others are bounded."""

from __future__ import annotations

from gateway.stats import MAX_KINDS, Stats


def test_kinds_beyond_the_bound_are_counted_together() -> None:
    stats = Stats()
    for number in range(2 * MAX_KINDS):
        stats.errors[f"code {number}"] += 1
    stats.errors["code 0"] += 1
    assert len(stats.errors) == MAX_KINDS + 1
    assert stats.errors["other"] == MAX_KINDS
    assert stats.errors["code 0"] == 2
    assert (stats + Stats()).errors == stats.errors
