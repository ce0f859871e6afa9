"""When the breaker opens, what passes meanwhile, and how it closes."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing import breaker as module
from gateway.routing.breaker import Breaker, BreakerState
from swarm.errors import UnavailableError


class Clock:
    """Seconds that pass when the test says so."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker("the upstream")


def fail(breaker: Breaker, times: int = 1) -> None:
    for _ in range(times):
        with suppress(ValueError), breaker.call():
            raise ValueError


def test_it_opens_on_failures_and_closes_when_a_request_is_answered(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 4)
    assert breaker.state is BreakerState.CLOSED, "four failures say nothing"
    with breaker.call() as call:
        call.failed = True
    assert breaker.state is BreakerState.OPEN
    with pytest.raises(UnavailableError) as refused, breaker.call():
        raise AssertionError
    assert (refused.value.code, refused.value.retry_after) == ("upstream_unavailable", 1.0)
    clock.now += 1.0
    assert breaker.state is BreakerState.HALF_OPEN
    with breaker.call():
        assert breaker.state is BreakerState.OPEN, "one for each pause"
    assert breaker.state is BreakerState.CLOSED
    fail(breaker, 4)
    assert breaker.state is BreakerState.CLOSED, "what was before the outage does not count"


def test_the_pause_doubles_up_to_half_a_minute(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 5)
    for pause in (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
        clock.now += 0.49 * pause
        assert breaker.state is BreakerState.OPEN
        clock.now += 0.51 * pause
        fail(breaker)
    clock.now += 30.0
    with breaker.call():
        pass
    fail(breaker, 5)
    clock.now += 1.0
    assert breaker.state is BreakerState.HALF_OPEN, "a new outage begins with the shortest pause"


@pytest.mark.parametrize("failed", [True, False])
def test_a_request_from_before_the_outage_changes_nothing(breaker: Breaker, clock: Clock, failed: bool) -> None:
    with breaker.call() as old:
        old.failed = failed
        fail(breaker, 5)
        clock.now += 1.0
    assert breaker.state is BreakerState.HALF_OPEN


def test_who_leaves_says_nothing(breaker: Breaker, clock: Clock) -> None:
    def leave() -> None:
        with suppress(asyncio.CancelledError), breaker.call():
            raise asyncio.CancelledError

    for _ in range(9):
        leave()
    assert breaker.state is BreakerState.CLOSED
    fail(breaker, 5)
    clock.now += 1.0
    leave()
    assert breaker.state is BreakerState.OPEN, "an upstream that hangs is not asked without a pause"
    clock.now += 2.0
    assert breaker.state is BreakerState.HALF_OPEN, "another one may try"


def test_a_slow_trial_keeps_nobody_else_away(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 5)
    clock.now += 1.0
    with breaker.call() as slow:
        clock.now += 2.0
        with breaker.call():
            pass
        assert breaker.state is BreakerState.CLOSED
        slow.failed = True
    assert breaker.state is BreakerState.CLOSED


@given(st.lists(st.booleans(), max_size=60))
def test_it_opens_exactly_when_half_of_the_last_twenty_fail_five_at_least(failures: list[bool]) -> None:
    breaker = Breaker("the upstream")
    for number, failed in enumerate(failures):
        with breaker.call() as call:
            call.failed = failed
        last = failures[max(0, number - 19) : number + 1]
        opened = breaker.state is not BreakerState.CLOSED
        assert opened == (sum(last) >= 5 and sum(last) * 2 >= len(last))
        if opened:
            break
