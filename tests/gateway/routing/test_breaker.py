"""When the breaker opens, what passes meanwhile, and how it closes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.breaker import Breaker, BreakerState
from swarm.errors import UnavailableError

pytestmark = pytest.mark.anyio


class Probe:
    """An upstream that answers a probe when the test says how."""

    def __init__(self) -> None:
        self.begun: asyncio.Queue[asyncio.Future[bool]] = asyncio.Queue()

    async def __call__(self) -> bool:
        answer = asyncio.get_running_loop().create_future()
        self.begun.put_nowait(answer)
        return await answer

    async def answer(self, well: bool) -> None:
        async with asyncio.timeout(10):
            (await self.begun.get()).set_result(well)
        for _ in range(3):
            await asyncio.sleep(0)


@pytest.fixture
def probe() -> Probe:
    return Probe()


@pytest.fixture
async def breaker(probe: Probe) -> AsyncIterator[Breaker]:
    breaker = Breaker("the upstream", probe, pause=0.001)
    yield breaker
    await breaker.close()


def fail(breaker: Breaker, times: int = 1) -> None:
    for _ in range(times):
        with suppress(ValueError), breaker.call():
            raise ValueError


async def test_it_opens_on_failures_and_closes_when_a_probe_is_answered(breaker: Breaker, probe: Probe) -> None:
    fail(breaker, 4)
    assert breaker.admits, "four failures say nothing"
    with breaker.call() as call:
        call.failed = True
    assert breaker.state is BreakerState.OPEN
    with pytest.raises(UnavailableError) as refused, breaker.call():
        raise AssertionError
    assert (refused.value.code, refused.value.retry_after) == ("upstream_unavailable", 1.0)
    await probe.answer(True)
    assert breaker.state is BreakerState.CLOSED
    fail(breaker, 4)
    assert breaker.admits, "what was before the outage does not count"


async def test_a_probe_is_no_request(breaker: Breaker, probe: Probe) -> None:
    fail(breaker, 5)
    answer = await probe.begun.get()
    assert breaker.state is BreakerState.OPEN and not breaker.admits
    answer.set_result(True)


@pytest.mark.parametrize("well", [True, False])
async def test_after_a_failed_probe_one_request_may_try(breaker: Breaker, probe: Probe, well: bool) -> None:
    """An upstream may answer requests although it fails at the probe's address."""
    fail(breaker, 5)
    await probe.answer(False)
    assert breaker.state is BreakerState.HALF_OPEN
    with breaker.call() as trial:
        assert not breaker.admits, "one at a time"
        trial.failed = not well
    assert breaker.state is (BreakerState.CLOSED if well else BreakerState.OPEN)
    if not well:
        await probe.answer(True)
        assert breaker.state is BreakerState.CLOSED
    fail(breaker, 4)
    assert breaker.admits, "what was before counts no more"


async def test_a_probe_that_raises_is_a_failed_one() -> None:
    begun = asyncio.Queue[int]()

    async def broken() -> bool:
        begun.put_nowait(1)
        raise RuntimeError("a defect of the probe")

    breaker = Breaker("the upstream", broken, pause=0.001)
    fail(breaker, 5)
    async with asyncio.timeout(10):
        await begun.get()
        await begun.get()
    with breaker.call():
        pass
    assert breaker.state is BreakerState.CLOSED
    await breaker.close()


@pytest.mark.parametrize("failed", [True, False])
async def test_a_request_from_before_the_outage_changes_nothing(breaker: Breaker, probe: Probe, failed: bool) -> None:
    with breaker.call() as old:
        old.failed = failed
        fail(breaker, 5)
    assert breaker.state is BreakerState.OPEN
    await probe.answer(True)
    assert breaker.admits


async def test_who_leaves_says_nothing(breaker: Breaker) -> None:
    for _ in range(9):
        with suppress(asyncio.CancelledError), breaker.call():
            raise asyncio.CancelledError
    assert breaker.admits


@given(st.lists(st.booleans(), max_size=60))
def test_it_opens_exactly_when_half_of_the_last_twenty_fail_five_at_least(failures: list[bool]) -> None:
    async def run() -> None:
        breaker = Breaker("the upstream", Probe(), pause=60.0)
        for number, failed in enumerate(failures):
            with breaker.call() as call:
                call.failed = failed
            last = failures[max(0, number - 19) : number + 1]
            assert breaker.admits == (sum(last) < 5 or sum(last) * 2 < len(last))
            if not breaker.admits:
                break
        await breaker.close()

    asyncio.run(run())
