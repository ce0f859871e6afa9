"""Requests per minute, on a clock of the test's own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.keys.ring import RequestRate


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 4)), max_size=60))
def test_no_minute_holds_more_than_the_limit_and_the_wait_is_exact(steps: list[tuple[int, int]]) -> None:
    clock = Clock()
    rate = RequestRate(clock)
    taken: list[float] = []
    for pause, limit in steps:
        clock.now += pause
        recent = [moment for moment in taken if moment > clock.now - 60]
        wait = rate.take(limit)
        assert (wait == 0) == (len(recent) < limit)
        if wait == 0:
            taken.append(clock.now)
        else:
            assert 0 < wait <= 60
            assert len([moment for moment in taken if moment > clock.now + wait - 60 + 1e-6]) < limit
            assert len([moment for moment in taken if moment > clock.now + wait - 60 - 1e-6]) >= limit
