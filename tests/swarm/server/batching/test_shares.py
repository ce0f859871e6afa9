"""Places in the current batch: whole groups, tasks begun, and what runs without a hint."""

from __future__ import annotations

import pytest

from swarm.server.batching.shares import Shares
from tests.swarm.server.batching.conftest import Clock


@pytest.fixture
def shares(clock: Clock) -> Shares:
    return Shares(num_repeat=2, timeout=100.0, clock=clock)


def test_a_task_takes_a_place_while_it_runs_waits_or_is_complete(shares: Shares) -> None:
    shares.claimed("a", "t", 2)
    assert (shares.places("a"), shares.live_places("a"), shares.running) == (1, 1, 2)
    shares.released("a", "t")
    shares.joined("a", "t")
    shares.released("a", "t")
    assert (shares.places("a"), shares.live_places("a"), shares.waiting_of("a")) == (1, 0, 1)
    shares.joined("a", "t")
    for _ in range(2):
        shares.parted(["a"], "t")
    shares.completed(["a", "a"])
    assert (shares.places("a"), shares.live_places("a"), shares.waiting_of("a")) == (1, 1, 2)
    shares.left(["a", "a"])
    assert (shares.places("a"), shares.waiting_of("a"), shares.running) == (0, 0, 0)


def test_a_group_of_two_clients_takes_a_place_of_both(shares: Shares) -> None:
    shares.completed(["a", "b"])
    assert [shares.places(client) for client in ("a", "b", "c")] == [1, 1, 0]


def test_a_task_that_runs_twice_takes_two_places(shares: Shares) -> None:
    shares.claimed("a", "t", 2)
    assert shares.begun("a", "t", 2) is False
    assert shares.places("a", "t", 1) == 2
    shares.claimed("a", "t", 1)
    assert shares.places("a") == 2
    assert shares.begun("a", "t", 4)
    assert not shares.begun("a", "other", 4)
    assert not shares.begun("b", "t", 4)


def test_episodes_without_a_hint_fill_tasks_up_before_they_begin_new_ones(shares: Shares) -> None:
    shares.joined("a", "t")
    shares.claimed("a", "", 1)
    assert shares.places("a") == 1
    shares.claimed("a", "", 2)
    assert shares.places("a") == 2
    assert shares.places("a", "", 1) == 3
    for _ in range(3):
        shares.released("a", "")
    assert shares.places("a") == 1


def test_a_task_that_rests_too_long_is_abandoned_until_it_is_taken_up_again(shares: Shares, clock: Clock) -> None:
    shares.joined("a", "t")
    clock.now += 50
    shares.joined("a", "u")
    assert shares.next_abandoned() == clock.now + 50
    clock.now += 49
    assert shares.places("a") == 2
    clock.now += 1
    assert shares.places("a") == 1
    assert shares.begun("a", "t", 2)
    assert shares.places("a", "t", 1) == 2
    shares.claimed("a", "t", 1)
    assert (shares.places("a"), shares.live_places("a")) == (2, 1)
    clock.now += 1000
    assert (shares.places("a"), shares.next_abandoned()) == (1, None)
    shares.parted(["a"], "u")
    assert (shares.places("a"), shares.waiting_of("a")) == (1, 1)


def test_an_old_episode_that_goes_does_not_bring_its_task_back(clock: Clock) -> None:
    shares = Shares(num_repeat=4, timeout=100.0, clock=clock)
    shares.joined("a", "t")
    shares.joined("a", "t")
    clock.now += 100
    assert shares.places("a") == 0
    shares.parted(["a"], "t")
    assert (shares.places("a"), shares.next_abandoned()) == (0, None)
    shares.joined("a", "t")
    assert shares.places("a") == 1
