"""How long a waiting client takes to learn that the engine is ROLLING: the median of several tries, over real sockets.

The bound is 50 ms; a quiet machine needs some 2 ms, so only a pause between two polls, or an answer held up on the
wire, goes beyond it. ``-s`` prints the figures.
"""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from swarm.client import SwarmClient
from swarm.server.app import create_app
from swarm.server.config import ServerConfig
from swarm.states import EngineState
from tests.standins.vllm import listening as serving
from tests.swarm.client.test_with_server import JOB, READY, Swarm

BOUND = 0.050
TRIES, CLIENTS = 7, 4
PATIENCE = 30.0


def wait_for_state(client: SwarmClient, claimed: list[str]) -> None:
    client.wait_for_state(EngineState.ROLLING, EngineState.WEIGHT_SYNCING, wait_seconds=PATIENCE)


def claim(client: SwarmClient, claimed: list[str]) -> None:
    uuid, _ = client.begin_episode()
    claimed.append(uuid)


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.parametrize("wait", [wait_for_state, claim])
async def test_a_waiting_client_learns_of_rolling_at_once(
    tmp_path: Path, anyio_backend: str, wait: Callable[[SwarmClient, list[str]], None]
) -> None:
    app = create_app(ServerConfig(run_dir=tmp_path, token="secret"))
    learnt: list[float] = []
    async with serving(app) as url:
        swarm = Swarm(url, app.state.controller)
        with SwarmClient(url, token="secret") as client:
            await asyncio.to_thread(client.get_engine_status)
            for _ in range(TRIES):
                swarm.controller.offline("again")
                swarm.controller.sync_job(JOB)
                swarm.controller.boot()
                times: list[float] = []
                claimed: list[str] = []

                def work(times: list[float] = times, claimed: list[str] = claimed) -> None:
                    wait(client, claimed)
                    times.append(time.monotonic())

                threads = [threading.Thread(target=work) for _ in range(CLIENTS)]
                for thread in threads:
                    thread.start()
                await asyncio.sleep(0.2)  # they poll by then; should one not, it learns at once as well
                began = time.monotonic()
                swarm.controller.rollout_ready(READY)
                for thread in threads:
                    await asyncio.to_thread(thread.join, PATIENCE)
                learnt += [moment - began for moment in times]
                await asyncio.to_thread(client.abort, claimed)
    assert len(learnt) == TRIES * CLIENTS
    median, worst = statistics.median(learnt), max(learnt)
    print(f"\n{wait.__name__}: median {median * 1000:.1f} ms, worst {worst * 1000:.1f} ms of {len(learnt)}")
    assert median < BOUND
