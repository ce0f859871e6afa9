"""People who use an application: they ask in every way there is, judge each answer, and sometimes hang up.

An answer is right when its status is 200 and it is whole by the rules of its dialect; everything else is an error that
a user would see.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any

#: An SDK would wait longer; nothing here should take as long.
_PATIENCE = 120.0


@dataclass(frozen=True)
class Ask:
    """One way to ask; ``ends`` is what stands at the end of a whole stream."""

    name: str
    path: str
    body: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    ends: bytes = b""

    def request(self, text: str, name: str = "") -> bytes:
        """The bytes of the request, under the id ``name``."""
        body = {"model": "stand-in", **self.body}
        if "input" in body:
            body["input"] = text
        else:
            body["messages"] = [{"role": "user", "content": text}]
        content = json.dumps(body).encode()
        lines = {
            "host": "127.0.0.1",
            "content-type": "application/json",
            "content-length": str(len(content)),
            "connection": "close",
            # as OpenAI's SDK says of itself
            "x-stainless-retry-count": "0",
            "x-stainless-read-timeout": "600",
            **({"x-request-id": name} if name else {}),
            **self.headers,
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        return f"POST {self.path} HTTP/1.1\r\n{head}\r\n".encode() + content


_CHAT, _DONE = "/v1/chat/completions", b"data: [DONE]"
_STREAM = {"messages": [], "stream": True}
_POLICY, _TRAIN = "x-swarm-policy", "x-swarm-train"

BEST = (
    Ask("best", _CHAT, {"messages": []}),
    Ask("best, streamed", _CHAT, _STREAM, ends=_DONE),
    Ask("quorum", _CHAT, {"messages": []}, {_POLICY: "best;quorum=1"}),
    Ask("deadline", _CHAT, _STREAM, {_POLICY: "best;deadline=0.02"}, ends=_DONE),
    Ask("messages", "/v1/messages", {"messages": [], "max_tokens": 50}),
    Ask("messages, streamed", "/v1/messages", {**_STREAM, "max_tokens": 50}, ends=b"message_stop"),
    Ask("responses", "/v1/responses", {"input": ""}),
    Ask("responses, streamed", "/v1/responses", {"input": "", "stream": True}, ends=b"response.completed"),
    Ask("straight", _CHAT, {"messages": []}, {_TRAIN: "false"}),
    Ask("untrained", _CHAT, {"messages": []}, {_TRAIN: "false", _POLICY: "best"}),
)
LIVE = (
    Ask("first", _CHAT, _STREAM, {_POLICY: "first"}, ends=_DONE),
    Ask("straight, streamed", _CHAT, _STREAM, {_TRAIN: "false"}, ends=_DONE),
)
ALL = BEST + LIVE


@dataclass
class Answer:
    """What came of one request, whole or not."""

    ask: Ask
    received: bytes
    seconds: float

    @property
    def status(self) -> int:
        return int(self.received[9:12]) if self.received.startswith(b"HTTP/") and len(self.received) > 12 else 0

    @property
    def source(self) -> str:
        """Who answered, as the gateway says; empty: it does not."""
        return self.header("x-swarm-source")

    def header(self, name: str) -> str:
        """The value of a header in lower case; empty: there is none."""
        head = self.received.partition(b"\r\n\r\n")[0].decode("latin-1").lower()
        return head.partition(f"\r\n{name}: ")[2].partition("\r\n")[0]

    @property
    def content(self) -> bytes:
        head, _, rest = self.received.partition(b"\r\n\r\n")
        return _dechunked(rest) if b"transfer-encoding: chunked" in head.lower() else rest

    @property
    def error(self) -> str:
        """What is wrong with it for a user; empty for nothing."""
        content = self.content
        if self.status != 200:
            return f"{self.ask.name}: status {self.status} {content[:300]!r}"
        if not self.ask.ends:
            try:
                whole = json.loads(content)
            except ValueError:
                return f"{self.ask.name}: broken off {content[:300]!r}"
            return f"{self.ask.name}: {content[:300]!r}" if whole.get("error") else ""
        if b'"error":{' in content.replace(b" ", b"") or b"event: error" in content:
            return f"{self.ask.name}: error event {content[-300:]!r}"
        return "" if self.ask.ends in content else f"{self.ask.name}: broken off {content[-300:]!r}"


@dataclass(frozen=True)
class Left:
    """Someone who hung up.

    Attributes:
        name: the request's id.
        asked: whether the question was sent whole.
        at: when, on the clock that all processes of this machine share.
        answer: the whole answer, where that was faster.
    """

    name: str
    asked: bool
    at: float
    answer: Answer | None


def _dechunked(rest: bytes) -> bytes:
    content = bytearray()
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        try:
            length = int(size, 16)
        except ValueError:
            break
        content += rest[:length]
        rest = rest[length + 2 :]
    return bytes(content)


async def ask(port: int, way: Ask, text: str, name: str = "") -> Answer:
    """Ask, under the id ``name``, and read to the end."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    received = b""
    try:
        async with asyncio.timeout(_PATIENCE):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(way.request(text, name))
                received = await reader.read(-1)
            finally:
                writer.close()
    except (OSError, TimeoutError) as exc:
        received += f" {exc!r}".encode()
    return Answer(way, received, loop.time() - began)


async def hang_up(port: int, way: Ask, name: str, text: str, chance: random.Random, moment: Awaitable[Any]) -> Left:
    """Ask under the id ``name``, and hang up once ``moment`` is over, politely or not.

    Now and then this is in the midst of the question already; see :attr:`Left.asked`.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    request = way.request(text, name)
    received = bytearray()
    leaving = asyncio.ensure_future(moment)
    asked = chance.random() >= 0.03

    async def read() -> None:
        while part := await reader.read(65536):
            received.extend(part)

    reading = asyncio.create_task(read())
    began = asyncio.get_running_loop().time()
    try:
        writer.write(request if asked else request[: chance.randrange(1, len(request))])
        async with asyncio.timeout(_PATIENCE):
            await asyncio.wait({leaving, reading}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        whole = reading.done()
        reading.cancel()
        await asyncio.gather(reading, leaving, return_exceptions=True)
        if chance.random() < 0.5:
            # a reset instead of a goodbye
            ours: socket.socket = writer.get_extra_info("socket")
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()
    answer = Answer(way, bytes(received), asyncio.get_running_loop().time() - began)
    return Left(name, asked, time.monotonic(), answer if whole else None)
