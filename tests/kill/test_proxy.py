"""The proxy of the kill test: each fault is the one that its name says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from benchmarks.wire import Connection, post
from tests.kill.proxy import Proxy, read_message

pytestmark = pytest.mark.anyio


class Server:
    """Counts its requests and answers with their number."""

    def __init__(self) -> None:
        self.served = 0
        self.changed = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await read_message(reader) is not None:
            self.served += 1
            self.changed.set()
            body = str(self.served).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        writer.close()


class Scripted(Proxy):
    fault = "none"

    def _choose(self) -> str:
        return self.fault


@pytest.fixture
async def server() -> AsyncGenerator[tuple[Server, int]]:
    server = Server()
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    yield server, listening.sockets[0].getsockname()[1]
    listening.close()


@pytest.mark.parametrize(
    ("fault", "answered", "served"),
    [
        ("none", True, 1),
        ("drop_request", False, 0),
        ("drop_reply", False, 1),
        ("duplicate", True, 2),
        ("duplicate_late", True, 2),
        ("delay_request", True, 1),
        ("delay_reply", True, 1),
    ],
)
async def test_a_fault_does_what_it_says(server: tuple[Server, int], fault: str, answered: bool, served: int) -> None:
    behind, port = server
    proxy = Scripted(1, port, longest_delay=0.06)
    proxy.fault = fault
    async with proxy.serving() as front, asyncio.timeout(20):
        connection = await Connection.open("127.0.0.1", front)
        try:
            status, _ = await connection.ask(post("/x", b"{}"))
            assert answered and status == 200
        except ConnectionError:
            assert not answered
        connection.close()
        while behind.served < served:
            behind.changed.clear()
            await behind.changed.wait()
    assert behind.served == served
    assert proxy.seen == {fault: 1}


async def test_it_hangs_up_with_its_client() -> None:
    gone = asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_message(reader)
        asked.set()
        await reader.read()
        gone.set()
        writer.close()

    asked = asyncio.Event()
    listening = await asyncio.start_server(hang, "127.0.0.1", 0)
    proxy = Scripted(1, listening.sockets[0].getsockname()[1])
    async with proxy.serving() as front, asyncio.timeout(20):
        connection = await Connection.open("127.0.0.1", front)
        answer = connection.ask(post("/x", b"{}"))
        await asked.wait()
        connection.close()
        await gone.wait()
        with pytest.raises(ConnectionError):
            await answer
    listening.close()
