"""Blocks that somebody else ends, and things that happen once."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from swarm.concurrency import ClientGoneError, Interruptible, Once, ends_by_signals, until_gone

pytestmark = pytest.mark.anyio


class StopError(Exception):
    pass


#: Ctrl-C again and again while the main thread looks at the event that each sets; another thread sends them all.
SIGNALS = """
import os, signal, threading
from swarm.concurrency import on_signals
stopping, ended, calls = threading.Event(), threading.Event(), []

def stop():
    calls.append(1)
    stopping.set()
    stopping.clear()

def send():
    for _ in range(20_000):
        os.kill(os.getpid(), signal.SIGINT)
    ended.set()

with on_signals(stop, signal.SIGINT):
    threading.Thread(target=send).start()
    while not ended.is_set():
        stopping.wait(0)
print(len(calls) > 0, signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""


def test_a_signal_may_come_while_the_main_thread_waits_for_what_it_sets() -> None:
    done = subprocess.run([sys.executable, "-c", SIGNALS], capture_output=True, text=True, timeout=60)
    assert done.stdout == "True True\n", done.stderr


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_all_are_told_though_one_fails_and_none_that_is_forgotten_meanwhile() -> None:
    once, told = Once(), list[str]()

    def fails() -> None:
        once.forget(forgotten)
        raise ZeroDivisionError

    def forgotten() -> None:
        told.append("forgotten")

    def last() -> None:
        told.append("last")

    for one in (fails, forgotten, last):
        once.tell(one)
    once.happen()
    assert told == ["last"]


async def test_a_block_ends_with_the_first_error_and_cleans_up_before() -> None:
    block, events = Interruptible(), list[str]()

    async def work() -> None:
        try:
            with block:
                try:
                    await forever()
                finally:
                    await turns()
                    events.append("cleaned up")
        except StopError as exc:
            events.append(str(exc))
            # the task is as if nobody had cancelled it
            await turns()
            events.append("went on")

    task = asyncio.create_task(work())
    await turns(1)
    block.interrupt(StopError("one"))
    block.interrupt(StopError("two"))
    await asyncio.wait_for(task, 20)
    assert events == ["cleaned up", "one", "went on"]
    assert task.cancelling() == 0


async def test_an_error_of_the_block_itself_stands() -> None:
    async def work(block: Interruptible) -> None:
        with block:
            try:
                await forever()
            except asyncio.CancelledError:
                raise KeyError("mine") from None

    block = Interruptible()
    task = asyncio.create_task(work(block))
    await turns(1)
    block.interrupt(StopError())
    with pytest.raises(KeyError):
        await asyncio.wait_for(task, 20)


async def test_a_task_that_is_cancelled_as_well_stays_cancelled() -> None:
    async def work(block: Interruptible) -> None:
        with block:
            await forever()

    for cancelled_first in (False, True):
        block = Interruptible()
        task = asyncio.create_task(work(block))
        await turns(1)
        if cancelled_first:
            task.cancel()
        block.interrupt(StopError())
        if not cancelled_first:
            task.cancel()
        await asyncio.wait([task], timeout=20)
        assert task.cancelled()


async def test_blocks_within_each_other_end_with_their_own_errors() -> None:
    outer, inner = Interruptible(), Interruptible()
    seen = list[str]()

    async def work() -> None:
        try:
            with outer:
                try:
                    with inner:
                        await forever()
                except StopError as exc:
                    seen.append(str(exc))
                    await forever()
        except StopError as exc:
            seen.append(str(exc))

    task = asyncio.create_task(work())
    await turns(1)
    inner.interrupt(StopError("inner"))
    await turns()
    assert seen == ["inner"]
    outer.interrupt(StopError("outer"))
    await asyncio.wait_for(task, 20)
    assert seen == ["inner", "outer"]


def messages(*kinds: str) -> Callable[[], Awaitable[Any]]:
    """ASGI's receive, which has nothing more to say after these."""
    left = [{"type": kind} for kind in kinds]

    async def receive() -> Any:
        await turns(1)
        return left.pop(0) if left else await forever()

    return receive


async def test_work_ends_with_its_caller() -> None:
    cancelled = asyncio.Event()

    async def work() -> None:
        try:
            await forever()
        finally:
            cancelled.set()

    with pytest.raises(ClientGoneError):
        await asyncio.wait_for(until_gone(messages("http.request", "http.disconnect"), work()), 20)
    assert cancelled.is_set()


async def test_what_is_wrong_with_the_connection_ends_the_work() -> None:
    async def receive() -> Any:
        raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        await asyncio.wait_for(until_gone(receive, forever()), 20)


def test_who_asks_late_is_told_at_once_and_who_was_forgotten_never() -> None:
    once, told = Once(), list[str]()

    def first() -> None:
        told.append("first")

    def second() -> None:
        told.append("second")

    once.tell(first)
    once.tell(second)
    once.forget(second)
    assert told == [] and not once.happened
    once.happen()
    once.happen()
    assert told == ["first"] and once.happened
    once.tell(second)
    assert told == ["first", "second"]


async def test_a_task_that_interrupts_itself_hears_of_it_within_its_block_or_never() -> None:
    with Interruptible() as block:
        block.interrupt(StopError())
    await turns()
    with pytest.raises(StopError), Interruptible() as block:
        block.interrupt(StopError())
        await asyncio.wait_for(forever(), 20)


def test_what_is_started_with_nohup_goes_on_when_its_terminal_is_closed() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ends_by_signals():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
