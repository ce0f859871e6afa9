"""Whose episode it is: its id is a secret between the server and its client, and no route tells it to another one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from swarm.server.auth.scopes import ROUTE_SCOPES
from swarm.server.auth.store import TokenFile
from tests.swarm.server.conftest import Rig
from tests.swarm.server.vllm import plain

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("overrides", [{"anonymous": True}])]


async def become(rig: Rig, run_dir: Path, scope: Any) -> None:
    """Let the rig's client be somebody else, with a token of its own, from now on."""
    token = TokenFile(run_dir).create("other", [scope])
    rig.client.headers["authorization"] = f"Bearer {token}"
    async with asyncio.timeout(10):
        while (await rig.client.get("/get_engine_status")).status_code != 200:
            pass


@pytest.mark.parametrize("scope", ["claim", "read"])
async def test_no_route_tells_the_ids_of_others(rig: Rig, tmp_path: Path, scope: Any) -> None:
    running, finished = await rig.claim("theirs"), await rig.claim("theirs")
    rig.vllm.script.append(plain([1, 2]))
    assert (await finished.chat()).status_code == 200
    await finished.end()
    await become(rig, tmp_path, scope)
    bodies: list[dict[str, Any]] = [{}, {"client_uuid": "other"}, {"client_uuid": "theirs"}]
    bodies += [{"client_uuid": "theirs", "episode_uuid": "guessed", "task_id": "task", "count": 1}]
    for path in ROUTE_SCOPES:
        answers = [await rig.client.get(path)] + [await rig.client.post(path, json=body) for body in bodies]
        for answer in answers:
            for episode in (running, finished):
                assert episode.uuid not in answer.text, path
                assert episode.key not in answer.text, path


async def test_a_guess_ends_nothing(rig: Rig, tmp_path: Path) -> None:
    theirs = await rig.claim("theirs")
    await become(rig, tmp_path, "claim")
    known: dict[str, Any] = {"client_uuid": "theirs", "task_id": "task", "workflow_output": {"reward": 1.0}}
    for guess in ("", "0" * 32, theirs.uuid[:8], theirs.uuid.upper(), f"{theirs.uuid} "):
        ended = await rig.client.post("/end_episode", json=known | {"episode_uuid": guess})
        assert not ended.is_success, guess
        await rig.client.post("/abort_episode", json={"client_uuid": "theirs", "episode_uuid": guess})
        await rig.client.post("/abort_episode", json={"client_uuid": "other", "episode_uuid": theirs.uuid})
    going_on = await rig.post("/can_continue_episode", client_uuid="theirs", episode_uuid=theirs.uuid)
    assert going_on["can_continue"], "another client's name and its id do not match either"
    assert len(set(theirs.uuid)) > 4 and len(theirs.uuid) == 32
