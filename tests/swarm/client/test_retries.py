"""The retry policy: what may be repeated, and how long the pauses are."""

from __future__ import annotations

import pytest

from swarm.client.wire import Outcome, RetryPolicy, may_retry
from swarm.http.client import Answer, ConnectionBrokenError, retry_after


def reply(status: int, **headers: str) -> Answer:
    return Answer(status, {name.replace("_", "-"): value for name, value in headers.items()}, b"")


@pytest.mark.parametrize(
    ("outcome", "verdict"),
    [
        (ConnectionBrokenError("refused", unsent=True), True),
        (ConnectionBrokenError("reset", unsent=False), True),
        (TimeoutError("slow"), True),
        (reply(200), False),
        (reply(200, x_should_retry="true"), False),
        (reply(400), False),
        (reply(404), False),
        (reply(429), False),
        (reply(429, retry_after="1"), True),
        (reply(500), False),
        (reply(500, x_should_retry="true"), True),
        (reply(502), True),
        (reply(503), True),
        (reply(503, x_should_retry="false"), False),
        (reply(504), True),
    ],
)
def test_only_what_may_help_is_repeated(outcome: Outcome, verdict: bool) -> None:
    assert may_retry(outcome) is verdict


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("3", 3.0), ("0.5", 0.5), ("-1", 0.0), ("inf", 0.0), ("nan", 0.0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0)],
)
def test_retry_after_is_seconds(value: str, seconds: float) -> None:
    assert retry_after({"retry-after": value}) == seconds


def test_delays_grow_with_jitter_up_to_the_cap() -> None:
    policy = RetryPolicy(base=0.1, cap=1.0)
    for failures, ceiling in ((1, 0.1), (2, 0.2), (3, 0.4), (4, 0.8), (5, 1.0), (50, 1.0)):
        delays = [policy.delay(failures) for _ in range(50)]
        assert all(ceiling / 2 <= delay <= ceiling for delay in delays)
        assert len(set(delays)) > 1


def test_the_server_may_ask_for_longer() -> None:
    assert RetryPolicy(base=0.1).delay(1, 7.0) == 7.0
    # as a monitor has after a night without its server
    assert RetryPolicy(base=0.5, cap=10.0).delay(5000) <= 10.0


def test_a_server_that_is_started_again_is_waited_for() -> None:
    """By a service manager ten seconds after its end, as the docs have it, and then it opens its journal."""
    policy = RetryPolicy()
    shortest = sum(min(policy.cap, policy.base * 2**number) / 2 for number in range(policy.attempts - 1))
    assert 30 < shortest <= policy.total
