"""Garbage is found when it is young, and later when everything is looked at; nothing else of the process changes."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable

import anyio.lowlevel
import pytest

from swarm.server import garbage
from swarm.server.garbage import YOUNG, collect_in_steps

pytestmark = pytest.mark.anyio


class Thing:
    """One that holds itself."""

    def __init__(self) -> None:
        self.me = self


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await anyio.lowlevel.checkpoint()


async def test_garbage_is_found_young_and_what_lives_is_left_alone() -> None:
    before, callbacks = gc.get_threshold(), len(gc.callbacks)
    task = asyncio.create_task(collect_in_steps())
    try:
        await eventually(lambda: gc.get_threshold()[0] == YOUNG)
        frozen = gc.get_freeze_count()
        kept = [Thing() for _ in range(2 * YOUNG)]
        assert gc.get_freeze_count() >= frozen + YOUNG
        lost = [weakref.ref(Thing()) for _ in range(2 * YOUNG)]
        kept += [Thing() for _ in range(2 * YOUNG)]
        # those that were just being made when a look came live on
        assert sum(one() is not None for one in lost[:YOUNG]) < YOUNG / 10
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert (gc.get_threshold(), len(gc.callbacks), gc.get_freeze_count()) == (before, callbacks, 0)


async def test_garbage_that_lived_for_a_while_is_found_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "PAUSE", 0)
    monkeypatch.setattr(garbage, "STEPS", 3)
    monkeypatch.setattr(garbage, "SHARE", 1.0)
    task = asyncio.create_task(collect_in_steps())
    try:
        await eventually(lambda: gc.get_threshold()[0] == YOUNG)
        old = Thing()
        gc.collect(0)
        gone = weakref.ref(old)
        del old
        gc.collect(0)
        assert gone() is not None, "it was frozen"
        gc.collect(0)
        await eventually(lambda: gone() is None)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(("share", "often"), [(1e-9, False), (1e9, True)])
async def test_looks_at_everything_have_a_share_of_the_time(
    monkeypatch: pytest.MonkeyPatch, share: float, often: bool
) -> None:
    monkeypatch.setattr(garbage, "PAUSE", 0)
    monkeypatch.setattr(garbage, "STEPS", 1)
    monkeypatch.setattr(garbage, "SHARE", share)
    looks = 0

    def count(phase: str, info: dict[str, int]) -> None:
        nonlocal looks
        looks += phase == "stop" and info["generation"] == 2

    gc.callbacks.append(count)
    task = asyncio.create_task(collect_in_steps())
    try:
        await eventually(lambda: gc.get_threshold()[0] == YOUNG)
        for _ in range(20):
            gc.collect(0)
            for _ in range(3):
                await anyio.lowlevel.checkpoint()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        gc.callbacks.remove(count)
    assert looks > 5 if often else looks == 1
