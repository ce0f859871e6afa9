"""From the user's trace to the training step: through the real swarm server, its journal and what is exported."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from swarm.server.journal.export import export
from swarm.types import StepResult
from tests.gateway.conftest import ask, gateway_before
from tests.swarm.server import conftest as server

pytestmark = pytest.mark.anyio

overrides = server.overrides
rig = server.rig
TRACES = ["0af7651916cd43dd8448eb211c80319c", "4bf92f3577b34da6a3ce929d0e0e4736"]


@pytest.mark.usefixtures("exported")
@pytest.mark.parametrize("tracing", [None, {}])
async def test_the_step_that_trained_on_a_request_is_found_by_its_trace(
    rig: server.Rig, tmp_path: Path, tracing: Any
) -> None:
    async with gateway_before(str(rig.client.base_url), tmp_path, tracing=tracing) as http:
        asked: list[str] = []
        for trace in TRACES:
            headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
            response = await ask(http, headers)
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
