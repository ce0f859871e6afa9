"""Work that outlives its request: finished at shutdown, or given up in the open."""

from __future__ import annotations

import asyncio
import logging

import pytest

from swarm.concurrency import Background

pytestmark = pytest.mark.anyio


async def test_leaving_waits_for_what_was_begun() -> None:
    done: list[int] = []

    async def work() -> None:
        await asyncio.sleep(0)
        done.append(1)

    async with Background(grace_seconds=5) as background:
        background.start(work(), "work")
        assert len(background) == 1
    assert done == [1] and len(background) == 0


async def test_work_goes_on_when_who_began_it_is_cancelled() -> None:
    go, done = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        await go.wait()
        done.set()

    async with Background(grace_seconds=5) as background:

        async def request() -> None:
            await asyncio.shield(background.start(work(), "work"))

        asking = asyncio.create_task(request())
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait({asking})
        go.set()
    assert done.is_set()


async def test_what_does_not_end_in_time_is_given_up_and_said(caplog: pytest.LogCaptureFixture) -> None:
    async with Background(grace_seconds=0.01) as background:
        task = background.start(asyncio.Event().wait(), "submitting group 1")
    assert task.cancelled()
    assert "submitting group 1 was still under way" in caplog.text


async def test_a_failure_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def fails() -> None:
        raise ValueError("boom")

    with caplog.at_level(logging.ERROR):
        async with Background(grace_seconds=5) as background:
            await asyncio.wait({background.start(fails(), "cleaning up")})
    assert "cleaning up failed" in caplog.text
