"""Several swarm servers at once, each with its own engine.

Invariant: one that fails is named and changes nothing about the others.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from swarm.job import TrainJob

if TYPE_CHECKING:
    from swarm.client.asynchronous import AsyncSwarmClient
    from swarm.client.sync import SwarmClient


def start_all(pairs: Sequence[tuple[SwarmClient, TrainJob]], force_restart: bool) -> None:
    """Make each engine run its job, all at once, and wait for all.

    Raises:
        ExceptionGroup: some failed; it names their servers.
    """
    if not pairs:
        return
    stopping = threading.Event()
    with ThreadPoolExecutor(len(pairs), thread_name_prefix="starting") as pool:
        futures = [
            pool.submit(client.auto_sync_train_config_and_start_engine, job, force_restart, stopping=stopping)
            for client, job in pairs
        ]
        try:
            wait(futures)
        except BaseException:
            # Ctrl-C: the threads end with their next step instead of with their engines' boot
            stopping.set()
            raise
    _raise([(client.server_url, future.exception()) for (client, _), future in zip(pairs, futures, strict=True)])


async def start_all_async(pairs: Sequence[tuple[AsyncSwarmClient, TrainJob]], force_restart: bool) -> None:
    """The same on an event loop."""
    works = [client.auto_sync_train_config_and_start_engine(job, force_restart) for client, job in pairs]
    errors = await asyncio.gather(*works, return_exceptions=True)
    _raise([(client.server_url, error) for (client, _), error in zip(pairs, errors, strict=True)])


def _raise(outcomes: list[tuple[str, BaseException | None]]) -> None:
    failed: list[Exception] = []
    for url, error in outcomes:
        if isinstance(error, Exception):
            error.add_note(f"this is the swarm server {url}")
            failed.append(error)
        elif error is not None:
            raise error
    if failed:
        urls = ", ".join(url for url, error in outcomes if error is not None)
        raise ExceptionGroup(f"{len(failed)} of {len(outcomes)} engines did not start: {urls}", failed)
