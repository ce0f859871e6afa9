"""Over real sockets: who keeps a server waiting loses the connection, who waits for it does not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from swarm.http.client import KEEPALIVE_SECONDS
from swarm.http.patience import Patience
from swarm.http.serve import PATIENCE, bind, uvicorn_config
from swarm.http.shortcuts import ShortRequest

pytestmark = pytest.mark.anyio

LONG = 60.0
NEVER = 3600.0
HEAD = b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n"


class Server:
    """One that is easily bored, or not; ``/slow`` answers once ``release`` is set."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.release = asyncio.Event()
        self.asked = asyncio.Event()

    async def slow(self, request: Request) -> Response:
        self.asked.set()
        await self.release.wait()
        return PlainTextResponse("at last")

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def until_closed(self, sent: bytes) -> bytes:
        """What a caller gets who sends ``sent`` and then nothing."""
        reader, writer = await self.connect()
        writer.write(sent)
        async with asyncio.timeout(LONG):
            answer = await reader.read()
        writer.close()
        return answer


async def echo(request: Request) -> Response:
    return PlainTextResponse(await request.body())


def answered_at_once(request: ShortRequest) -> bool:
    request.answer(200, b"content-length: 5\r\n", b"short")
    return True


@contextlib.asynccontextmanager
async def serving(patience: Patience) -> AsyncGenerator[Server]:
    listener = bind("127.0.0.1", 0)
    server = Server(listener.getsockname()[1])
    app = Starlette(routes=[Route("/echo", echo, methods=["POST"]), Route("/slow", server.slow)])
    config = uvicorn_config(
        app, shutdown_seconds=2, log_level="warning", patience=patience, shortcuts={"/short": answered_at_once}
    )
    running = uvicorn.Server(config)
    task = asyncio.create_task(running.serve(sockets=[listener]))
    try:
        yield server
    finally:
        server.release.set()
        running.should_exit = True
        await task


@pytest.mark.parametrize(
    ("patience", "sent"),
    [
        (Patience(idle=NEVER, head=0.2, look=0.05), b"POST /echo HTTP/1.1\r\nhost: x\r\n"),
        (Patience(idle=NEVER, head=NEVER, pause=0.2, look=0.05), HEAD + b"x" * 99),
        (Patience(idle=NEVER, head=NEVER, pause=NEVER, body=0.2, look=0.05), HEAD + b"x" * 99),
        (Patience(idle=NEVER, pause=0.2, look=0.05), HEAD.replace(b"/echo", b"/short") + b"x"),
    ],
    ids=["head", "pause", "body", "shortcut"],
)
async def test_a_request_that_does_not_end_is_refused(patience: Patience, sent: bytes) -> None:
    async with serving(patience) as server:
        assert (await server.until_closed(sent)).startswith(b"HTTP/1.1 408 ")


async def test_a_body_by_drops_ends_with_the_time_for_bodies() -> None:
    async with serving(Patience(idle=NEVER, head=NEVER, pause=NEVER, body=0.5, look=0.05)) as server:
        reader, writer = await server.connect()
        writer.write(HEAD.replace(b"100", b"1000000"))

        async def drip() -> None:
            while True:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.01)

        dripping = asyncio.create_task(drip())
        async with asyncio.timeout(LONG):
            assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
        dripping.cancel()
        await asyncio.gather(dripping, return_exceptions=True)
        writer.close()


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        (b"", b""),
        (b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nhi", b"hi"),
        (b"POST /short HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nhi", b"short"),
    ],
    ids=["from the beginning", "after an answer", "after a short answer"],
)
async def test_an_idle_connection_is_closed_without_a_word(request_: bytes, answer: bytes) -> None:
    async with serving(Patience(idle=0.2, look=0.05)) as server:
        assert (await server.until_closed(request_)).rpartition(b"\r\n\r\n")[2] == answer


async def test_who_waits_for_an_answer_is_not_cut_off() -> None:
    async with serving(Patience(idle=0.2, head=0.2, pause=0.2, body=0.2, look=0.05)) as server:
        reader, writer = await server.connect()
        # the next request has begun as well
        writer.write(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\nGET /slow HTTP/1.1\r\n")
        async with asyncio.timeout(LONG):
            await server.asked.wait()
            # others that came later have run out of time
            assert await server.until_closed(b"") == b""
            assert b" 408 " in await server.until_closed(b"GET")
            server.release.set()
            assert b"200 OK" in await reader.readline()
            assert b"at last" in await reader.read(), "and only what is late is"
        writer.close()


async def test_connections_outlive_those_of_our_clients() -> None:
    assert PATIENCE.idle > 2 * KEEPALIVE_SECONDS
