"""Who gets through to which route, with which token and from where."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from swarm.credentials import TokenFile, TokenScope
from swarm.errors import ConfigError
from swarm.server.app import create_app
from swarm.server.auth import ControlRoute, Scopes, check_exposure
from swarm.server.config import ServerConfig
from tests.standins.vllm import listening as serving

SCOPES: tuple[TokenScope, ...] = ("read", "claim", "admin")


@contextlib.asynccontextmanager
async def client_of(
    app: Starlette, peer: str = "127.0.0.1", base_url: str = "http://swarm"
) -> AsyncGenerator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app, client=(peer, 1))
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url=base_url, verify=False) as client,
    ):
        yield client


def auth(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def may(scope: TokenScope, path: str) -> bool:
    """What the contract says, written independently of the routes."""
    if scope == "admin":
        return True
    if path.startswith(
        ("/claim_", "/withdraw_", "/end_", "/abort_", "/can_", "/is_", "/agree_", "/record_", "/follow_")
    ):
        return scope == "claim"
    if path.startswith("/kept/"):
        return scope == "claim"
    if path.startswith(("/v1/", "/tokenize", "/detokenize")):
        return scope == "claim" or path.startswith("/v1/models")
    if path in ("/policies", "/policies/explain", "/policies/kept", "/policies/kept/{step}"):
        return True
    return path in ("/status", "/metrics", "/openapi.json", "/code", "/config", "/config/{number}") or path.startswith(
        ("/get_engine", "/get_cur", "/get_server", "/get_verbose")
    )


#: refused where code sync is off
CODE = ("/sync_train_code", "/code/select")


@pytest.mark.anyio
async def test_every_route_by_every_scope(tmp_path: Path) -> None:
    tokens = {scope: TokenFile(tmp_path).create(f"the-{scope}", [scope]) for scope in SCOPES}
    app = create_app(ServerConfig(run_dir=tmp_path))
    routes = [route for route in app.routes if isinstance(route, ControlRoute)]
    async with client_of(app) as client:
        for method, path, needed in ((m, one.path_format, one.scope) for one in routes for m in one.methods - {"HEAD"}):
            for scope, token in tokens.items():
                answer = await client.request(method, path, headers=auth(token))
                if may(scope, path):
                    assert answer.status_code not in (401, 403) or path in CODE, (path, scope)
                    continue
                assert answer.status_code == 403, (path, scope)
                error = answer.json()["error"]
                assert (error["code"], error["type"]) == ("scope_missing", "permission_error")
                assert repr(needed) in error["message"] and f"the-{scope}" in error["message"]
                assert answer.headers["x-should-retry"] == "false"
            for headers in ({}, auth("swt_wrong"), {"authorization": f"Basic {tokens['admin']}"}):
                answer = await client.request(method, path, headers=headers)
                assert answer.status_code == 401, path
                assert answer.headers["www-authenticate"] == "Bearer"
                assert answer.json()["error"]["type"] == "authentication_error"


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["/no_such_route", "/status/", "/stop_engine%0A", "/STATUS", "//status", "/"])
async def test_paths_that_are_not_listed_need_admin(tmp_path: Path, path: str) -> None:
    token = TokenFile(tmp_path).create("ci", ["read", "claim"])
    async with client_of(create_app(ServerConfig(run_dir=tmp_path))) as client:
        answer = await client.post(path, headers=auth(token))
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "scope_missing")
        assert (await client.post(path)).status_code == 401


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["/config/resolve%0A", "/code/select%0A", "/sync_train_code%0A", "/config/1%0A"])
async def test_a_line_break_in_a_path_opens_nothing(tmp_path: Path, path: str) -> None:
    tokens = TokenFile(tmp_path)
    read, admin = tokens.create("ci", ["read"]), tokens.create("boss", ["admin"])
    async with client_of(create_app(ServerConfig(run_dir=tmp_path, allow_code_sync=True))) as client:
        for method in ("GET", "POST"):
            refused = await client.request(method, path, headers=auth(read))
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "scope_missing")
            assert (await client.request(method, path, headers=auth(admin))).status_code == 404


def test_the_strictest_route_that_may_serve_a_request_decides() -> None:
    async def endpoint() -> None:
        """Nothing."""

    scopes = Scopes(
        [
            ControlRoute("GET", "/runs/{number}", endpoint, "read"),
            ControlRoute("GET", "/runs/{number}/{part:path}", endpoint, "claim"),
            ControlRoute("GET", "/{rest:path}", endpoint, "admin"),
            ControlRoute("POST", "/runs", endpoint, "admin"),
            ControlRoute("GET", "/runs", endpoint, "read"),
        ]
    )
    assert [scopes.needed(method, "/runs") for method in ("GET", "HEAD", "POST", "PUT")] == [
        "read",
        "read",
        "admin",
        "admin",
    ]
    assert scopes.needed("GET", "/runs/1") == "admin"


@pytest.mark.anyio
async def test_a_probe_needs_no_token(tmp_path: Path) -> None:
    async with client_of(create_app(ServerConfig(token="s3cret", run_dir=tmp_path))) as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/status", headers={"x-api-key": "s3cret"})).status_code == 200
        # an episode's address has keys of its own, and a token is none
        chat = await client.post("/episodes/x/v1/chat/completions", json={}, headers=auth("s3cret"))
        assert chat.status_code in (401, 404, 409)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("anonymous", "has_token", "peer", "headers", "status"),
    [
        (None, False, "127.0.0.1", {}, 200),
        (None, False, "::1", {}, 200),
        (None, False, "::ffff:127.0.0.1", {}, 200),
        (None, False, "192.168.1.5", {}, 401),
        (None, False, "not an address", {}, 401),
        (None, False, "127.0.0.1", {"x-forwarded-for": "127.0.0.1"}, 401),
        (None, False, "127.0.0.1", {"host": "evil.example"}, 421),
        (None, False, "127.0.0.1", {"origin": "https://evil.example"}, 403),
        (None, False, "127.0.0.1", {"authorization": "Bearer wrong"}, 401),
        (None, True, "127.0.0.1", {}, 401),
        (True, True, "127.0.0.1", {}, 200),
        (True, True, "127.0.0.1", {"authorization": "Bearer wrong"}, 401),
        (True, True, "127.0.0.1", {"host": "evil.example"}, 421),
        (True, True, "10.0.0.1", {}, 401),
        (False, False, "127.0.0.1", {}, 401),
        (False, True, "127.0.0.1", {}, 401),
    ],
)
async def test_callers_without_a_token(
    tmp_path: Path, anonymous: bool | None, has_token: bool, peer: str, headers: dict[str, str], status: int
) -> None:
    if has_token:
        TokenFile(tmp_path).create("somebody", ["read"], timedelta(seconds=-1))
    app = create_app(ServerConfig(run_dir=tmp_path, anonymous=anonymous))
    async with client_of(app, peer, "http://127.0.0.1:10086") as client:
        assert (await client.post("/stop_engine", headers=headers)).status_code == status


@pytest.mark.anyio
async def test_a_token_needs_no_loopback_name(tmp_path: Path) -> None:
    token = TokenFile(tmp_path).create("ci", ["read"])
    headers = {"host": "train.example", "origin": "https://ui.example", "x-forwarded-for": "10.0.0.1", **auth(token)}
    async with client_of(create_app(ServerConfig(run_dir=tmp_path)), "10.0.0.9") as client:
        assert (await client.get("/status", headers=headers)).status_code == 200


@pytest.fixture
async def live(tmp_path: Path) -> AsyncGenerator[httpx.AsyncClient]:
    async with (
        serving(create_app(ServerConfig(run_dir=tmp_path))) as url,
        httpx.AsyncClient(base_url=url, trust_env=False, verify=False, timeout=20) as client,
    ):
        yield client


@pytest.mark.anyio
async def test_tokens_rotate_while_the_server_runs(live: httpx.AsyncClient, tmp_path: Path) -> None:
    tokens = TokenFile(tmp_path)
    assert (await live.get("/status")).status_code == 200, "loopback, and no token yet"
    old = tokens.create("old", ["read"])
    assert (await live.get("/status")).status_code == 401
    assert (await live.get("/status", headers=auth(old))).status_code == 200
    new = tokens.create("new", ["read"])
    assert (await live.get("/status", headers=auth(new))).status_code == 200
    assert (await live.get("/status", headers=auth(old))).status_code == 200, "both, while clients change over"
    tokens.revoke("old")
    assert (await live.get("/status", headers=auth(old))).status_code == 401
    assert (await live.get("/status", headers=auth(new))).status_code == 200


@pytest.mark.anyio
async def test_the_log_tells_names_and_no_secrets(
    live: httpx.AsyncClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    tokens = TokenFile(tmp_path)
    admin, reader = tokens.create("boss", ["admin"]), tokens.create("reader", ["read"])
    secrets = [admin, reader, "swt_" + "w" * 43]
    answers = [await live.post("/stop_engine", headers=auth(secret), json={"token": secret}) for secret in secrets]
    answers += [await live.get(f"/status?token={secret}", headers={"x-api-key": secret}) for secret in secrets]
    assert [answer.status_code for answer in answers] == [200, 403, 401, 200, 200, 401]
    assert "/stop_engine by boss" in caplog.text
    # the client's own libraries log in this process too
    ours = "\n".join(record.getMessage() for record in caplog.records if not record.name.startswith("http"))
    told = ours + "".join(answer.text for answer in answers)
    assert not [secret for secret in secrets if secret in told]
    digests = [token.sha256 for token in tokens.read()]
    assert not [digest for digest in digests if digest in told]
    assert admin not in repr(ServerConfig(token=admin))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_no_token(host: str, tmp_path: Path) -> None:
    check_exposure(ServerConfig(host=host, run_dir=tmp_path))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "my-host.example", "localhost.evil.example"])
def test_beyond_loopback_a_token_is_required(host: str, tmp_path: Path) -> None:
    def check(**more: Any) -> None:
        check_exposure(ServerConfig(host=host, run_dir=tmp_path, **more))

    with pytest.raises(ConfigError, match="SWARM_TOKEN"):
        check()
    with pytest.raises(ConfigError, match="without a token"):
        check(anonymous=True)
    check(token="s3cret")
    tokens = TokenFile(tmp_path)
    tokens.create("late", ["admin"], timedelta(seconds=-1))
    with pytest.raises(ConfigError, match="swarm tokens create"):
        check()
    tokens.create("ci", ["read"])
    check()
    tokens.revoke("ci")
    with pytest.raises(ConfigError):
        check()
