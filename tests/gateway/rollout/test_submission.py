"""The submitter on the real swarm server: whatever becomes of a submission, it is counted and no episode stays."""

from __future__ import annotations

import pytest

from gateway.rollout.server import Swarm
from gateway.stats import DropReason, Stats
from swarm.types import WorkflowOutput
from tests.gateway.rollout.conftest import JOB
from tests.swarm.server import conftest as server

pytestmark = pytest.mark.anyio


async def test_what_cannot_be_sent_is_given_back_and_counted(rig: server.Rig, caplog: pytest.LogCaptureFixture) -> None:
    stats = Stats()
    async with Swarm(str(rig.client.base_url), "") as swarm:
        group = await swarm.client.claim_group(JOB.num_repeat, 5.0)
        outputs = {one: WorkflowOutput(reward=1.0, metadata={"odd": "\ud800"}) for one in group.episode_uuids}
        assert await swarm.submitter.submit("t", outputs, 30.0, stats) is DropReason.REFUSED
        assert (stats.trained, dict(stats.dropped)) == (0, {"submission_refused": 1})
        assert rig.controller.pool.information().running_episodes == 0
    assert "PydanticSerializationError" in caplog.text
