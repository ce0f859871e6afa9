"""The admin routes of a gateway before a real swarm server: who may, which route, and what is told when it fails."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from gateway.keys.store import KeyFile
from swarm.credentials import TokenFile
from swarm.server.app import create_app
from swarm.server.config import ServerConfig
from tests.gateway.conftest import gateway_before, write_hooks
from tests.standins import engine
from tests.standins.vllm import listening
from tests.swarm.code_snapshots.making import zipped

pytestmark = pytest.mark.anyio

ZIP = {"content-type": "application/zip"}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncGenerator[str]:
    TokenFile(tmp_path / "run").create("other", ["read"])
    config = ServerConfig(run_dir=tmp_path / "run", allow_code_sync=True, token="secret")
    async with listening(create_app(config, engine_command=engine.command("train"))) as url:
        yield url


def archive(tmp_path: Path) -> bytes:
    (tmp_path / "code/mine").mkdir(parents=True, exist_ok=True)
    (tmp_path / "code/mine/__init__.py").write_text("")
    return zipped(tmp_path / "code")


def key(tmp_path: Path, **options: Any) -> dict[str, str]:
    _, text = KeyFile(tmp_path / "keys.json").create(f"key {options}", **options)
    return {"authorization": f"Bearer {text}"}


async def test_only_an_admin_key_commands_and_is_named_in_the_log(server: str, tmp_path: Path) -> None:
    admin, app = key(tmp_path, admin=True), key(tmp_path)
    async with gateway_before(server, tmp_path, keys_file=tmp_path / "keys.json", swarm_token="secret") as http:
        for method, path in (("POST", "/admin/code"), ("GET", "/admin/config"), ("POST", "/admin/engine/start")):
            for headers, status in ((app, 403), ({}, 401)):
                assert (await http.request(method, path, headers=headers)).status_code == status, path
        sent = await http.post("/admin/code?message=mine", content=archive(tmp_path), headers=admin | ZIP)
        assert (sent.status_code, sent.json()["snapshot"]["message"]) == (200, "mine"), sent.text
        listed = (await http.get("/admin/code", headers=admin)).json()
        assert [one["id"] for one in listed["snapshots"]] == [listed["selected"]]
        whole = await http.get(f"/admin/code/{listed['selected']}", headers=admin)
        assert whole.headers["content-type"] == "application/zip" and whole.content.startswith(b"PK")
        for no_name, said in ((f"{listed['selected']}%3Fx=", "?x="), ("%2e%2e", "no '..'"), ("%2e", "no '.'")):
            answer = await http.get(f"/admin/code/{no_name}", headers=admin)
            assert answer.status_code == 404 and said in answer.text, answer.text
        refused = await http.post("/admin/engine/start", headers=admin)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "no_job")
        assert (await http.post("/admin/engine/stop", headers=admin)).json()["success"]
        await http.post("/admin/engine/stop", params={"sender": "x" * 300}, headers=admin)
        # nothing but commands is forwarded
        assert (await http.post("/admin/claim_episode", headers=admin)).status_code == 404
    log = [json.loads(line) for line in (tmp_path / "run/audit.jsonl").read_text().splitlines()]
    assert [entry["what"] for entry in log] == ["code sync", "engine start", "engine stop", "engine stop"]
    # what the caller tells of itself cuts nothing off
    assert log.pop()["sender"].startswith("gateway key key {'admin': True} for xxx")
    assert {entry["sender"] for entry in log} == {"gateway key key {'admin': True}"}
    assert [entry["result"].partition(":")[0] for entry in log] == ["done", "refused", "done"]


async def test_a_compressed_command_is_read(server: str, tmp_path: Path) -> None:
    admin = key(tmp_path, admin=True) | {"content-type": "application/json"}
    body = json.dumps({"step": -1}).encode()
    async with gateway_before(server, tmp_path, keys_file=tmp_path / "keys.json", swarm_token="secret") as http:
        plain = await http.post("/admin/policies/delete", content=body, headers=admin)
        packed = await http.post(
            "/admin/policies/delete", content=gzip.compress(body), headers=admin | {"content-encoding": "gzip"}
        )
    assert (packed.status_code, packed.json()) == (plain.status_code, plain.json())


async def test_no_proxy_of_the_environment_stands_before_the_swarm_server(
    server: str, nobody: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin, address = key(tmp_path, admin=True), server.replace("127.0.0.1", "0.0.0.0")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", nobody)
    async with gateway_before(address, tmp_path, keys_file=tmp_path / "keys.json", swarm_token="secret") as http:
        answer = await http.get("/admin/config", headers=admin)
        assert answer.status_code == 200, answer.text


async def test_the_route_says_which_server(server: str, nobody: str, tmp_path: Path) -> None:
    hooks = str(write_hooks(tmp_path / "hooks"))
    routes = [
        {"name": "ours", "swarm_url": server, "swarm_token": "secret", "hooks": hooks},
        {"name": "same", "swarm_url": server, "swarm_token": "secret", "hooks": hooks},
        {"name": "away", "swarm_url": nobody, "hooks": hooks},
        {"name": "plain", "swarm_url": None, "upstream": {"base_url": "http://127.0.0.1:1/v1"}},
    ]
    one = key(tmp_path, admin=True, routes=["ours", "plain"])
    every = key(tmp_path, admin=True)
    none = key(tmp_path, admin=True, routes=["plain"])
    async with gateway_before(server, tmp_path, keys_file=tmp_path / "keys.json", routes=routes) as http:
        cases = [
            ("", none, 400, "no route has a swarm server"),
            ("", one, 200, ""),
            ("", every, 400, "ours, same, away"),
            ("?route=same", every, 200, ""),
            ("?route=same", one, 404, "there are: ours, plain"),
            ("?route=plain", every, 400, "no swarm server"),
            ("?route=away", every, 503, "route away"),
        ]
        for query, headers, status, said in cases:
            answer = await http.get(f"/admin/code{query}", headers=headers)
            assert answer.status_code == status and said in answer.text, (query, answer.text)


async def test_a_gateway_that_may_not_command_says_what_it_lacks(server: str, tmp_path: Path) -> None:
    reader, admin = TokenFile(tmp_path / "run").create("reader", ["read"]), key(tmp_path, admin=True)
    for token in ("wrong", reader):
        async with gateway_before(server, tmp_path, keys_file=tmp_path / "keys.json", swarm_token=token) as http:
            answer = await http.post("/admin/engine/stop", headers=admin)
            assert (answer.status_code, answer.json()["error"]["code"]) == (502, "gateway_is_no_admin")
            assert "scope admin" in answer.json()["error"]["message"]


async def test_a_gateway_without_keys_lends_nobody_its_token(server: str, tmp_path: Path) -> None:
    async with gateway_before(server, tmp_path, swarm_token="secret") as http:
        for headers in ({}, {"authorization": "Bearer wrong"}):
            for method, path in (("POST", "/admin/code"), ("POST", "/admin/engine/stop"), ("GET", "/admin/engine")):
                answer = await http.request(method, path, headers=headers)
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "admin_token_required"), path
                assert "keys create" in answer.json()["error"]["message"]
        own = {"authorization": "Bearer secret"}
        assert (await http.post("/admin/engine/stop", headers=own)).json()["success"]
    [entry] = [json.loads(line) for line in (tmp_path / "run/audit.jsonl").read_text().splitlines()]
    assert (entry["who"], entry["result"]) == ("SWARM_TOKEN", "done")


async def test_who_commanded_and_who_was_refused_is_beside_the_keys(server: str, tmp_path: Path) -> None:
    hooks = str(write_hooks(tmp_path / "hooks"))
    routes = [
        {"name": name, "swarm_url": server, "swarm_token": "secret", "hooks": hooks} for name in ("mine", "other")
    ]
    admin, app = key(tmp_path, admin=True, routes=["mine"]), key(tmp_path)
    async with gateway_before(server, tmp_path, keys_file=tmp_path / "keys.json", routes=routes) as http:
        asked = [
            ("POST", "/admin/engine/stop?route=mine", admin, 200),
            ("GET", "/admin/code", admin, 200),
            ("POST", "/admin/engine/stop?route=other", admin, 404),
            ("GET", "/admin/code", app, 403),
            *[("POST", "/admin/code", {"authorization": "Bearer wrong"}, 401)] * 100,
            *[("GET", "/admin/code", app, 403)] * 100,
            # who may command is noted whatever others did
            *[("POST", "/admin/engine/stop?route=other", admin, 404)] * 61,
        ]
        for method, path, headers, status in asked:
            assert (await http.request(method, path, headers=headers)).status_code == status, path
    log = tmp_path / "keys.json.audit.jsonl"
    assert log.stat().st_mode & 0o077 == 0
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    name = "key {'admin': True, 'routes': ['mine']}"
    assert [(one["who"], one["what"], one["route"], one["result"]) for one in entries[:4]] == [
        (name, "POST /admin/engine/stop", "mine", 200),
        (name, "POST /admin/engine/stop", "other", 404),
        ("key {}", "GET /admin/code", "", 403),
        ("", "POST /admin/code", "", 401),
    ]
    counts = Counter((one["who"], one["result"]) for one in entries)
    assert counts == {(name, 200): 1, (name, 404): 62, ("key {}", 403): 60, ("", 401): 60}, "others fill no disk"
    assert all(one["from"] == "127.0.0.1" and one["when"] for one in entries) and "wrong" not in log.read_text()


async def test_the_token_in_the_address_of_a_server_is_lent_to_nobody_and_told_to_nobody(
    server: str, tmp_path: Path
) -> None:
    address = server.replace("http://", "http://x:secret@")
    async with gateway_before(address, tmp_path) as http:
        for headers in ({}, {"authorization": "Bearer guess"}):
            refused = await http.post("/admin/engine/stop", headers=headers)
            assert refused.json()["error"]["code"] == "admin_token_required", refused.text
            assert "secret" not in refused.text
        assert (await http.get("/admin/code", headers={"authorization": "Bearer secret"})).status_code == 200
    admin = key(tmp_path, admin=True)
    for settings in ({}, {"swarm_token": "secret"}):
        async with gateway_before(address, tmp_path, keys_file=tmp_path / "keys.json", **settings) as http:
            assert (await http.get("/admin/code", headers=admin)).status_code == 200
