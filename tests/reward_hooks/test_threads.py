"""Hook threads: each call has its own while it lasts, and keeps nobody waiting."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable

import pytest

from reward_hooks.runner import HookThreads
from swarm.errors import HookError

pytestmark = pytest.mark.anyio

#: Long enough that only a bug waits for it.
LONG = 60.0


async def test_calls_at_once_have_threads_of_their_own_which_later_calls_use_again() -> None:
    pool, meeting = HookThreads(3), threading.Barrier(3)

    def meet() -> threading.Thread:
        meeting.wait(LONG)
        return threading.current_thread()

    async def three(pool: HookThreads) -> set[threading.Thread]:
        return {done.value for done in await asyncio.gather(*(pool.call(meet, timeout=LONG) for _ in range(3)))}

    threads = await three(pool)
    assert len(threads) == 3 and all(thread.daemon for thread in threads)
    assert await three(pool) == threads
    # of hooks that a reload replaced, none stays
    del pool
    gc.collect()
    for thread in threads:
        await asyncio.to_thread(thread.join, LONG)
        assert not thread.is_alive()


@pytest.mark.parametrize("hook", [id, int], ids=["returns", "raises"])
async def test_an_idle_thread_holds_nothing_of_its_last_call(
    hook: Callable[[object], int],
) -> None:
    class Answer:
        pass

    pool, answer = HookThreads(1), Answer()
    held = weakref.ref(answer)
    gc.disable()
    try:
        done = await pool.call(hook, answer, timeout=LONG)
        assert isinstance(done.error, TypeError) == (hook is int)
        del answer, done
        async with asyncio.timeout(LONG):
            while held() is not None:  # noqa: ASYNC110
                await asyncio.sleep(0)
    finally:
        gc.enable()


async def test_a_thread_that_a_hook_has_ended_is_not_used_again() -> None:
    pool = HookThreads(1)
    thread = (await pool.call(threading.current_thread, timeout=LONG)).value
    # an exception that a hook has sent to its thread may come late, too
    thread.calls.put(None)
    await asyncio.to_thread(thread.join, LONG)
    assert (await pool.call(int, "7", timeout=LONG)).value == 7


async def test_a_thread_that_cannot_be_started_gives_its_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    pool = HookThreads(1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(HookError, match="can't start new thread") as refused:
            await pool.call(int, timeout=LONG)
    assert refused.value.code == "hook_busy"
    assert (await pool.call(int, "7", timeout=LONG)).value == 7


def test_a_call_may_outlive_its_event_loop() -> None:
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
