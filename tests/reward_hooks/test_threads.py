"""Hook threads: they are reused, end when idle, and never get two calls at once."""

from __future__ import annotations

import asyncio
import threading

import pytest

from reward_hooks import runner
from reward_hooks.runner import HookThreads

pytestmark = pytest.mark.anyio

#: Long enough that only a bug waits for it.
LONG = 60.0


async def test_a_thread_is_reused() -> None:
    pool = HookThreads(2)
    first, second = [await pool.call(threading.current_thread, timeout=LONG) for _ in range(2)]
    assert first.value is second.value is not threading.current_thread()
    assert first.value.daemon


async def test_concurrent_calls_have_a_thread_each() -> None:
    pool, meeting = HookThreads(3), threading.Barrier(3)

    def meet() -> threading.Thread:
        meeting.wait(LONG)
        return threading.current_thread()

    done = await asyncio.gather(*(pool.call(meet, timeout=LONG) for _ in range(3)))
    assert len({id(one.value) for one in done}) == 3
    again = [await pool.call(threading.current_thread, timeout=LONG) for _ in range(3)]
    assert {id(one.value) for one in again} <= {id(one.value) for one in done}


async def test_an_idle_thread_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "IDLE_SECONDS", 0.01)
    pool = HookThreads(1)
    first = (await pool.call(threading.current_thread, timeout=LONG)).value
    await asyncio.to_thread(first.join, LONG)
    assert not first.is_alive()
    assert (await pool.call(threading.current_thread, timeout=LONG)).value is not first


async def test_no_call_is_lost_to_a_thread_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "IDLE_SECONDS", 0.0)
    pool = HookThreads(2)
    for number in range(200):
        assert (await pool.call(int, number, timeout=LONG)).value == number


def test_a_call_may_outlive_its_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "IDLE_SECONDS", 0.01)
    release, inside = threading.Event(), threading.Event()
    found: list[threading.Thread] = []

    def hang() -> None:
        found.append(threading.current_thread())
        inside.set()
        release.wait(LONG)

    async def leave() -> None:
        call = asyncio.create_task(HookThreads(1).call(hang, timeout=LONG))
        assert await asyncio.to_thread(inside.wait, LONG)
        call.cancel()
        await asyncio.wait({call})

    asyncio.run(leave())
    release.set()
    found[0].join(LONG)
    assert not found[0].is_alive()
