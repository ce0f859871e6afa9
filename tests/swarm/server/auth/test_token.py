"""The control routes' token, and where the server may listen without one."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from swarm.errors import ConfigError
from swarm.server.app import create_app
from swarm.server.auth import check_exposure
from swarm.server.config import ServerConfig

TOKEN = "s3cret-tökén"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_no_token(host: str) -> None:
    check_exposure(host, None)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "my-host.example", "localhost.evil.example"])
def test_beyond_loopback_a_token_is_required(host: str) -> None:
    with pytest.raises(ConfigError, match="SWARM_TOKEN"):
        check_exposure(host, None)
    check_exposure(host, TOKEN)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": f"Basic {TOKEN}".encode()}, 401),
        ({"authorization": "Bearer s3cret"}, 200),
        ({"x-api-key": "s3cret"}, 200),
    ],
)
async def test_control_routes_ask_for_the_token(tmp_path: Path, headers: dict[str, str], expected: int) -> None:
    app = create_app(ServerConfig(token="s3cret", run_dir=tmp_path))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://swarm", verify=False) as client:
        response = await client.get("/status", headers=headers)
        assert response.status_code == expected
        assert response.headers["x-request-id"]
        if expected == 401:
            assert response.json()["error"]["type"] == "authentication_error"
            assert (await client.post("/stop_engine", headers=headers)).status_code == 401
            assert (await client.get("/no_such_route", headers=headers)).status_code == 401
        assert (await client.get("/health")).status_code == 200
