"""Whose episode it is: its id is a secret between the server and its client, and no route tells it to another one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from swarm.credentials import TokenFile
from swarm.errors import ForbiddenError
from swarm.server.auth import ClientNames, ControlRoute, TokenHolder
from tests.standins.vllm import plain
from tests.swarm.server.conftest import Rig

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
    paths = {route.path for route in rig.app.routes if isinstance(route, ControlRoute)} - {"/openapi.json"}
    for path in sorted(paths):
        answers = [await rig.client.get(path)] + [await rig.client.post(path, json=body) for body in bodies]
        for answer in answers:
            for episode in (running, finished):
                assert episode.uuid not in answer.text, path
                assert episode.key not in answer.text, path


async def test_a_guess_ends_nothing(rig: Rig, tmp_path: Path) -> None:
    theirs = await rig.claim("theirs")
    await become(rig, tmp_path, "claim")
    known: dict[str, Any] = {"client_uuid": "theirs", "task_id": "task", "workflow_output": {"reward": 1.0}}
    for guess in ("", "0" * 32, theirs.uuid[-8:], theirs.uuid.upper(), f"{theirs.uuid} "):
        ended = await rig.client.post("/end_episode", json=known | {"episode_uuid": guess})
        assert not ended.is_success, guess
        await rig.client.post("/abort_episode", json={"client_uuid": "theirs", "episode_uuid": guess})
        await rig.client.post("/abort_episode", json={"client_uuid": "other", "episode_uuid": theirs.uuid})
    del rig.client.headers["authorization"]
    going_on = await rig.post("/can_continue_episode", client_uuid="theirs", episode_uuid=theirs.uuid)
    assert going_on["can_continue"], "another client's name and its id do not match either"
    assert len(set(theirs.uuid)) > 4 and len(theirs.uuid) == 32


async def test_a_client_is_its_tokens_own(rig: Rig, tmp_path: Path) -> None:
    theirs = await rig.claim("theirs", idempotency_key="k")
    await become(rig, tmp_path, "claim")
    own = await rig.claim("mine")
    known: dict[str, Any] = {"client_uuid": "theirs", "episode_uuid": theirs.uuid, "task_id": "task"}
    output: dict[str, Any] = {"workflow_output": {"reward": 1.0}}
    ends = {"ends": [{"episode_uuid": theirs.uuid} | output]}
    for path, body in {
        "/claim_episode": {"idempotency_key": "k"},
        "/claim_group": {"idempotency_key": "k", "count": 1},
        "/end_episode": output,
        "/end_group": ends,
        "/withdraw_claim": {"idempotency_key": "k"},
        "/abort_episode": {},
        "/can_continue_episode": {},
        "/agree_sync_weight": {},
    }.items():
        answer = await rig.client.post(path, json=known | body)
        assert answer.status_code == 403, path
        assert answer.json()["error"]["code"] == "client_of_another_token", path
        assert theirs.key not in answer.text
    assert (await rig.post("/can_continue_episode", client_uuid="mine", episode_uuid=own.uuid))["can_continue"]
    del rig.client.headers["authorization"]
    # callers on this machine without a token are admins here
    for client, episode in (("theirs", theirs), ("mine", own)):
        going_on = await rig.post("/can_continue_episode", client_uuid=client, episode_uuid=episode.uuid)
        assert going_on["can_continue"]


async def test_a_rotated_token_keeps_its_clients(rig: Rig, tmp_path: Path) -> None:
    await become(rig, tmp_path, "claim")
    own = await rig.claim("mine")
    TokenFile(tmp_path).revoke("other")
    await become(rig, tmp_path, "claim")
    assert (await rig.post("/can_continue_episode", client_uuid="mine", episode_uuid=own.uuid))["can_continue"]


async def test_the_memory_of_names_is_bounded(overrides: dict[str, Any]) -> None:
    ann, bob = (TokenHolder(name, frozenset({"claim"})) for name in ("ann", "bob"))
    names = ClientNames(limit=2)
    for name in ("1", "2", "3"):
        names.check(ann, name)
    names.check(bob, "1")
    with pytest.raises(ForbiddenError):
        names.check(bob, "3")
