"""Who may move a challenger on the page, and in whose name it is moved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swarm.client import AsyncSwarmClient
from swarm.errors import ConflictError
from swarm.evidence.stages import ServingStage, StageRules
from swarm.protocol import PolicyStatus, PromotePolicyRequest
from tests.gateway.conftest import OpenGateway
from tests.gateway.page.conftest import Site

pytestmark = pytest.mark.anyio

MOVE = {"move": "promote", "route": "default", "incumbent": "gpt", "version": 3, "reason": "20 groups looked better"}


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[tuple[PromotePolicyRequest, str]]:
    """What the swarm server is asked; it refuses all versions but 3."""
    asked: list[tuple[PromotePolicyRequest, str]] = []

    async def promote(self: AsyncSwarmClient, wanted: PromotePolicyRequest, sender: str = "") -> PolicyStatus:
        asked.append((wanted, sender))
        if wanted.version != 3:
            raise ConflictError("the stage of default has moved since version 2", code="stage_moved")
        stage = ServingStage.begun("default", "gpt", StageRules(), 0.0, "salt")
        return PolicyStatus(stage=stage.moved(0.05, 1.0, sender, wanted.reason), verdict=None)

    monkeypatch.setattr(AsyncSwarmClient, "promote_policy", promote)
    return asked


async def moves(site: Site, scope: str, **changes: Any) -> tuple[int, Any]:
    visitor = await site.visit(scope)
    answer = await visitor.http.post("/ui/api/move", json=MOVE | changes)
    return answer.status_code, answer.json()


async def test_a_key_that_may_decide_moves_a_challenger_in_its_own_name(site: Site, moved: list[Any]) -> None:
    status, done = await moves(site, "decide")
    assert (status, done["stage"]["share"]) == (200, 0.05)
    [(wanted, sender)] = moved
    assert (sender, wanted.reason, wanted.version) == ("Dana", MOVE["reason"], 3)


@pytest.mark.parametrize("scope", ["look", "judge"])
async def test_other_keys_move_nothing(site: Site, moved: list[Any], scope: str) -> None:
    status, error = await moves(site, scope)
    assert (status, error["error"]["code"], moved) == (403, "page_scope", [])


async def test_who_saw_another_stage_is_told(site: Site, moved: list[Any]) -> None:
    assert (await moves(site, "decide", version=2))[0] == 409
    assert (await moves(site, "decide", reason=""))[0] == 400
    assert (await moves(site, "decide", route="secret"))[0] == 404
    assert len(moved) == 1


async def test_a_gateway_without_keys_lends_nobody_its_token(
    open_gateway: OpenGateway, tmp_path: Path, moved: list[Any]
) -> None:
    async with open_gateway(ui={}) as http:
        answer = await http.post("/ui/api/move", json=MOVE)
    assert (answer.status_code, answer.json()["error"]["code"], moved) == (403, "keyless", [])
