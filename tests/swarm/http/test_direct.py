"""The straight way serves what the mount behind it would, through the same guards, and leaves the rest to it."""

from __future__ import annotations

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from swarm.errors import ConflictError
from swarm.http.asgi import EXCEPTION_HANDLERS, RequestIdMiddleware
from swarm.http.direct import DirectRoutes
from swarm.http.guard import JsonBodies

pytestmark = pytest.mark.anyio


async def fixed(request: Request) -> Response:
    # only what the regular router has matched has a path parameter dictionary of its own
    return JSONResponse({"direct": "endpoint" not in request.scope, "query": dict(request.query_params)})


async def named(request: Request) -> Response:
    return JSONResponse({"name": request.path_params["name"]})


async def named_inside(request: Request) -> Response:
    return JSONResponse({"direct": "endpoint" not in request.scope, "name": request.path_params["name"]})


async def refuse(request: Request) -> Response:
    raise ConflictError("no", code="no")


ROUTES = [
    Route("/fixed", fixed, methods=["GET", "POST"]),
    Route("/named/{name}", named),
    Route("/named/{name}/a/b", named_inside, methods=["POST"]),
    Route("/named/{name}/a/{other}", named),
    Route("/named/{number:int}/a", named),
    Route("/refuse", refuse, methods=["POST"]),
]


@pytest.fixture
def client() -> httpx.AsyncClient:
    guards = [Middleware(JsonBodies)]
    app = Starlette(
        routes=[DirectRoutes(ROUTES, guards), Mount("", routes=ROUTES, middleware=guards)],
        middleware=[Middleware(RequestIdMiddleware)],
        exception_handlers=EXCEPTION_HANDLERS,
    )
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


async def test_a_fixed_path_goes_straight(client: httpx.AsyncClient) -> None:
    async with client:
        answer = await client.get("/fixed?a=1")
        assert answer.json() == {"direct": True, "query": {"a": "1"}}
        assert answer.headers["x-request-id"]
        assert (await client.head("/fixed")).status_code == 200


async def test_a_path_with_a_name_in_it_goes_straight(client: httpx.AsyncClient) -> None:
    async with client:
        assert (await client.post("/named/x%20y/a/b")).json() == {"direct": True, "name": "x y"}
        for path in ("/named//a/b", "/named/x/a/b/", "/named/x/y/a/b", "/other/x/a/b"):
            assert (await client.post(path, follow_redirects=False)).status_code in (404, 405, 307)
        assert (await client.get("/named/x/a/b")).json() == {"name": "x"}, "the regular router's, by another route"


async def test_the_rest_goes_on(client: httpx.AsyncClient) -> None:
    async with client:
        assert (await client.get("/named/x")).json() == {"name": "x"}
        assert (await client.delete("/fixed")).status_code == 405
        assert (await client.get("/nothing")).json()["error"]["code"] == "route_not_found"


async def test_guards_and_errors_are_the_same(client: httpx.AsyncClient) -> None:
    async with client:
        assert (await client.post("/fixed", content=b"x")).status_code == 415
        assert (await client.post("/refuse")).json()["error"]["code"] == "no"
