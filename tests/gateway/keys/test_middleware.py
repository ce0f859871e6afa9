"""Keys over HTTP: 401, 403 and 429 in the form that was asked for, and keys that come and go while a gateway runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.keys.store import KeyFile
from tests.gateway.conftest import Http, OpenGateway
from tests.standins.swarm import Swarm
from tests.standins.upstream import Upstream

pytestmark = pytest.mark.anyio

BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
CHAT = "/v1/chat/completions"


@pytest.fixture
def file(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "keys.json")


@pytest.fixture
async def http(open_gateway: OpenGateway, file: KeyFile, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Http]:
    monkeypatch.setattr("gateway.keys.ring.POLL_SECONDS", 0.01)
    async with open_gateway(keys_file=file.path) as http:
        yield http


async def ask(http: Http, key: str) -> httpx.Response:
    return await http.post(CHAT, json=BODY, headers={"authorization": f"Bearer {key}"})


async def until_status(http: Http, key: str, status: int) -> None:
    async with asyncio.timeout(20):
        while (await http.get("/v1/models", headers={"x-api-key": key})).status_code != status:
            pass


async def test_a_key_made_while_the_gateway_runs_opens_it_until_it_is_revoked(http: Http, file: KeyFile) -> None:
    assert (await http.post(CHAT, json=BODY)).status_code == 401
    key, text = file.create("app")
    await until_status(http, text, 200)
    assert (await ask(http, text)).status_code == 200
    file.revoke(key.id)
    await until_status(http, text, 401)
    assert (await ask(http, text)).json()["error"]["code"] == "api_key_revoked"


async def test_a_rate_is_429_with_retry_after(swarm: Swarm, open_gateway: OpenGateway, file: KeyFile) -> None:
    _, text = file.create("app", requests_per_minute=1)
    async with open_gateway(keys_file=file.path) as http:
        assert (await ask(http, text)).status_code == 200
        refused = await ask(http, text)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert 1 <= int(refused.headers["retry-after"]) <= 60 and refused.headers["x-should-retry"] == "true"
        # what costs nothing is not counted
        assert (await http.get("/v1/models", headers={"x-api-key": text})).status_code == 200


@pytest.mark.parametrize("method", ["PUT", "PATCH", "DELETE"])
async def test_a_rate_counts_whatever_an_upstream_has_to_do(
    upstream: Upstream, open_gateway: OpenGateway, file: KeyFile, method: str
) -> None:
    _, text = file.create("app", requests_per_minute=1)
    async with open_gateway(keys_file=file.path, upstream={"base_url": upstream.url}) as http:
        sent = [await http.request(method, "/v1/files/f", headers={"x-api-key": text}) for _ in range(2)]
    assert sent[0].status_code != 429 and sent[1].status_code == 429 and len(upstream.got) <= 1


async def test_refusals_have_the_form_of_the_dialect(http: Http) -> None:
    refused = await http.post("/v1/messages", json=BODY, headers={"x-api-key": "wrong"})
    assert refused.status_code == 401
    assert (refused.json()["type"], refused.json()["error"]["type"]) == ("error", "authentication_error")
    assert refused.headers["x-should-retry"] == "false" and refused.headers["x-request-id"]
    assert refused.headers["www-authenticate"] == "Bearer", "RFC 9110: each 401 says how to ask"


async def test_admin_needs_an_admin_key_where_there_are_keys(
    swarm: Swarm, open_gateway: OpenGateway, file: KeyFile
) -> None:
    _, plain = file.create("app")
    _, admin = file.create("operator", admin=True)
    async with open_gateway(keys_file=file.path, api_keys=["fixed"]) as http:
        for key, status in (("none", 401), (plain, 403), ("fixed", 403), (admin, 409)):
            answer = await http.post("/admin/reload", headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == status, key
    async with open_gateway() as http:
        # 409: it may, but there is no file
        assert (await http.post("/admin/reload")).json()["error"]["code"] == "nothing_to_reload"
        assert (await http.post("/admin/reload", headers={"host": "rebound.example"})).status_code == 421
