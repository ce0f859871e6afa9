"""Who is active, who agrees, who is forgotten."""

from __future__ import annotations

import pytest

from swarm.server.batching.clients import MAX_SILENT, Clients, RollingClock
from tests.swarm.server.batching.conftest import Clock


@pytest.fixture
def clients(clock: Clock) -> Clients:
    return Clients(timeout=100.0, clock=clock, wall_clock=clock, limit=3)


def test_a_call_in_flight_keeps_its_client_active(clients: Clients, clock: Clock) -> None:
    clients.seen("a", train=True).in_flight += 1
    clock.now += 1000
    assert clients.is_active("a")
    assert clients.others_train("b")
    clients.seen("a", train=True).in_flight -= 1
    clock.now += 100
    assert not clients.is_active("a")
    assert not clients.others_train("b")


def test_others_train(clients: Clients, clock: Clock) -> None:
    clients.seen("a", train=True)
    clients.seen("b", train=False)
    assert not clients.others_train("a")
    assert clients.others_train("b")
    clients.seen("b", train=True)
    assert clients.others_train("a")
    clock.now += 50
    clients.seen("b", train=False)
    clock.now += 50
    assert clients.is_active("b")
    assert not clients.others_train("a"), "its last sign that had to do with training is too old"


def test_the_longest_unseen_are_forgotten(clients: Clients, clock: Clock) -> None:
    clients.agree("a")
    clients.seen("b", train=True)
    clock.now += 100
    for name in ("c", "d"):
        clients.seen(name, train=True)
    assert [name for name, _ in clients.rows()] == ["d", "c", "b"]
    assert clients.any_agreed, "what it agreed to stands"
    for name in ("e", "f"):
        clients.seen(name, train=True)
    assert [name for name, _ in clients.rows()] == ["f", "e", "d"]
    assert clients.others_train("f")
    clients.count(["a", "d", ""], "dropped")
    assert [client.dropped for _, client in clients.rows()] == [0, 0, 1]


def test_a_client_with_a_call_in_flight_is_not_forgotten(clients: Clients) -> None:
    clients.seen("a", train=True).in_flight += 1
    for name in ("b", "c", "d"):
        clients.seen(name, train=True)
    clients.seen("a", train=True).in_flight -= 1
    assert dict(clients.rows())["a"].in_flight == 0


def test_a_client_that_is_forgotten_is_not_waited_for(clients: Clients) -> None:
    for name in ("a", "b", "c"):
        clients.take_part(name)
    for name in ("b", "c", "d"):
        clients.agree(name)
    assert clients.all_agreed


def test_the_clock_stands_still_while_the_engine_does_not_roll(clock: Clock) -> None:
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


def test_of_the_many_clients_that_came_once_a_monitor_is_shown_the_latest_and_those_that_agree(clock: Clock) -> None:
    clients = Clients(timeout=100.0, clock=clock, wall_clock=clock)
    clients.agree("agrees")
    for number in range(3 * MAX_SILENT):
        clients.seen(f"came once {number}", train=True)
    clock.now += 100
    clients.seen("here", train=True)
    latest = [f"came once {number}" for number in range(3 * MAX_SILENT - 1, 2 * MAX_SILENT - 1, -1)]
    assert [name for name, _ in clients.rows()] == ["here", *latest, "agrees"]
    assert clients.silent == 3 * MAX_SILENT + 1
