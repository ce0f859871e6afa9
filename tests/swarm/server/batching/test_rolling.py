"""Time passes while the engine rolls."""

from __future__ import annotations

from swarm.server.batching.rolling import RollingClock
from tests.swarm.server.batching.conftest import Clock


def test_it_stands_still_while_the_engine_does_not_roll(clock: Clock) -> None:
    rolling = RollingClock(clock)
    rolling.follow(True)
    assert rolling() == 1000
    clock.now += 5
    rolling.follow(False)
    clock.now += 70
    rolling.follow(False)
    assert (rolling(), rolling.when(1010)) == (1005, None)
    rolling.follow(True)
    assert rolling() == 1005
    clock.now += 1
    assert rolling() == 1006
    when = rolling.when(1010)
    assert when is not None
    assert 1080 < when < 1080.01
    clock.now = when
    assert rolling() >= 1010
