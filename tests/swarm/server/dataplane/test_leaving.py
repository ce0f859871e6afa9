"""How soon vLLM stops for a caller that leaves, measured over real sockets from the close to the cancellation."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import pytest

from gateway.app import create_app
from gateway.config.gateway import GatewayConfig
from tests.gateway.conftest import write_hooks
from tests.standins.vllm import listening, of, plain, role_chunk, token_chunk
from tests.swarm.server.conftest import Rig
from tests.swarm.server.dataplane.group import claim_group

pytestmark = pytest.mark.anyio

TIMES = 10
#: seconds that a departure may take to reach vLLM on any machine; what it takes on this one is printed
BOUND = 5


async def leave(rig: Rig, request: httpx.Request, client: httpx.AsyncClient, *, streaming: bool) -> float:
    """Seconds from the close of ``request``'s connection to its cancellation in vLLM."""
    loop = asyncio.get_running_loop()
    asked, cancelled = len(rig.vllm.requests), len(rig.vllm.cancellations)

    async def read() -> None:
        response = await client.send(request, stream=True)
        try:
            async for _ in response.aiter_bytes():
                pass
        finally:
            await response.aclose()

    calling = asyncio.create_task(read())
    await rig.eventually(lambda: len(rig.vllm.requests) == asked + 1)
    if streaming:
        await rig.eventually(lambda: rig.vllm.streaming > 0)
    left = loop.time()
    calling.cancel()
    await rig.eventually(lambda: len(rig.vllm.cancellations) > cancelled)
    with contextlib.suppress(asyncio.CancelledError):
        await calling
    assert len(rig.vllm.cancellations) == cancelled + 1
    return rig.vllm.cancellations[-1] - left


def judge(kind: str, delays: list[float]) -> None:
    print(f"\n{kind}: {len(delays)} departures, median {1000 * median(delays):.1f} ms, max {1000 * max(delays):.1f} ms")
    assert median(delays) <= BOUND


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
async def test_a_caller_that_leaves_stops_vllm_at_once(rig: Rig, grouped: bool, streaming: bool) -> None:
    others = [of(1, token_chunk([6]))] if grouped else []
    rig.vllm.default = rig.vllm.hang(role_chunk(), token_chunk([5]), *others)
    claimed = await claim_group(rig) if grouped else await rig.claim()
    delays = [
        await leave(rig, claimed.request(stream=streaming), rig.client, streaming=streaming) for _ in range(TIMES)
    ]
    judge(f"{'group' if grouped else 'episode'}, {'streamed' if streaming else 'plain'}", delays)
    # nothing of what was given up is recorded, or held against the episodes
    await rig.eventually(lambda: all(episode.in_flight == 0 for episode in rig.controller.pool.running.values()))
    assert not any(episode.calls or episode.quarantine_reason for episode in rig.controller.pool.running.values())
    rig.vllm.default = plain([1])
    assert (await claimed.chat()).status_code == 200


@pytest.fixture
async def gateway(rig: Rig, tmp_path: Path) -> AsyncGenerator[httpx.AsyncClient]:
    config = GatewayConfig(swarm_url=str(rig.client.base_url), hooks=str(write_hooks(tmp_path / "hooks")))
    async with (
        listening(create_app(config)) as url,
        httpx.AsyncClient(base_url=url, timeout=30, trust_env=False, verify=False) as http,
    ):
        yield http


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_user_that_leaves_the_gateway_stops_the_whole_group_at_once(
    rig: Rig, gateway: httpx.AsyncClient, streaming: bool
) -> None:
    rig.vllm.default = rig.vllm.hang()
    body: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "stream": streaming}
    delays: list[float] = []
    for _ in range(TIMES):
        request = gateway.build_request("POST", "/v1/chat/completions", json=body)
        delays.append(await leave(rig, request, gateway, streaming=False))
        await rig.eventually(lambda: not rig.controller.pool.running)
    judge(f"gateway, {'streamed' if streaming else 'plain'}", delays)
    assert all(sent["n"] == 2 for _, sent in rig.vllm.requests)
    assert rig.controller.pool.information().completed_episodes == 0
