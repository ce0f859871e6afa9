"""A replay of held-out prompts through a gateway and a swarm server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.replay.compare import GATEWAY_HEADERS
from gateway.replay.run import ReplayConfig, replay
from gateway.replay.senders import HttpSender
from gateway.reports.printing import summary
from tests.gateway.conftest import gateway_before
from tests.gateway.rollout.test_untrained import FOUR
from tests.swarm.server import conftest as server

pytestmark = pytest.mark.anyio


async def test_a_replay_scores_held_out_prompts_and_trains_nothing(rig: server.Rig, tmp_path: Path) -> None:
    data = tmp_path / "held_out.jsonl"
    data.write_text("".join(json.dumps({"question": f"q{number}?"}) + "\n" for number in range(8)))
    rig.vllm.script.extend([FOUR] * 8)
    before = rig.controller.pool.information()
    config = ReplayConfig(data=data, target="gateway", concurrency=2, no_train=True)
    async with gateway_before(
        str(rig.client.base_url), tmp_path, train_fraction=1.0, when_batch_waits="single"
    ) as http:
        url, model = f"{http.base_url}".rstrip("/") + "/v1", {"model": rig.controller.job.model_name}
        async with HttpSender(url, "", model, 30.0, GATEWAY_HEADERS) as sender:
            told = await replay(config, sender)
    assert told.failures == {} and rig.controller.pool.information() == before
    # the hook gives a tenth for each word
    assert [one.reward for one in told.scores] == [0.25] * 8 and told.steps == []
    assert "mean reward: 0.250 [0.250, 0.250] on 8 prompts" in summary(told)[-1]
