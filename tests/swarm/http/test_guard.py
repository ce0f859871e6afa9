"""What a browser can be made to send does not reach a server without a key; what programs send does."""

from __future__ import annotations

from functools import partial

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Scope

from swarm.http.asgi import ErrorMiddleware
from swarm.http.guard import check_loopback, check_type

pytestmark = pytest.mark.anyio


async def echo(request: Request) -> Response:
    return JSONResponse({"bytes": len(await request.body())})


def admit(enabled: bool, scope: Scope) -> None:
    if enabled:
        check_loopback(scope, "knock", ["https://ours.example"])
    check_type(scope, {"/zip": "application/zip"}.get(scope["path"]))


def client(enabled: bool = True) -> httpx.AsyncClient:
    app = Starlette(
        routes=[Route("/", echo, methods=["GET", "POST"]), Route("/zip", echo, methods=["POST"])],
        middleware=[
            Middleware(ErrorMiddleware, body_limit=lambda scope: 1000, admit=partial(admit, enabled)),
        ],
    )
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:1", verify=False)


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({}, 200, None),
        ({"host": "localhost:10086"}, 200, None),
        ({"host": "[::1]:10086"}, 200, None),
        ({"host": "127.0.0.2"}, 200, None),
        ({"origin": "http://localhost:3000"}, 200, None),
        ({"origin": "https://ours.example"}, 200, None),
        ({"origin": "https://ours.example.evil"}, 403, "foreign_origin"),
        ({"host": "evil.example:10086"}, 421, "foreign_host"),
        ({"host": "localhost.evil.example"}, 421, "foreign_host"),
        ({"host": "192.168.0.4:10086"}, 421, "foreign_host"),
        ({"host": "[::1"}, 421, "foreign_host"),
        ({"host": ""}, 421, "foreign_host"),
        ({"origin": "https://evil.example"}, 403, "foreign_origin"),
        ({"origin": "null"}, 403, "foreign_origin"),
        ({"origin": "http://[::1"}, 403, "foreign_origin"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_only_this_machine(method: str, headers: dict[str, str], status: int, code: str | None) -> None:
    async with client() as http:
        answer = await http.request(method, "/", headers=headers)
    assert answer.status_code == status
    if code is not None:
        assert answer.json()["error"]["code"] == code
        assert answer.headers["x-should-retry"] == "false"
        assert (code == "foreign_host") == ("knock" in answer.json()["error"]["message"])


async def test_a_server_with_a_key_answers_to_any_name() -> None:
    async with client(enabled=False) as http:
        answer = await http.get("/", headers={"host": "train.example", "origin": "https://ui.example"})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        ("application/problem+json", 200),
        ("text/plain", 415),
        ("text/plain; x=application/json", 415),
        ("application/x-www-form-urlencoded", 415),
        (None, 415),
    ],
)
async def test_bodies_say_that_they_are_json(kind: str | None, status: int) -> None:
    async def chunks():
        yield b"{}"

    async with client() as http:
        for content in (b"{}", chunks()):
            answer = await http.post("/", content=content, headers={"content-type": kind} if kind else {})
            assert answer.status_code == status
        assert (await http.post("/")).status_code == 200, "no body, no type"


@pytest.mark.parametrize(
    ("path", "kind", "status"),
    [
        ("/zip", "application/zip", 200),
        ("/zip", "Application/Zip; x=y", 200),
        ("/zip", "application/json", 415),
        ("/zip", "text/plain", 415),
        ("/", "application/zip", 415),
    ],
)
async def test_a_path_with_a_type_of_its_own(path: str, kind: str, status: int) -> None:
    async with client() as http:
        answer = await http.post(path, content=b"PK", headers={"content-type": kind})
    assert answer.status_code == status
