"""The pool's route: who is shown what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swarm.credentials import TokenFile
from tests.swarm.server import conftest as server

pytestmark = pytest.mark.anyio

rig = server.rig


@pytest.mark.parametrize("overrides", [{"token": "all-scopes"}])
async def test_only_an_admin_sees_whole_names(rig: server.Rig, overrides: dict[str, Any], tmp_path: Path) -> None:
    """Whoever knows an episode's name and its client's could end it."""
    headers = {"authorization": "Bearer all-scopes"}
    store = TokenFile(tmp_path)
    tokens = {scope: store.create(scope, [scope]) for scope in ("read", "claim")}
    claimed = (await rig.client.post("/claim_episode", json={"client_uuid": "me"}, headers=headers)).json()
    name = claimed["episode_uuid"]
    for token, shown in (("all-scopes", name), (tokens["claim"], name[-8:]), (tokens["read"], name[-8:])):
        mine = {"authorization": f"Bearer {token}"}
        pool = (await rig.client.get("/get_current_batch_rollout_pool_information", headers=mine)).json()
        assert list(pool["running_episode_details"]) == [shown]
