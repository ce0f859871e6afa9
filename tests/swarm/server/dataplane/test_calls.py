"""What becomes of calls whose episode ends while they wait for the disk."""

from __future__ import annotations

import asyncio

import pytest

from swarm.server.dataplane.calls import CallOwner
from swarm.server.journal.rows import CallRow, EndRow
from swarm.tokens import ModelCall
from tests.swarm.server.engine.test_controller import claim, rolling
from tests.swarm.server.episodes.test_pool import ends
from tests.swarm.server.memory import MemoryJournal
from tests.token_data import model_call

pytestmark = pytest.mark.anyio


def call(number: int) -> ModelCall:
    return model_call([0], [number], call_id=f"call-{number}")


async def test_a_call_that_is_not_on_disk_when_its_episode_ends_is_not_trained() -> None:
    journal = MemoryJournal()
    controller = rolling(journal)
    (one,) = await claim(controller)
    episode = controller.pool.open(one.episode_uuid, one.key)
    first, second = (CallOwner(controller, [episode]) for _ in range(2))
    first.record({0: call(1)})
    await first.synced()
    journal.gate.clear()
    second.record({0: call(2)})
    delivery = asyncio.create_task(second.synced())
    ending = asyncio.create_task(controller.episodes.end("me", "a", ends(one), as_group=False))
    await asyncio.sleep(0)
    journal.gate.set()
    assert await asyncio.wait_for(ending, 20) == ""
    await asyncio.wait_for(delivery, 20)
    *before, ended = [record for record in journal.records if isinstance(record, CallRow | EndRow)]
    assert [record.call.call_id for record in before if isinstance(record, CallRow)] == ["call-1", "call-2"]
    assert isinstance(ended, EndRow) and ended.trajectory is not None
    assert [timeline.response_ids.tolist() for timeline in ended.trajectory.timelines] == [[1]]
    assert journal.synced_records == len(journal.records), "who is told of the end knows that the calls are there too"
