"""``monitor --json``: one status of all servers, and an exit code that says whether all have answered."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from gateway.cli.root import app
from swarm.status import ServerStatus
from tests.gateway.conftest import OpenGateway
from tests.swarm.server import conftest as server

pytestmark = pytest.mark.anyio

overrides = server.overrides
rig = server.rig


async def run(*arguments: str) -> tuple[Result, Any]:
    # the command has an event loop of its own
    result = await asyncio.to_thread(CliRunner().invoke, app, ["monitor", "--json", *arguments])
    return result, json.loads(result.stdout) if result.stdout else None


async def test_all_answer(rig: server.Rig, open_gateway: OpenGateway) -> None:
    async with open_gateway() as http:
        url, other = str(rig.client.base_url), str(http.base_url)
        result, told = await run("--swarm-url", url, "--gateway-url", other)
    assert result.exit_code == 0, result.output
    [swarm], [gateway] = told["swarm_servers"], told["gateways"]
    assert (swarm["url"], swarm["trouble"], swarm["error"]) == (url, None, None)
    assert ServerStatus.model_validate(swarm["status"]).model == "tiny"
    assert gateway["status"]["routes"]["default"]["policy"] == "best"
    assert gateway["status"]["model"] == "tiny"


async def test_one_does_not(rig: server.Rig) -> None:
    result, told = await run("--swarm-url", str(rig.client.base_url), "--swarm-url", "http://127.0.0.1:9")
    assert result.exit_code == 2
    well, away = told["swarm_servers"]
    assert well["status"]["engine"]["engine_status"] == "ENGINE.ROLLING"
    assert (away["trouble"], away["status"]) == ("away", None)
    assert away["error"] in result.stderr and told["gateways"] == []


@pytest.mark.parametrize("overrides", [{"token": "secret-of-the-server"}])
async def test_the_token_comes_from_the_environment(
    rig: server.Rig, overrides: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(rig.client.base_url)
    monkeypatch.delenv("SWARM_TOKEN", raising=False)
    result, told = await run("--swarm-url", url)
    assert (result.exit_code, told["swarm_servers"][0]["trouble"]) == (2, "refused")
    monkeypatch.setenv("SWARM_TOKEN", overrides["token"])
    result, told = await run("--swarm-url", url)
    assert (result.exit_code, told["swarm_servers"][0]["trouble"]) == (0, None)
