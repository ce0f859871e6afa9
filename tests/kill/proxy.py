"""An HTTP proxy that loses, repeats and delays requests and replies, by a seeded generator.

Invariant: a request is forwarded as it came or not at all, and a reply that reaches the client is one that the server
gave to this request; when the client hangs up, so does the proxy, unless the fault is that the request arrives late.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

#: probability of each fault, of every request
FAULTS = {
    "drop_request": 0.04,
    "drop_reply": 0.06,
    "duplicate": 0.05,
    "duplicate_late": 0.05,
    "delay_request": 0.05,
    "delay_reply": 0.05,
}
#: no wait of the proxy for the server is longer: the longest is a claim that long-polls
_FORWARD_SECONDS = 30.0


@dataclass
class Proxy:
    """Forwards to ``127.0.0.1:port``; ``calm`` ends the faults. ``seen`` counts them."""

    seed: int
    port: int = 0
    calm: bool = False
    longest_delay: float = 1.5
    seen: Counter[str] = field(default_factory=Counter)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncGenerator[int]:
        """Listen on a free port, which is given."""
        self._random = random.Random(self.seed)
        server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._spawn(self._connection(reader, writer))

    def _spawn(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (request := await read_message(reader)) is not None:
                reply = await self._handle(request, reader)
                if reply is None:
                    return
                writer.write(reply)
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            pass
        finally:
            writer.close()

    async def _handle(self, request: bytes, client: asyncio.StreamReader) -> bytes | None:
        """The reply for the client; ``None``: hang up on it."""
        fault = self._choose()
        self.seen[fault] += 1
        pause = self._random.uniform(0.05, self.longest_delay)
        match fault:
            case "drop_request":
                return None
            case "drop_reply":
                await self._forward(request)
                return None
            case "duplicate":
                replies = await asyncio.gather(self._forward(request), self._forward(request), return_exceptions=True)
                return next((reply for reply in replies if isinstance(reply, bytes)), None)
            case "duplicate_late":
                self._spawn(self._forward_late(request, pause))
            case "delay_request":
                # the client may be gone by then, and its repetition here first
                await asyncio.sleep(pause)
                return await self._forward(request)
            case "delay_reply":
                reply = await self._forward(request)
                await asyncio.sleep(pause)
                return reply
            case _:
                pass
        return await self._forward_unless_gone(request, client)

    def _choose(self) -> str:
        if self.calm:
            return "none"
        names = [*FAULTS, "none"]
        weights = [*FAULTS.values(), 1.0 - sum(FAULTS.values())]
        return self._random.choices(names, weights)[0]

    async def _forward_late(self, request: bytes, pause: float) -> None:
        await asyncio.sleep(pause)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
            await self._forward(request)

    async def _forward_unless_gone(self, request: bytes, client: asyncio.StreamReader) -> bytes | None:
        forward = asyncio.ensure_future(self._forward(request))
        # clients do not pipeline: the next that can come from one that waits is the end of its connection
        gone = asyncio.ensure_future(client.read(1))
        try:
            await asyncio.wait([forward, gone], return_when=asyncio.FIRST_COMPLETED)
            return await forward if forward.done() else None
        finally:
            forward.cancel()
            gone.cancel()
            await asyncio.gather(forward, gone, return_exceptions=True)

    async def _forward(self, request: bytes) -> bytes | None:
        async with asyncio.timeout(_FORWARD_SECONDS):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            try:
                writer.write(request)
                return await read_message(reader)
            finally:
                writer.close()


async def read_message(reader: asyncio.StreamReader) -> bytes | None:
    """One HTTP message with its ``content-length`` body; ``None`` at the end of the connection."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as exc:
        if exc.partial:
            raise
        return None
    start = head.lower().find(b"content-length:")
    length = int(head[start + 15 : head.index(b"\r\n", start)]) if start >= 0 else 0
    return head + await reader.readexactly(length)
