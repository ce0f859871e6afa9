"""The swarm client over the gateway's connections: what breaks is repeated, or told, as over httpx."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from swarm.client import AsyncSwarmClient, RetryPolicy
from swarm.client.transport import HttpSender
from swarm.errors import StateError, UnavailableError
from swarm.http.client import HttpClient
from swarm.http.serve import bind

pytestmark = pytest.mark.anyio

BODY = b'{"engine_status": "ENGINE.ROLLING", "global_step": 3}'
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY)
#: A call that fails twice waits this long, which no test here does.
SLOW = RetryPolicy(attempts=3, base=1000.0, cap=1000.0, total=5000.0)

Handle = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(handle: Handle) -> AsyncGenerator[str]:
    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def client(url: str, policy: RetryPolicy = SLOW, seconds: float = 30.0) -> AsyncSwarmClient:
    sender = HttpSender(HttpClient(keepalive=60))
    return AsyncSwarmClient(url, policy=policy, transport=sender, request_timeout=seconds)


async def test_a_connection_that_broke_while_it_idled_is_replaced_at_once() -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(ANSWER)
        # it is kept until the next request comes, which it breaks under
        await reader.read(1)
        writer.close()

    async with serving(handle) as url, asyncio.timeout(60), client(url) as swarm:
        assert [await swarm.get_global_step() for _ in range(2)] == [3, 3]


async def test_no_server_and_a_silent_one_are_told_apart_from_refusals() -> None:
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    once = RetryPolicy(attempts=1)
    async with client(f"http://127.0.0.1:{port}", once) as swarm:
        with pytest.raises(UnavailableError) as none:
            await swarm.get_global_step()
        assert none.value.code == "server_unreachable"

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(-1)
        writer.close()

    async with serving(silent) as url:
        swarm = client(url, once, 0.2)
        with pytest.raises(UnavailableError):
            await swarm.get_global_step()
        await swarm.close()
        with pytest.raises(StateError):
            await swarm.get_global_step()
