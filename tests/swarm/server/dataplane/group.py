"""Claimed groups for tests."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import httpx

from tests.swarm.server.conftest import Claimed, Rig


@dataclass
class ClaimedGroup(Claimed):
    """A claimed group; what it has of an episode (address, key, requests) is the group's own."""

    members: list[Claimed]

    async def end_all(self, task: str = "task") -> dict[str, Any]:
        ends = [{"episode_uuid": one.uuid, "workflow_output": {"reward": at}} for at, one in enumerate(self.members)]
        return await self.rig.post("/end_group", client_uuid=self.client, task_id=task, ends=ends)

    @property
    def sampled(self) -> list[list[list[int]]]:
        """For each member the response ids of its calls."""
        return [[call.response_ids for call in member.calls] for member in self.members]

    @property
    def quarantined(self) -> list[str]:
        """For each member why it is quarantined."""
        pool = self.rig.controller.pool
        return [pool.open(member.uuid, member.key).quarantine_reason for member in self.members]


async def claim_group(rig: Rig, count: int = 2, **more: Any) -> ClaimedGroup:
    answer = await rig.post("/claim_group", client_uuid="me", count=count, **more)
    assert answer["success"], answer
    members = [
        Claimed(rig, one["episode_uuid"], one["openai_base_url"], one["openai_api_key"], "me")
        for one in answer["episodes"]
    ]
    return ClaimedGroup(
        rig, answer["group_uuid"], answer["openai_base_url"], answer["openai_api_key"], "me", members=members
    )


async def read(response: httpx.Response) -> list[Any]:
    """All events of a streamed answer."""
    body = b"".join([part async for part in response.aiter_bytes()]).decode()
    data = [block.removeprefix("data: ") for block in body.split("\n\n") if block]
    return [one if one == "[DONE]" else json.loads(one) for one in data]
