"""Follow the engine's state by long polls, and call back when it begins to sync weights.

Invariant: a callback is called once per entry into WEIGHT_SYNCING that the server counts, even one that was over before
we learnt of it; nothing of a watch is left once it was stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import threading
import time
from collections.abc import Awaitable, Callable

from swarm.client import wire
from swarm.client.flows import Flows
from swarm.client.transport import AsyncDriver, HttpxSender
from swarm.errors import AuthenticationError, SwarmGatewayError
from swarm.protocol import ServerStatus

logger = logging.getLogger(__name__)

#: Seconds of one long poll of a watch, which unlike a thread's can be cancelled.
WATCH_POLL = 30.0
#: Seconds that a callback which is running gets when its watch is stopped.
STOP_GRACE = 10.0

OnStatus = Callable[[ServerStatus], Awaitable[None]]
Callback = Callable[[], object]


async def follow(driver: AsyncDriver, flows: Flows, first: ServerStatus, on_status: OnStatus) -> None:
    """Call ``on_status`` with each status after a change since ``first``, until cancelled.

    A server that is away is waited for; one that refuses our token ends it (logged).
    """
    change = first.engine_changes
    rounds = 0
    while True:
        asked = time.monotonic()
        try:
            status = await driver.run(flows.perform(wire.wait_status_call(change, WATCH_POLL)))
        except AuthenticationError as exc:
            logger.error("the engine's state is no longer watched: %s", exc.message)
            return
        except SwarmGatewayError as exc:
            logger.warning("the engine's state is unknown: %s", exc.message)
            rounds += 1
        else:
            early = time.monotonic() - asked < WATCH_POLL / 2
            if status.engine_changes is None or status.engine_changes != change:
                await on_status(status)
            rounds = rounds + 1 if early and status.engine_changes == change else 0
            change = status.engine_changes
        if rounds:
            await asyncio.sleep(flows.breath(rounds, flows.policy.cap))


class WeightSyncCallbacks:
    """Whom to call when the engine begins to sync weights; an error of one is logged and stops nobody else.

    Args:
        first: a status from before the first entry that counts.
    """

    def __init__(self, first: ServerStatus) -> None:
        self._seen = first.weight_syncs
        self._callbacks: list[Callback] = []

    def add(self, callback: Callback) -> None:
        """Call ``callback`` too, from the next entry on; what it returns is awaited if that is awaitable."""
        self._callbacks.append(callback)

    async def observe(self, status: ServerStatus) -> None:
        """Call everyone, once per entry since the status before."""
        # a smaller number is that of a server which was started anew
        entries = status.weight_syncs - (self._seen if status.weight_syncs >= self._seen else 0)
        self._seen = status.weight_syncs
        for _ in range(entries):
            for callback in tuple(self._callbacks):
                try:
                    result = callback()
                    if inspect.isawaitable(result):
                        await result
                except Exception:
                    logger.exception("a callback for the weight sync failed")


class WatchThread:
    """:func:`follow` in a thread with a loop of its own, so that stopping it need not wait for a poll to end."""

    def __init__(self, flows: Flows, first: ServerStatus, on_status: OnStatus) -> None:
        self._work = (flows, first, on_status)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._main, name="swarm-watch", daemon=True)
        self._thread.start()
        self._ready.wait()

    def stop(self) -> None:
        """End the thread; one that is in a callback gets :data:`STOP_GRACE` seconds."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                loop.call_soon_threadsafe(self._stopping.set)
        if threading.current_thread() is not self._thread:
            self._thread.join(STOP_GRACE)
            if self._thread.is_alive():
                logger.warning("a callback for the weight sync does not return; its thread is left behind")

    def _main(self) -> None:
        try:
            asyncio.run(self._watch())
        finally:
            self._ready.set()

    async def _watch(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready.set()
        flows, first, on_status = self._work
        driver = AsyncDriver(HttpxSender())
        works = (
            asyncio.create_task(follow(driver, flows, first, on_status)),
            asyncio.create_task(self._stopping.wait()),
        )
        try:
            await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for work in works:
                work.cancel()
            await asyncio.gather(*works, return_exceptions=True)
            await driver.close()
