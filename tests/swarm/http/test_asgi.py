"""Request ids, error shapes and bounded bodies, as both servers mount them."""

from __future__ import annotations

import asyncio
import contextlib
import gzip

import anyio.lowlevel
import httpx
import pytest
import uvicorn
from pydantic import BaseModel, model_validator
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message

from swarm.concurrency import until_gone
from swarm.errors import UnavailableError
from swarm.http.asgi import App, ErrorMiddleware, RequestMiddleware, bearer_bytes, read_body
from swarm.http.client import KEEPALIVE_SECONDS
from swarm.http.routes import JsonRoute
from swarm.http.serve import KEEP_ALIVE_SECONDS, bind, uvicorn_config


class Body(BaseModel):
    number: int


class Pair(BaseModel):
    one: int | None = None
    two: int | None = None

    @model_validator(mode="after")
    def _has_one(self) -> Pair:
        if self.one is None and self.two is None:
            raise ValueError("send one, two, or both")
        return self


class Echoed(BaseModel):
    number: int
    key: str


async def echo(request: Request, body: Body) -> Echoed:
    return Echoed(number=body.number, key=bearer_bytes(request.scope["headers"]).decode())


async def number() -> Body:
    return Body(number=1)


async def pair(body: Pair) -> Pair:
    return body


async def asked(query: Pair) -> Pair:
    return query


async def raw(request: Request) -> Response:
    return Response(bytes(await read_body(request.receive)))


async def later(request: Request) -> Response:
    raise UnavailableError("not now", retry_after=2.2)


async def broken(request: Request) -> Response:
    raise ZeroDivisionError("secret detail")


@pytest.fixture
def client() -> httpx.AsyncClient:
    app = App(
        routes=[
            JsonRoute("/echo", echo, methods=["POST"]),
            JsonRoute("/number", number),
            JsonRoute("/pair", pair, methods=["POST"]),
            JsonRoute("/asked", asked),
            Route("/later", later),
            Route("/later", raw, methods=["PUT"]),
            Route("/lat{rest:path}", raw, methods=["PATCH"]),
            Route("/broken", broken),
        ],
        middleware=[Middleware(RequestMiddleware), Middleware(ErrorMiddleware, body_limit=lambda scope: 64)],
    )
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


@pytest.mark.anyio
async def test_a_good_id_is_echoed_and_a_bad_one_replaced(client: httpx.AsyncClient) -> None:
    async with client:
        good = await client.post("/echo", json={"number": 1}, headers={"x-request-id": "abc-1"})
        bad = await client.post("/echo", json={"number": 1}, headers={"x-request-id": "a b\x01"})
    assert good.headers["x-request-id"] == "abc-1"
    assert bad.headers["x-request-id"].startswith("req_")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        (b"{", 400, "malformed_json"),
        (b"[1]", 400, "malformed_json"),
        (b"[" * 60, 400, "malformed_json"),
        (b'{"number": NaN}', 400, "malformed_json"),
        (b'{"number": 1, "a": [-Infinity]}', 400, "malformed_json"),
        (b'{"number": 1, "a": 1e999}', 400, "malformed_json"),
        (b'{"number": 1, "a": "\\ud800"}', 400, "malformed_json"),
        (b'{"number": 1, "a": "\\uDC00\\uD800"}', 400, "malformed_json"),
        (b'{"number": 1, "a": "\xed\xa0\x80"}', 400, "malformed_json"),
        (b'{"number": 1, "a": "\xff"}', 400, "malformed_json"),
        (b'{"number": "x"}', 400, "invalid_request"),
        (b'{"number": 1, "pad": "' + b"x" * 99 + b'"}', 413, "payload_too_large"),
    ],
)
async def test_bad_bodies(client: httpx.AsyncClient, content: bytes, status: int, code: str) -> None:
    async with client:
        answer = await client.post("/echo", content=content)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.anyio
async def test_a_fault_of_no_single_field_is_told_in_our_own_words(client: httpx.AsyncClient) -> None:
    async with client:
        body = (await client.post("/pair", json={})).json()["error"]
        query = (await client.get("/asked")).json()["error"]
    assert (body["message"], body["param"]) == ("send one, two, or both", "")
    assert (query["message"], query["param"]) == ("/asked?: send one, two, or both", "")


@pytest.mark.anyio
@pytest.mark.parametrize("pad", [b'"\\ud83d\\ude00"', b'"\xf0\x9f\x98\x80"', b"1e300", b'"\\\\ud800"'])
async def test_good_bodies(client: httpx.AsyncClient, pad: bytes) -> None:
    async with client:
        answer = await client.post("/echo", content=b'\xef\xbb\xbf{"number": 1, "pad": ' + pad + b"}")
    assert answer.status_code == 200


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("encoding", "status"), [("gzip", 400), ("gzip, br", 415), ("Zstd", 415), ("identity", 200), ("", 200)]
)
async def test_a_compressed_body_is_refused_by_the_name_of_its_encoding(
    client: httpx.AsyncClient, encoding: str, status: int
) -> None:
    async with client:
        body = b'{"number": 1}'
        answer = await client.post("/echo", content=body, headers={"content-encoding": encoding})
    assert answer.status_code == status, answer.text
    if status == 415:
        error = answer.json()["error"]
        assert error["code"] == "unsupported_content_encoding"
        assert error["message"] == f"content-encoding: {encoding} is not supported; send the body uncompressed"


@pytest.mark.anyio
@pytest.mark.parametrize(("pad", "status"), [(9, 200), (99, 413)])
async def test_a_packed_body_is_read_up_to_its_bound(client: httpx.AsyncClient, pad: int, status: int) -> None:
    packed = gzip.compress(b'{"number": 1, "pad": "' + b"x" * pad + b'"}')
    async with client:
        answer = await client.post("/echo", content=packed, headers={"content-encoding": "gzip"})
    assert answer.status_code == status, answer.text


@pytest.mark.anyio
async def test_a_body_without_declared_length_is_bounded(client: httpx.AsyncClient) -> None:
    async def chunks():
        for _ in range(10):
            yield b"x" * 10

    async with client:
        answer = await client.post("/echo", content=chunks())
    assert answer.status_code == 413


@pytest.mark.anyio
async def test_not_now_says_when(client: httpx.AsyncClient) -> None:
    async with client:
        answer = await client.get("/later")
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "3"
    assert answer.headers["x-should-retry"] == "true"


@pytest.mark.anyio
async def test_an_unexpected_error_hides_its_detail(client: httpx.AsyncClient) -> None:
    async with client:
        answer = await client.get("/broken")
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert answer.headers["x-request-id"] in answer.json()["error"]["message"]
    assert answer.json()["error"]["code"] == "internal_error"


@pytest.mark.anyio
async def test_what_answers_get_answers_head(client: httpx.AsyncClient) -> None:
    async with client:
        get, head = await client.get("/number"), await client.head("/number")
    assert (head.status_code, head.headers["content-length"]) == (200, get.headers["content-length"])


@pytest.mark.anyio
async def test_who_wants_a_websocket_through_a_proxy_is_told_at_once_to_use_http(client: httpx.AsyncClient) -> None:
    """As Codex through nginx, which takes `Upgrade` out: upon a 426 alone it asks by HTTP at once."""
    async with client:
        for path in ("/echo", "/nowhere"):
            answer = await client.get(path, headers={"sec-websocket-version": "13"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (426, "no_websockets")


@pytest.mark.anyio
async def test_unknown_route_and_method_are_openai_shaped(client: httpx.AsyncClient) -> None:
    async with client:
        unknown, method = await client.get("/nope"), await client.get("/echo")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "route_not_found")
    assert (method.status_code, method.headers["allow"]) == (405, "POST")


@pytest.mark.anyio
async def test_a_path_allows_the_methods_of_all_its_routes(client: httpx.AsyncClient) -> None:
    async with client:
        refused = await client.delete("/later")
    assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD, PUT")


@pytest.mark.anyio
@pytest.mark.parametrize(
    "headers", [{"authorization": "Bearer k1"}, {"authorization": "bearer k1"}, {"x-api-key": "k1"}]
)
async def test_the_key_is_read_from_either_header(client: httpx.AsyncClient, headers: dict[str, str]) -> None:
    async with client:
        answer = await client.post("/echo", json={"number": 1}, headers=headers)
    assert answer.json()["key"] == "k1"


@pytest.mark.anyio
@pytest.mark.parametrize("drip", [False, True])
async def test_a_body_that_does_not_arrive_in_time_is_refused_and_its_connection_closed(drip: bool) -> None:
    app = App(
        routes=[Route("/raw", raw, methods=["POST"])],
        middleware=[Middleware(ErrorMiddleware, body_limit=lambda scope: 10**6, body_seconds=0.2)],
    )
    listener = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn_config(app, shutdown_seconds=2, log_level="warning"))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    reader, writer = await asyncio.open_connection(*listener.getsockname()[:2])

    async def send() -> None:
        writer.write(b"POST /raw HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\nx")
        while drip:
            await anyio.lowlevel.checkpoint()
            writer.write(b"x")

    sending = asyncio.create_task(send())
    async with asyncio.timeout(30):
        answer = await reader.readuntil(b"}")
        assert answer.startswith(b"HTTP/1.1 408 ") and b"body_timeout" in answer
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b"}", "the end of the error object, and then of the connection"
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    writer.close()
    server.should_exit = True
    await serving


def test_connections_outlive_those_of_our_clients() -> None:
    assert 2 * KEEPALIVE_SECONDS < KEEP_ALIVE_SECONDS


async def waiting(request: Request, body: Body) -> Response:
    await until_gone(request.receive, asyncio.sleep(60))
    raise AssertionError("it waited in vain")


@pytest.mark.anyio
@pytest.mark.parametrize("more", [True, False], ids=["while it sends", "while it waits"])
async def test_a_caller_that_leaves_is_no_fault(caplog: pytest.LogCaptureFixture, more: bool) -> None:
    app = App(
        routes=[JsonRoute("/echo", waiting, methods=["POST"])],
        middleware=[Middleware(ErrorMiddleware, body_limit=lambda scope: 64)],
    )
    parts: list[Message] = [
        {"type": "http.request", "body": b"{" if more else b'{"number": 1}', "more_body": more},
        {"type": "http.disconnect"},
    ]
    sent: list[Message] = []

    async def receive() -> Message:
        return parts.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/echo",
        "headers": [(b"transfer-encoding", b"chunked")],
        "query_string": b"",
    }
    await app(scope, receive, send)
    assert sent[0]["status"] == 499
    assert not caplog.records


@pytest.mark.anyio
async def test_a_request_that_outlives_the_server_is_told_to_come_back() -> None:
    began = asyncio.Event()

    async def for_ever(request: Request) -> Response:
        began.set()
        await asyncio.Event().wait()
        return Response()

    app = App(routes=[Route("/", for_ever)], middleware=[Middleware(ErrorMiddleware, body_limit=lambda scope: 64)])
    with bind("127.0.0.1", 0) as sock:
        server = uvicorn.Server(uvicorn_config(app, shutdown_seconds=1, log_level="critical"))
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=30) as http:
            asking = asyncio.create_task(http.get(f"http://127.0.0.1:{sock.getsockname()[1]}/"))
            await began.wait()
            server.should_exit = True
            answer = await asking
        await serving
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "stopping")
    assert (answer.headers["x-should-retry"], answer.headers["retry-after"]) == ("true", "5")
