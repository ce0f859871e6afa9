"""Calls of vLLM's servers, which run beside the loop that serves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs the cpu or gpu extra")
import ray

from adapters.verl import replicas


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Of vLLM's HTTP server."""
    serving = asyncio.new_event_loop()
    thread = threading.Thread(target=serving.run_forever)
    thread.start()
    yield serving
    serving.call_soon_threadsafe(serving.stop)
    thread.join()
    serving.close()


def test_a_pause_and_the_next_trainer_wait_for_a_step_of_vllm_that_takes_longer_than_a_call(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused: list[str] = []

    async def pause_generation(mode: str, clear_cache: bool) -> None:
        # a prompt of many tokens, which vLLM computes in one step
        await asyncio.sleep(0)
        paused.append(mode)

    async def is_paused() -> bool:
        await asyncio.sleep(0)
        return bool(paused)

    server = SimpleNamespace(
        engine=SimpleNamespace(pause_generation=pause_generation, is_paused=is_paused),
        _server_task=SimpleNamespace(get_loop=lambda: loop),
    )
    servers: Any = replicas.VllmServers.__new__(replicas.VllmServers)
    call = SimpleNamespace(remote=lambda work: work(server))
    servers._handles = [handle] = [SimpleNamespace(__ray_call__=call)]
    allowed: list[float] = []
    monkeypatch.setattr(replicas, "CALL_TIMEOUT", 0.0)
    monkeypatch.setattr(ray, "get", lambda results, timeout: allowed.append(timeout) or results)
    replicas.check_serving(handle)
    servers.pause()
    assert paused == ["keep"] and min(allowed) > 0
