"""From the user's trace to the training step: through the real swarm server, its journal and what is exported."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.app import create_app
from gateway.config.gateway import GatewayConfig
from swarm.server.journal.export import export
from swarm.types import StepResult
from tests.gateway.conftest import write_hooks
from tests.standins.vllm import listening
from tests.swarm.server import conftest as server

pytestmark = pytest.mark.anyio

overrides = server.overrides
rig = server.rig
TRACES = ["0af7651916cd43dd8448eb211c80319c", "4bf92f3577b34da6a3ce929d0e0e4736"]
BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize("tracing", [None, {"endpoint": "http://127.0.0.1:9"}])
async def test_the_step_that_trained_on_a_request_is_found_by_its_trace(
    rig: server.Rig, tmp_path: Path, tracing: dict[str, Any] | None
) -> None:
    config = GatewayConfig.model_validate(
        {
            "swarm_url": str(rig.client.base_url),
            "hooks": str(write_hooks(tmp_path / "hooks")),
            "acknowledge_seconds": 5.0,
            "tracing": tracing,
        }
    )
    async with (
        listening(create_app(config)) as url,
        httpx.AsyncClient(base_url=url, timeout=30, trust_env=False, verify=False) as http,
    ):
        asked: list[str] = []
        for trace in TRACES:
            headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
            response = await http.post("/v1/chat/completions", json=BODY, headers=headers)
            assert response.headers["x-swarm-trained"] == "true"
            asked.append(response.headers["x-request-id"])
    batch = await rig.controller.next_batch()
    rig.controller.step_done(StepResult(step=1, batch_id=batch.batch_id, metrics={}, seconds=3.0))
    await rig.controller.synced()

    await asyncio.to_thread(export, tmp_path / "journal.db", tmp_path / "x.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert [(row["trace_id"], row["request_id"], row["step"]) for row in rows] == [
        (trace, request_id, 1) for trace, request_id in zip(TRACES, asked, strict=True) for _ in range(2)
    ]
