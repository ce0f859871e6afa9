"""Gathered writes: order, size bound, close; and answers over a real socket leave in one piece."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from swarm.http.protocol import GATHERED_BYTES, HEAD_BYTES, GatheringTransport
from swarm.http.serve import bind, uvicorn_config

pytestmark = pytest.mark.anyio


class Recorder:
    """A transport that remembers."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.closing = False

    def write(self, data: bytes) -> None:
        self.done.append(data)

    def close(self) -> None:
        self.closing = True
        self.done.append("closed")

    def is_closing(self) -> bool:
        return self.closing

    def get_extra_info(self, name: str) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


async def test_one_turn_is_one_write(recorder: Recorder) -> None:
    transport = GatheringTransport(recorder)  # type: ignore[arg-type]
    transport.write(b"head")
    transport.write(b"body")
    assert recorder.done == []
    await asyncio.sleep(0)
    transport.write(b"next")
    await asyncio.sleep(0)
    assert recorder.done == [b"headbody", b"next"]


async def test_much_is_written_at_once(recorder: Recorder) -> None:
    transport = GatheringTransport(recorder)  # type: ignore[arg-type]
    transport.write(b"head")
    transport.write(b"x" * GATHERED_BYTES)
    assert [len(data) for data in recorder.done] == [GATHERED_BYTES + 4]


async def test_close_sends_what_waits_first(recorder: Recorder) -> None:
    transport = GatheringTransport(recorder)  # type: ignore[arg-type]
    transport.write(b"last words")
    transport.close()
    transport.write(b"too late")
    await asyncio.sleep(0)
    assert recorder.done == [b"last words", "closed"]


async def test_over_a_socket() -> None:
    import uvicorn

    async def plain(request: Request) -> Response:
        return JSONResponse({"ok": True})

    async def stream(request: Request) -> Response:
        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(50):
                yield b"x" * 20_000

        return StreamingResponse(chunks())

    app = Starlette(routes=[Route("/plain", plain), Route("/stream", stream)])
    listener = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn_config(app, shutdown_seconds=2, log_level="warning"))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        reader, writer = await asyncio.open_connection(*listener.getsockname()[:2])
        for _ in range(2):
            writer.write(b"GET /plain HTTP/1.1\r\nhost: x\r\n\r\n")
            answer = await asyncio.wait_for(reader.read(65536), 10)
            assert answer.endswith(b'\r\n\r\n{"ok":true}'), "head and body came in one piece"
        writer.write(b"GET /stream HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert (await asyncio.wait_for(reader.read(), 10)).count(b"x") == 1_000_000
        writer.close()
        await writer.wait_closed()
    finally:
        server.should_exit = True
        await task


async def test_a_whole_answer_leaves_before_what_is_done_behind_it() -> None:
    """An application that holds the event loop up until its caller has the answer."""
    import uvicorn

    arrived, in_time = threading.Event(), False

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal in_time
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok", "more_body": False})
        in_time = arrived.wait(30)

    served = Starlette(routes=[Mount("/", app)])
    listener = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn_config(served, shutdown_seconds=2, log_level="warning"))
    task = asyncio.create_task(server.serve(sockets=[listener]))

    def call() -> bytes:
        with socket.create_connection(listener.getsockname()[:2], timeout=60) as caller:
            caller.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            answer = caller.recv(65536)
            arrived.set()
            return answer

    try:
        assert (await asyncio.to_thread(call)).endswith(b"\r\n\r\nok")
        assert in_time
    finally:
        server.should_exit = True
        await task


@asynccontextmanager
async def echoing() -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to a server that answers with the length of the body and the number of headers."""
    import uvicorn

    async def echo(request: Request) -> Response:
        return JSONResponse({"body": len(await request.body()), "headers": len(request.headers)})

    listener = bind("127.0.0.1", 0)
    app = Starlette(routes=[Route("/echo", echo, methods=["GET", "POST"])])
    server = uvicorn.Server(uvicorn_config(app, shutdown_seconds=2, log_level="warning"))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        reader, writer = await asyncio.open_connection(*listener.getsockname()[:2])
        yield reader, writer
        writer.close()
    finally:
        server.should_exit = True
        await task


@pytest.mark.parametrize(
    "start",
    [
        b"GET /echo HTTP/1.1\r\nhost: x\r\nx-long: ",
        b"GET /echo?",
        b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx-long: ",
        b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5;",
    ],
    ids=["header", "url", "trailer", "chunk extension"],
)
async def test_a_head_without_end_is_cut_off(start: bytes) -> None:
    async with echoing() as (_, writer):
        writer.write(start)
        sent = 0
        with pytest.raises(ConnectionError):
            async with asyncio.timeout(20):
                while True:
                    writer.write(b"a" * 16384)
                    await writer.drain()
                    sent += 16384
                    await asyncio.sleep(0)
                    assert sent < 200 * HEAD_BYTES


async def test_a_head_that_is_too_large_is_told() -> None:
    async with echoing() as (reader, writer):
        writer.write(b"GET /echo HTTP/1.1\r\nhost: x\r\nx-long: ")
        for _ in range(2):
            writer.write(b"a" * (HEAD_BYTES // 2 + 10))
            await writer.drain()
        async with asyncio.timeout(10):
            assert (await reader.read()).startswith(b"HTTP/1.1 431 ")


async def test_large_bodies_and_many_requests_are_no_large_heads() -> None:
    async with echoing() as (reader, writer):
        for body in (b"x" * (5 * HEAD_BYTES), b"", b"y"):
            for _ in range(3):
                start = "POST /echo HTTP/1.1\r\nhost: x\r\nx-some: "
                head = f"{start}{'a' * 30_000}\r\ncontent-length: {len(body)}\r\n\r\n"
                writer.write(head.encode() + body)
                async with asyncio.timeout(10):
                    answer = await reader.readuntil(b"}")
                assert f'"body":{len(body)}'.encode() in answer
