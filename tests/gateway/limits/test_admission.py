"""Places: bounded, and never lost."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config.route import RouteSettings
from gateway.limits import Admission
from gateway.types import Caller
from swarm.errors import OverloadedError

pytestmark = pytest.mark.anyio
ANN, BOB = Caller("ann"), Caller("bob")


@dataclass(frozen=True)
class Route:
    settings: RouteSettings
    name: str = "route"


def route(name: str = "route", **changes: Any) -> Route:
    return Route(RouteSettings(hooks="x", **changes), name)


async def settled() -> None:
    """Let everything that can go on do so."""
    for _ in range(10):
        await asyncio.sleep(0)


class Users:
    """Requests that hold their places until they are told to leave; ``served`` says in which order they got them."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.served: list[str] = []
        self.refused: list[tuple[str, OverloadedError]] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._leave: dict[str, asyncio.Event] = {}

    async def come(self, name: str, to: Route, caller: Caller) -> None:
        self._leave[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._visit(name, to, caller))
        await settled()

    async def _visit(self, name: str, to: Route, caller: Caller) -> None:
        try:
            release = await self.admission.enter(to.name, to.settings, caller)
        except OverloadedError as exc:
            self.refused.append((name, exc))
            return
        self.served.append(name)
        try:
            await self._leave[name].wait()
        finally:
            release()

    async def leave(self, name: str) -> None:
        self._leave[name].set()
        await self.tasks[name]
        await settled()

    async def hang_up(self, name: str) -> None:
        self.tasks[name].cancel()
        await settled()

    async def all_leave(self) -> None:
        for event in self._leave.values():
            event.set()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)


async def test_requests_that_wait_for_their_key_leave_the_queue_of_the_route_to_others() -> None:
    users, to = Users(Admission()), route(max_in_flight=2, max_queued=1)
    bounded = Caller("bounded", max_in_flight=1)
    for name, caller in (("a", bounded), ("b", bounded), ("c", ANN), ("d", ANN)):
        await users.come(name, to, caller)
    # b waits for its key, d for the route; e finds the route's queue full
    assert (users.admission.load("route").queued, users.refused) == (1, [])
    await users.come("e", to, ANN)
    assert [name for name, _ in users.refused] == ["e"]
    await users.all_leave()


async def test_the_estimate_follows_how_long_requests_take(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("gateway.limits.time.monotonic", lambda: now)
    users, to = Users(Admission()), route(max_in_flight=2, max_queued=3)
    await users.come("slow", to, ANN)
    now = 10.0
    await users.leave("slow")
    for name in ("a", "b", "c", "d", "e", "f"):
        await users.come(name, to, ANN)
    [(name, error)] = users.refused
    # four before whoever comes next would be through, two at a time, ten seconds each
    assert (name, error.retry_after) == ("f", 20.0)
    await users.all_leave()


async def test_the_estimate_of_a_bounded_key_is_that_of_its_own_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("gateway.limits.time.monotonic", lambda: now)
    users, to, narrow = Users(Admission()), route(max_in_flight=60, max_queued=2), Caller("narrow", max_in_flight=1)
    await users.come("slow", to, narrow)
    now = 10.0
    await users.leave("slow")
    for name in ("a", "b", "c", "d"):
        await users.come(name, to, narrow)
    [(name, error)] = users.refused
    assert (name, error.retry_after) == ("d", 30.0)
    await users.all_leave()


async def test_who_waits_too_long_is_sent_away() -> None:
    users, to = Users(Admission()), route(max_in_flight=1, queue_seconds=0.01)
    await users.come("a", to, ANN)
    await users.come("b", to, ANN)
    await users.tasks["b"]
    assert [name for name, _ in users.refused] == ["b"]
    load = users.admission.load("route")
    assert (load.in_flight, load.queued, load.refused) == (1, 0, 1)
    await users.all_leave()


async def test_a_keys_own_bound_holds_on_all_routes_and_blocks_nobody_else() -> None:
    users, one, two = Users(Admission()), route("one"), route("two")
    narrow = Caller("narrow", max_in_flight=1)
    await users.come("n1", one, narrow)
    await users.come("n2", two, narrow)
    await users.come("b", two, BOB)
    assert users.served == ["n1", "b"]
    await users.leave("n1")
    assert users.served == ["n1", "b", "n2"]
    await users.all_leave()


@given(
    moves=st.lists(
        st.tuples(st.sampled_from(["come", "leave", "hang up"]), st.integers(0, 100), st.sampled_from("abc")),
        max_size=60,
    ),
    bound=st.integers(1, 3),
    queue=st.integers(0, 4),
)
@settings(max_examples=150)
def test_no_sequence_of_comings_and_leavings_breaks_a_bound_or_loses_a_place(
    moves: list[tuple[str, int, str]], bound: int, queue: int
) -> None:
    async def play() -> None:
        users, to = Users(Admission()), route(max_in_flight=bound, max_queued=queue)
        callers = {"a": Caller("a"), "b": Caller("b", max_in_flight=1), "c": Caller("c", max_in_flight=2)}
        for number, (move, which, key) in enumerate(moves):
            here = [name for name, task in users.tasks.items() if not task.done()]
            if move == "come":
                await users.come(f"{key}{number}", to, callers[key])
            elif here and move == "leave":
                users._leave[here[which % len(here)]].set()
                await settled()
            elif here:
                await users.hang_up(here[which % len(here)])
            load = users.admission.load("route")
            served = [name for name in users.served if not users.tasks[name].done()]
            waiting = [name for name, task in users.tasks.items() if not task.done() and name not in users.served]
            assert (load.in_flight, load.refused) == (len(served), len(users.refused))
            # keys with a bound of their own wait for their own place first
            assert sum(name[0] == "a" for name in waiting) <= load.queued <= len(waiting)
            assert load.in_flight <= bound and load.queued <= queue
            assert all(sum(name[0] == key for name in waiting) <= queue + callers[key].max_in_flight for key in "bc")
            held = {key: sum(name[0] == key for name in served) for key in "abc"}
            assert held["b"] <= 1 and held["c"] <= 2
            if load.in_flight < bound:
                # who waits though there is a place is at its own limit
                assert all(held[name[0]] == (callers[name[0]].max_in_flight or -1) for name in waiting)
        await users.all_leave()
        load = users.admission.load("route")
        assert (load.in_flight, load.queued) == (0, 0)

    asyncio.run(play())
