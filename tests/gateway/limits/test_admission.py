"""Places: bounded, fair, and never lost."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config import RouteSettings
from gateway.limits.admission import Admission, Load, Place
from gateway.types import Caller, Live, Relayed
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

    async def come(self, name: str, to: Route, caller: Caller, size: int = 0) -> None:
        self._leave[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._visit(name, to, caller, size))
        await settled()

    async def _visit(self, name: str, to: Route, caller: Caller, size: int) -> None:
        try:
            async with self.admission.place(to, caller, size):
                self.served.append(name)
                await self._leave[name].wait()
        except OverloadedError as exc:
            self.refused.append((name, exc))

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


async def test_keys_take_turns() -> None:
    users, to = Users(Admission()), route(max_in_flight=1)
    await users.come("first", to, ANN)
    for name in ("a1", "a2", "a3"):
        await users.come(name, to, ANN)
    await users.come("b1", to, BOB)
    for name in ("first", "a1", "b1", "a2"):
        await users.leave(name)
    assert users.served == ["first", "a1", "b1", "a2", "a3"]
    await users.all_leave()
    assert users.admission.load("route") == Load(0, 0, 0)


async def test_more_than_may_wait_are_told_when_to_come_back() -> None:
    users, to = Users(Admission()), route(max_in_flight=1, max_queued=1)
    for name in ("a", "b", "c"):
        await users.come(name, to, ANN)
    [(name, error)] = users.refused
    assert (name, error.status, error.should_retry) == ("c", 429, True)
    assert users.admission.load("route") == Load(1, 1, 0, refused=1)
    await users.all_leave()


async def test_the_estimate_follows_how_long_requests_take(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("gateway.limits.admission.time.monotonic", lambda: now)
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


async def test_who_waits_too_long_is_sent_away() -> None:
    users, to = Users(Admission()), route(max_in_flight=1, queue_seconds=0.01)
    await users.come("a", to, ANN)
    await users.come("b", to, ANN)
    await users.tasks["b"]
    assert [name for name, _ in users.refused] == ["b"]
    assert users.admission.load("route") == Load(1, 0, 0, refused=1)
    await users.all_leave()


async def test_a_key_that_fills_the_queue_gives_way_to_others() -> None:
    users, to = Users(Admission()), route(max_in_flight=1, max_queued=3)
    for name in ("a0", "a1", "a2", "a3"):
        await users.come(name, to, ANN)
    await users.come("b1", to, BOB)
    assert [name for name, _ in users.refused] == ["a3"]
    await users.come("b2", to, BOB)
    assert [name for name, _ in users.refused] == ["a3", "b2"], "they are even"
    await users.leave("a0")
    await users.leave("a1")
    assert users.served == ["a0", "a1", "b1"]
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


async def test_bytes_are_bounded_but_one_request_is_always_let_in() -> None:
    users, to = Users(Admission()), route(max_in_flight=1, max_held_bytes=2048)
    await users.come("huge", to, ANN, 10_000)
    await users.come("small", to, ANN, 1)
    assert [name for name, _ in users.refused] == ["small"]
    await users.leave("huge")
    await users.come("a", to, ANN, 1024)
    await users.come("b", to, ANN, 1024)
    await users.come("c", to, ANN, 1)
    assert [name for name, _ in users.refused] == ["small", "c"]
    await users.all_leave()
    assert users.admission.load("route") == Load(0, 0, 0, refused=2)


async def test_whoever_hangs_up_while_waiting_gives_way() -> None:
    users, to = Users(Admission()), route(max_in_flight=1)
    for name in ("a", "b", "c"):
        await users.come(name, to, ANN)
    await users.hang_up("b")
    await users.leave("a")
    assert users.served == ["a", "c"]
    await users.all_leave()


async def test_whoever_hangs_up_at_the_moment_of_a_grant_passes_it_on() -> None:
    admission = Admission()
    users, to = Users(admission), route(max_in_flight=1)
    async with admission.place(to, ANN) as place:
        await users.come("b", to, ANN)
        await users.come("c", to, ANN)
        place.release()
        users.tasks["b"].cancel()  # granted, but not yet running
        await settled()
    assert users.served == ["c"]
    await users.all_leave()
    assert admission.load("route") == Load(0, 0, 0)


@pytest.mark.parametrize("form", ["live", "relayed"])
async def test_a_place_is_kept_for_an_outcome_until_it_is_closed(form: str) -> None:
    closed: list[bool] = []

    async def chunks() -> Any:
        yield b""

    async def close() -> None:
        closed.append(True)

    outcome = Live(chunks(), {}, close) if form == "live" else Relayed(200, {}, chunks(), close)
    admission, to = Admission(), route()
    async with admission.place(to, ANN, 5) as place:
        kept = place.keep(outcome)
    assert admission.load("route") == Load(1, 0, 5)
    assert kept.close is not None
    await kept.close()
    await kept.close()
    assert admission.load("route") == Load(0, 0, 0) and closed == [True, True]


async def test_an_error_after_keeping_gives_the_place_back() -> None:
    async def chunks() -> Any:
        yield {}

    admission = Admission()
    with pytest.raises(ValueError, match="boom"):
        async with admission.place(route(), ANN) as place:
            place.keep(Live(chunks()))
            raise ValueError("boom")
    assert admission.load("route") == Load(0, 0, 0)


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
            assert load == Load(len(served), len(waiting), 0, len(users.refused))
            assert load.in_flight <= bound and load.queued <= queue
            held = {key: sum(name[0] == key for name in served) for key in "abc"}
            assert held["b"] <= 1 and held["c"] <= 2
            if load.in_flight < bound:
                # who waits though there is a place is at its own limit
                assert all(held[name[0]] == (callers[name[0]].max_in_flight or -1) for name in waiting)
        await users.all_leave()
        assert users.admission.load("route") == Load(0, 0, 0, len(users.refused))
        assert not users.admission._keys

    asyncio.run(play())


async def test_places_are_held_apart_from_the_stack_that_took_them() -> None:
    admission = Admission()
    async with AsyncExitStack() as stack:
        place = await stack.enter_async_context(admission.place(route(), ANN))
        assert isinstance(place, Place)
        place.release()
        assert admission.load("route").in_flight == 0
    assert admission.load("route") == Load(0, 0, 0)
