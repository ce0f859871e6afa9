"""Merged generators: nothing lost, nothing left running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from swarm.server.dataplane.merging import merged

pytestmark = pytest.mark.anyio


async def counting(name: str, count: int, closed: list[str], error: Exception | None = None) -> AsyncGenerator[str]:
    try:
        for at in range(count):
            await asyncio.sleep(0)
            yield f"{name}{at}"
        if error is not None:
            raise error
    finally:
        closed.append(name)


async def test_all_items_come_and_those_of_one_source_in_order() -> None:
    closed: list[str] = []
    items = [
        item async for item in merged(counting("a", 3, closed), counting("b", 5, closed), counting("c", 0, closed))
    ]
    assert [item for item in items if item[0] == "a"] == ["a0", "a1", "a2"]
    assert len(items) == 8 and sorted(closed) == ["a", "b", "c"]
    assert [item async for item in merged()] == []


async def test_sources_run_together() -> None:
    meeting = asyncio.Barrier(2)

    async def meet() -> AsyncGenerator[int]:
        await meeting.wait()
        yield 1

    async with asyncio.timeout(10):
        assert [item async for item in merged(meet(), meet())] == [1, 1]


async def test_an_error_ends_all_sources() -> None:
    closed: list[str] = []
    with pytest.raises(ValueError, match="boom"):
        async for _ in merged(counting("a", 2, closed, ValueError("boom")), counting("b", 10**6, closed)):
            pass
    assert sorted(closed) == ["a", "b"]


async def test_closing_it_closes_all_sources() -> None:
    closed: list[str] = []
    async with aclosing(merged(counting("a", 10**6, closed), counting("b", 10**6, closed))) as items:
        async for _ in items:
            break
    assert sorted(closed) == ["a", "b"]
