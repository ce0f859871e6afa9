"""Binding a port: what cannot be bound is one clear line."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from collections.abc import Callable

import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from swarm.errors import ConfigError
from swarm.http.asgi import ErrorMiddleware
from swarm.http.serve import allow_connections, bind, free_port, run_app, uvicorn_config
from tests.swarm.http.test_client import probes

WEBSOCKET = (
    b"connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
    b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


def test_port_zero_takes_a_free_one_and_listens() -> None:
    with bind("127.0.0.1", 0) as sock, socket.create_connection(sock.getsockname()[:2], timeout=5):
        assert sock.getsockname()[1] > 0
        assert sock.proto == socket.IPPROTO_TCP, "or every answer waits 40 ms for an ACK"


@pytest.mark.skipif(not hasattr(socket, "TCP_KEEPIDLE"), reason="another name in macOS")
def test_a_caller_that_waits_in_silence_is_asked_whether_it_is_there() -> None:
    """Or a router on the way forgets its connection, and a caller that vanished keeps its place."""
    with bind("127.0.0.1", 0) as sock, socket.create_connection(sock.getsockname()[:2], timeout=5):
        accepted, _ = sock.accept()
        with accepted:
            is_on, first, last = probes(accepted)
    assert is_on and first < 60 < last < 300


def test_a_port_in_use_is_said() -> None:
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use") as error:
            bind("127.0.0.1", port)
    assert error.value.code == "port_in_use"


def test_a_free_port_stays_free_until_a_server_that_is_long_in_starting_listens() -> None:
    chosen = {free_port() for _ in range(50)}
    given_out: set[int] = set()
    for _ in range(20_000):
        with socket.socket() as anybody:
            anybody.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            anybody.bind(("127.0.0.1", 0))
            given_out.add(anybody.getsockname()[1])
    assert not chosen & given_out, "who asks for any port gets it meanwhile"


def test_a_server_has_as_many_connections_as_the_system_allows() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
        allow_connections()
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert allowed == (65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536), hard)


def test_a_system_whose_own_limit_is_lower_gives_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """As macOS: no hard limit, and at most 61,440 files."""
    allowed = 256

    def set_limit(_: int, limits: tuple[int, int]) -> None:
        nonlocal allowed
        if limits[0] > 61_440:
            raise ValueError("current limit exceeds maximum limit")
        allowed = limits[0]

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    allow_connections()
    assert allowed == 32_768


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1", "a" * 64 + ".invalid"])
def test_a_host_of_another_machine_is_said(host: str) -> None:
    with pytest.raises(ConfigError, match=host):
        bind(host, 0)


def test_an_app_that_fails_to_start_is_said() -> None:
    async def broken(scope: object, receive: object, send: object) -> None:
        raise RuntimeError("no")

    with pytest.raises(ConfigError, match="did not start"):
        run_app(broken, bind("127.0.0.1", 0))


@pytest.fixture(params=[None, "uvloop"])
def loop(request: pytest.FixtureRequest) -> Callable[[], asyncio.AbstractEventLoop]:
    return pytest.importorskip("uvloop").new_event_loop if request.param else asyncio.new_event_loop


def test_who_wants_a_websocket_is_told_at_once_to_use_http(
    loop: Callable[[], asyncio.AbstractEventLoop], caplog: pytest.LogCaptureFixture
) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        answer = runner.run(_answer_to(b"GET /v1/responses", WEBSOCKET))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 426 ") and b"content-length: %d" % len(body) in head
    assert b"\r\nupgrade: HTTP/1.1\r\n" in head
    assert json.loads(body)["error"]["code"] == "no_websockets"
    assert not caplog.records


@pytest.mark.anyio
@pytest.mark.parametrize("upgrade", [b"Upgrade: h2c", b"UPGRADE: H2C", b"upgrade:h2c, websocket"])
@pytest.mark.parametrize(
    "body", [b"content-length: 2\r\n\r\n{}", b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"]
)
async def test_who_offers_http_2_is_answered_in_http_1(
    caplog: pytest.LogCaptureFixture, body: bytes, upgrade: bytes
) -> None:
    """Java's client does with each request, unless it is told not to."""
    offer = b"connection: Upgrade, HTTP2-Settings\r\n" + upgrade + b"\r\nHTTP2-Settings: AAEAAEAAAAIAAAAA\r\n"
    answer = await _answer_to(b"POST /v1/responses", offer + body)
    assert answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b"\r\n\r\n{}")
    assert not caplog.records


@pytest.mark.anyio
@pytest.mark.parametrize("cut", range(3))
async def test_a_head_that_comes_in_parts_ends_where_its_body_begins(cut: int) -> None:
    body = b"a log\r\nUpgrade: websocket\r\n\r\n"
    head = b"content-length: %d\r\n" % len(body)
    answer = await _answer_to(b"POST /v1/responses", head + b"\r\n"[:cut], b"\r\n"[cut:] + body)
    assert answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(body)


@pytest.mark.anyio
async def test_a_body_that_comes_behind_its_answer_stays_as_it_is() -> None:
    """Of a request that is refused at its head, say; a byte less, and the next request is read as its rest."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(scope["path"])(scope, receive, send)

    config = uvicorn_config(app, shutdown_seconds=1, log_level="error")
    config.lifespan = "off"
    with bind("127.0.0.1", 0) as sock:
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        reader, writer = await asyncio.open_connection(*sock.getsockname()[:2])
        body = b"a log\r\nUpgrade: h2c\r\n"
        writer.write(b"POST /first HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body))
        async with asyncio.timeout(10):
            await reader.readuntil(b"/first")
            writer.write(body)
            writer.write(b"GET /second HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            answer = await reader.read()
        writer.close()
        server.should_exit = True
        await serving
    assert answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b"/second")


async def _answer_to(line: bytes, *parts: bytes) -> bytes:
    """The answer to a request, which comes in these parts: its body."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for what in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{what}.complete"})
            return
        body = await Request(scope, receive).body()
        await Response(body, headers={"connection": "close"})(scope, receive, send)

    with bind("127.0.0.1", 0) as sock:
        checked = ErrorMiddleware(app, body_limit=lambda _: 1000)
        server = uvicorn.Server(uvicorn_config(checked, shutdown_seconds=1, log_level="warning"))
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        reader, writer = await asyncio.open_connection(*sock.getsockname()[:2])
        for part in (line + b" HTTP/1.1\r\nhost: localhost\r\n" + parts[0], *parts[1:]):
            writer.write(part)
            await asyncio.sleep(0.05)
        async with asyncio.timeout(60):
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r")[0]))
        writer.close()
        server.should_exit = True
        await serving
    return head + body
