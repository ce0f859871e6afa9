"""What a browser can be made to send does not reach a server without a key; what programs send does."""

from __future__ import annotations

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from swarm.http.guard import JsonBodies, foreign

pytestmark = pytest.mark.anyio


async def echo(request: Request) -> Response:
    return JSONResponse({"bytes": len(await request.body())})


def client() -> httpx.AsyncClient:
    app = Starlette(
        routes=[Route("/", echo, methods=["GET", "POST"]), Route("/zip", echo, methods=["POST"])],
        middleware=[Middleware(JsonBodies, other_types={"/zip": "application/zip"})],
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
async def test_only_this_machine(headers: dict[str, str], status: int, code: str | None) -> None:
    sent = [(name.encode(), value.encode()) for name, value in {"host": "127.0.0.1:1", **headers}.items()]
    error = foreign(sent, "knock", {b"https://ours.example"})
    assert (200 if error is None else error.status) == status
    if error is not None:
        assert error.code == code and not error.should_retry
        assert (code == "foreign_host") == ("knock" in error.message)


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
