"""The breaker's state machine, against what its docstring promises, at any sequence of calls and times."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.routing.breaker import Breaker, BreakerState, Trial


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def never() -> bool:
    raise AssertionError


def breaker_of(clock: Clock, jitter: float = 1.0) -> Breaker:
    return Breaker("the upstream", never, clock, lambda: jitter)


def opened(clock: Clock) -> Breaker:
    breaker = breaker_of(clock)
    for _ in range(5):
        trial = breaker.enter()
        assert trial is not None
        trial.end(False)
    return breaker


def test_it_opens_when_half_of_the_calls_fail_and_closes_on_the_first_good_try() -> None:
    clock = Clock()
    breaker = breaker_of(clock)
    for number in range(8):
        trial = breaker.enter()
        assert trial is not None
        trial.end(number % 2 == 0)
    assert breaker.state is BreakerState.CLOSED, "four failures say nothing"
    for _ in range(1):
        trial = breaker.enter()
        assert trial is not None
        trial.end(False)
    assert breaker.state is BreakerState.OPEN
    assert breaker.enter() is None and breaker.retry_after == 1.0
    clock.now += 1.0
    assert breaker.state is BreakerState.HALF_OPEN
    trial = breaker.enter()
    assert trial is not None and breaker.enter() is None, "one at a time"
    trial.end(True)
    assert breaker.state is BreakerState.CLOSED


def test_few_failures_among_many_calls_do_not_open_it() -> None:
    breaker = breaker_of(Clock())
    for number in range(200):
        trial = breaker.enter()
        assert trial is not None
        trial.end(number % 3 != 0)
    assert breaker.state is BreakerState.CLOSED


def test_old_failures_are_forgotten() -> None:
    clock = Clock()
    breaker = breaker_of(clock)
    for _ in range(40):
        clock.now += 10.0
        trial = breaker.enter()
        assert trial is not None
        trial.end(False)
    assert breaker.state is BreakerState.CLOSED


def test_each_failed_try_doubles_the_pause_up_to_half_a_minute() -> None:
    clock = Clock()
    breaker = opened(clock)
    pauses: list[float] = []
    for _ in range(8):
        pauses.append(breaker.retry_after)
        clock.now += breaker.retry_after
        trial = breaker.enter()
        assert trial is not None
        trial.end(False)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_an_abandoned_try_lets_the_next_one_try() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now += 1.0
    trial = breaker.enter()
    assert trial is not None
    trial.end(None)
    assert breaker.state is BreakerState.HALF_OPEN and breaker.admits


def test_a_call_from_before_the_outage_does_not_end_it() -> None:
    clock = Clock()
    breaker = breaker_of(clock)
    old = breaker.enter()
    assert old is not None
    for _ in range(5):
        trial = breaker.enter()
        assert trial is not None
        trial.end(False)
    clock.now += 1.0
    old.end(True)
    assert breaker.state is BreakerState.HALF_OPEN


class AnyUse(RuleBasedStateMachine):
    """Any sequence of calls, ends and times."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.breaker = breaker_of(self.clock, 0.8)
        self.under_way: list[tuple[Trial, BreakerState]] = []
        self.trying = 0
        self.failures_since_closed = 0

    @rule(seconds=st.floats(0, 40))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def enter(self) -> None:
        state, admits = self.breaker.state, self.breaker.admits
        trial = self.breaker.enter()
        assert (trial is not None) == admits
        assert state is not BreakerState.OPEN or trial is None
        if trial is not None:
            self.under_way.append((trial, state))

    @precondition(lambda self: self.under_way)
    @rule(which=st.integers(0, 1000), end=st.sampled_from([True, False, None]))
    def end(self, which: int, end: bool | None) -> None:
        trial, began = self.under_way.pop(which % len(self.under_way))
        before = self.breaker.state
        trial.end(end)
        after = self.breaker.state
        trial.end(False)
        assert self.breaker.state is after, "a call ends once"
        if before is BreakerState.OPEN:
            assert after is BreakerState.OPEN, "nothing but time ends the pause"
        if before is not BreakerState.CLOSED and after is BreakerState.CLOSED:
            assert (began, end) == (BreakerState.HALF_OPEN, True)
        if before is BreakerState.CLOSED and after is BreakerState.OPEN:
            assert end is False
        if end is None:
            assert after is before

    @invariant()
    def one_tries_at_a_time(self) -> None:
        if self.breaker.state is BreakerState.HALF_OPEN:
            tried = sum(began is BreakerState.HALF_OPEN for _, began in self.under_way)
            assert self.breaker.admits or tried

    @invariant()
    def it_says_when_to_come_back(self) -> None:
        waits = self.breaker.retry_after
        assert (waits > 0) == (self.breaker.state is BreakerState.OPEN)
        assert waits <= 30.0


TestAnyUse = AnyUse.TestCase
TestAnyUse.settings = settings(max_examples=100, stateful_step_count=60)
