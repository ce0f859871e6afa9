"""The client of vLLM over real sockets: which connections it uses, and what it makes of those that fail."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import pytest

from swarm.server.dataplane.replica_client import ReplicaClient, TransientError, UnreachableError, UpstreamRefusalError

pytestmark = pytest.mark.anyio

BODY = {"messages": [{"role": "user", "content": "hi"}]}
Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


class Server:
    """Reads requests to the end of their body and leaves each to the next of ``answers``, the last of them to all."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.heads: list[str] = []
        self.connections = 0
        self.address = ""
        self._writers: list[asyncio.StreamWriter] = []

    @property
    def url(self) -> str:
        return f"http://{self.address}/v1/chat/completions"

    async def __aenter__(self) -> Server:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = next((line for line in head.split("\r\n") if line.startswith("content-length:")), ":0")
                await reader.readexactly(int(length.partition(":")[2]))
                self.heads.append(head)
                await (self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])(writer)
        writer.close()


def says(status: str, content: bytes, *, length: int | None = None, head: str = "") -> Answer:
    """Answers with ``content``, of which ``length`` bytes were announced."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        announced = len(content) if length is None else length
        writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {announced}\r\n{head}\r\n".encode() + content)

    return answer


def cuts(answer: Answer) -> Answer:
    """``answer``, and the end of the connection."""

    async def then_close(writer: asyncio.StreamWriter) -> None:
        await answer(writer)
        writer.close()

    return then_close


@pytest.fixture
async def upstream() -> AsyncGenerator[ReplicaClient]:
    upstream = ReplicaClient()
    yield upstream
    await upstream.close()


async def test_a_proxy_and_credentials_of_the_environment_are_not_used(
    upstream: ReplicaClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Server(says("200 OK", b"{}")) as server, Server(says("200 OK", b"{}")) as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://{proxy.address}")
        await upstream.post(server.url, BODY)
        assert (len(server.heads), len(proxy.heads)) == (1, 0)


async def test_no_connection_is_told_from_one_that_broke(upstream: ReplicaClient) -> None:
    async with Server(says("200 OK", b"{}")) as gone:
        url = gone.url
    with pytest.raises(UnreachableError):
        await upstream.post(url, BODY)
    broken: list[Answer] = [
        cuts(says("200 OK", b'{"a"', length=100)),
        cuts(says("nonsense", b"")),
        says("200 OK", b"no JSON"),
        says("200 OK", b"[1]"),
        says("503 Busy", b"later"),
        says("500 Oops", b"{}"),
    ]
    async with Server(*broken) as server:
        for _ in broken:
            with pytest.raises(TransientError) as caught:
                await upstream.post(server.url, BODY)
            assert not isinstance(caught.value, UnreachableError)
        assert len(server.heads) == len(broken)


async def test_a_call_is_never_sent_twice_by_itself(upstream: ReplicaClient) -> None:
    async def close(writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with Server(says("200 OK", b"{}"), close) as server:
        await upstream.post(server.url, BODY)
        with pytest.raises(TransientError):
            await upstream.post(server.url, BODY)
        assert len(server.heads) == 2


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{"error": {"message": "too long", "code": 400}}', {"message": "too long", "code": 400}),
        (b"plain", {"message": "plain", "type": "invalid_request_error", "param": None, "code": None}),
    ],
)
async def test_a_refusal_keeps_its_words(upstream: ReplicaClient, content: bytes, expected: dict[str, Any]) -> None:
    async with Server(says("400 Bad", content)) as server:
        with pytest.raises(UpstreamRefusalError) as caught:
            await upstream.post(server.url, BODY)
        with pytest.raises(UpstreamRefusalError):
            await anext(upstream.events(server.url, BODY))
    assert (caught.value.status, caught.value.body()) == (400, {"error": expected})


@pytest.mark.parametrize(
    "words",
    [
        '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set',
        'tool_choice="required" requires --tool-call-parser to be set',
    ],
)
async def test_a_missing_tool_parser_is_told_in_our_words(upstream: ReplicaClient, words: str) -> None:
    content = json.dumps({"error": {"message": words, "type": "BadRequestError", "param": None, "code": 400}})
    async with Server(says("400 Bad", content.encode())) as server:
        with pytest.raises(UpstreamRefusalError) as caught:
            await upstream.post(server.url, BODY)
    error = caught.value.body()["error"]
    assert (caught.value.status, error["code"], error["param"]) == (400, "no_tool_call_parser", "tools")
    assert "`job.tool_call_parser`" in error["message"] and "--" not in error["message"]


@pytest.mark.parametrize(("status", "well"), [("200 OK", True), ("503 Busy", False)])
async def test_a_replica_is_healthy_if_it_says_so(upstream: ReplicaClient, status: str, well: bool) -> None:
    async with Server(says(status, b"")) as server:
        assert await upstream.is_healthy(server.address) is well
        assert server.heads[0].startswith("get /health ")
    assert not await upstream.is_healthy(server.address)


async def test_a_stream_that_breaks_off_is_told(upstream: ReplicaClient) -> None:
    event = b'data: {"a": 1}\n\n'
    for answer in (cuts(says("200 OK", event, length=1000)), says("200 OK", event)):
        got: list[dict[str, Any]] = []
        async with Server(answer) as server:
            with pytest.raises(TransientError):
                async for chunks in upstream.events(server.url, BODY):
                    got += chunks
        assert got == [{"a": 1}]
