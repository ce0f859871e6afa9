"""What is masked leaves no trace: searched for as in ``tests/gateway/data/test_no_trace.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gateway.data import test_no_trace as unmasked
from tests.gateway.data.test_no_trace import MARK, everything, failing, keeping_all, records, traces
from tests.swarm.server import conftest as server

pytestmark = pytest.mark.anyio

rig = server.rig
overrides = unmasked.overrides


async def test_what_is_masked_is_trained_and_leaves_no_trace(rig: server.Rig, tmp_path: Path) -> None:
    before = await records(rig)
    masking = {"redact": "before_sampling", "patterns": {"mark": r"Zweitausend\w*"}}
    async with keeping_all(rig, tmp_path, data=masking, claim_wait_seconds=0.05) as http:
        await everything(http, {})
        await failing(rig, http, {})
        sent = [body for _, body in rig.vllm.requests]
    assert sent and not any(MARK in str(body) for body in sent)
    assert await records(rig) > before and traces(tmp_path) == set()
