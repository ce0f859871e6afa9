"""Open groups: how long they stay open, and who makes them close."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import anyio.lowlevel
import pytest

from gateway.sessions.open_groups import Hold, OpenGroups
from swarm.states import EngineState
from tests.gateway.sessions.talk import StatusOfNobody

pytestmark = pytest.mark.anyio


class Bench:
    """Groups that are held open, and the order in which they close."""

    def __init__(self, status: StatusOfNobody) -> None:
        self.status = status
        self.groups = OpenGroups(status)
        self.closed: list[int] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.holds: list[Hold] = []

    def open(self, seconds: float = 1000.0) -> Hold:
        hold = Hold(asyncio.get_running_loop().time() + seconds)
        self.tasks.append(asyncio.create_task(self._keep(hold, len(self.holds))))
        self.holds.append(hold)
        return hold

    async def _keep(self, hold: Hold, number: int) -> None:
        await self.groups.keep(hold)
        self.closed.append(number)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await anyio.lowlevel.checkpoint()


@pytest.fixture
def bench() -> Bench:
    return Bench(StatusOfNobody())


async def test_a_group_is_closed_when_its_time_is_over(bench: Bench) -> None:
    bench.open(0.02)
    long = bench.open()
    await bench.until(lambda: bench.closed == [0])
    assert len(bench.groups) == 1
    long.shorten(float("-inf"))
    await bench.until(lambda: bench.closed == [0, 1])
    assert bench.groups.closed == {"window": 2}


async def test_time_can_be_given_as_well_as_taken(bench: Bench) -> None:
    hold = bench.open(0.02)
    hold.until += 1000
    other = bench.open(0.04)
    await bench.until(lambda: bench.closed)
    assert bench.closed == [1] and hold.why == "" and other.why == ""
    hold.release("room")
    await bench.until(lambda: bench.closed == [1, 0])


async def test_whoever_needs_room_gets_the_oldest(bench: Bench) -> None:
    for _ in range(3):
        bench.open()
    await bench.until(lambda: len(bench.groups) == 3)
    bench.groups.make_room()
    await bench.until(lambda: bench.closed == [0])
    bench.groups.make_room(2)
    await bench.until(lambda: bench.closed == [0, 1, 2])
    assert bench.groups.closed == {"room": 3}


async def test_at_most_half_of_what_runs_at_once_is_held() -> None:
    bench = Bench(StatusOfNobody(groups=6))
    for _ in range(5):
        bench.open()
    await bench.until(lambda: bench.closed == [0, 1])
    bench.open()
    await bench.until(lambda: bench.closed == [0, 1, 2])
    assert len(bench.groups) == 3 and bench.groups.closed == {"limit": 3}


@pytest.mark.parametrize("state", [EngineState.ROLLING_POST, EngineState.WEIGHT_SYNCING, EngineState.OFFLINE])
async def test_a_batch_that_is_complete_waits_for_no_open_group(bench: Bench, state: EngineState) -> None:
    for _ in range(3):
        bench.open()
    await bench.until(lambda: bench.status.watched and len(bench.groups) == 3)
    await bench.status.enter(state)
    await bench.until(lambda: bench.closed == [0, 1, 2])
    assert bench.groups.closed == {"sync": 3}
    # one that comes while the batch still is on its way learns so at once
    bench.open()
    await bench.until(lambda: bench.closed == [0, 1, 2, 3])
    await bench.status.enter(EngineState.ROLLING)
    bench.open()
    await bench.until(lambda: len(bench.groups) == 1 and bench.status.watched == 3)


@pytest.mark.parametrize(("staleness", "syncs"), [(1, 1), (3, 3), (None, 50)])
async def test_where_episodes_outlive_a_sync_so_do_open_groups(bench: Bench, staleness: int | None, syncs: int) -> None:
    bench.status.serving = "always"
    bench.status.job = bench.status.job.model_copy(update={"max_staleness": staleness})
    bench.open()
    await bench.until(lambda: bench.holds[0].began == 0)
    for _ in range(syncs - 1):
        await bench.status.enter(EngineState.WEIGHT_SYNCING)
        await bench.status.enter(EngineState.ROLLING)
    bench.open()
    await bench.until(lambda: len(bench.groups) == 2)
    await bench.status.enter(EngineState.WEIGHT_SYNCING)
    if staleness is not None:
        await bench.until(lambda: 0 in bench.closed)
    # the second has seen one sync
    assert [bool(hold.why) for hold in bench.holds] == [staleness is not None, staleness == 1]
    await bench.status.enter(EngineState.OFFLINE)
    await bench.until(lambda: len(bench.closed) == 2)


async def test_the_engine_is_watched_only_while_groups_are_open(bench: Bench) -> None:
    assert bench.status.watched == 0
    hold = bench.open()
    await bench.until(lambda: bench.status.watched == 1)
    bench.open()
    hold.release("room")
    await bench.until(lambda: bench.closed == [0])
    assert bench.status.watched == 1
    bench.holds[1].release("room")
    await bench.until(lambda: bench.closed == [0, 1])
    bench.open()
    await bench.until(lambda: bench.status.watched == 2)
    bench.groups.close()
    await asyncio.gather(*bench.tasks)


async def test_shutdown_closes_all_and_lets_none_open(bench: Bench) -> None:
    bench.open()
    await bench.until(lambda: len(bench.groups) == 1)
    bench.groups.close()
    bench.open()
    await bench.until(lambda: bench.closed == [0, 1])
    assert bench.groups.closed == {"shutdown": 2}


async def test_a_server_that_is_away_closes_nothing() -> None:
    class Away(StatusOfNobody):
        async def watch(self, on_status: object) -> None:
            self.watched += 1
            await asyncio.Event().wait()

    bench = Bench(Away())
    bench.open()
    await bench.until(lambda: bench.status.watched)
    assert bench.closed == [] and len(bench.groups) == 1
    bench.groups.close()
    await asyncio.gather(*bench.tasks)


async def test_a_group_that_is_given_up_is_forgotten(bench: Bench) -> None:
    bench.open()
    await bench.until(lambda: len(bench.groups) == 1)
    bench.tasks[0].cancel()
    await asyncio.gather(*bench.tasks, return_exceptions=True)
    assert len(bench.groups) == 0
