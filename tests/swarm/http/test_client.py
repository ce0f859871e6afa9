"""The HTTP client, against servers that say exactly what a test wants."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import psutil
import pytest

from swarm.http.client import ConnectionBrokenError, HttpClient, has_proxy, proxy_of
from tests.ports import free_ports

pytestmark = pytest.mark.anyio

Handle = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
JSON = {"content-type": "application/json"}
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.fixture
async def http() -> AsyncGenerator[HttpClient]:
    client = HttpClient(keepalive=60)
    yield client
    await client.close()


@asynccontextmanager
async def serving(handle: Handle) -> AsyncGenerator[str]:
    async def guarded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handle(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client left
        finally:
            writer.close()

    server = await asyncio.start_server(guarded, "127.0.0.1", 0)
    try:
        async with asyncio.timeout(120):
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def saying(*answers: bytes) -> Handle:
    """One connection after the other is asked once, told the next of ``answers``, and closed."""
    left = list(answers)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asked(reader)
        writer.write(left.pop(0))
        await writer.drain()

    return handle


async def asked(reader: asyncio.StreamReader) -> tuple[str, dict[str, str], bytes]:
    """The line, headers and body of the next request."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    line, *lines = head.strip().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (one.partition(":") for one in lines)}
    return line, headers, await reader.readexactly(int(headers.get("content-length", 0)))


async def test_a_request_arrives_as_it_was_given(http: HttpClient) -> None:
    came: asyncio.Queue[tuple[str, dict[str, str], bytes]] = asyncio.Queue()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(4):
            came.put_nowait(await asked(reader))
            writer.write(OK)

    async with serving(handle) as url:
        assert (await http.post(f"{url}/v1/chat?a=b", b'{"n": 1}', JSON | {"x-a": "b"})).content == b"ok"
        line, headers, body = came.get_nowait()
        assert line == "POST /v1/chat?a=b HTTP/1.1" and body == b'{"n": 1}'
        assert headers["x-a"] == "b" and headers["host"] == url.removeprefix("http://")
        # over the same connection, for the server takes four there
        for asked_for, line in (
            ("", "GET / HTTP/1.1"),
            ("?a=/b/c", "GET /?a=/b/c HTTP/1.1"),
            ("/d#e", "GET /d HTTP/1.1"),
        ):
            assert (await http.get(url + asked_for, 60)).status == 200
            assert came.get_nowait()[0] == line


async def test_parts_come_as_they_are_sent(http: HttpClient) -> None:
    seen = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asked(reader)
        writer.write(CHUNKED + b"3\r\none\r\n")
        await seen.wait()
        writer.write(b"3\r\ntwo\r\n0\r\n\r\n")
        await writer.drain()

    async with serving(handle) as url, http.posted(url, b"", {}) as answer:
        parts: list[bytes] = []
        async for part in answer.parts():
            parts.append(part)
            seen.set()
    assert parts == [b"one", b"two"]


async def test_no_server_is_told_as_nothing_sent(http: HttpClient) -> None:
    [port] = free_ports(1)
    for url in (f"http://127.0.0.1:{port}", "127.0.0.1/no/scheme"):
        with pytest.raises(ConnectionBrokenError) as none:
            await http.post(url, b"", {})
        assert none.value.unsent


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhel",
        CHUNKED + b"3\r\nhel\r\n",
        b"no HTTP at all\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx-a: " + 100_000 * b"a",
    ],
)
async def test_half_an_answer_and_nonsense_are_broken_connections(http: HttpClient, answer: bytes) -> None:
    async with serving(saying(answer)) as url:
        with pytest.raises(ConnectionBrokenError) as broken:
            await http.post(url, b"", {})
    assert not broken.value.unsent


async def test_a_stream_gives_what_came_before_it_broke_off(http: HttpClient) -> None:
    seen = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asked(reader)
        writer.write(CHUNKED + b"3\r\none\r\n")
        await seen.wait()

    parts: list[bytes] = []
    async with serving(handle) as url:
        with pytest.raises(ConnectionBrokenError):
            async with http.posted(url, b"", {}) as answer:
                async for part in answer.parts():
                    parts.append(part)
                    seen.set()
    assert parts == [b"one"]


async def test_who_leaves_an_answer_or_is_cancelled_ends_the_call_there(http: HttpClient) -> None:
    began, gone = asyncio.Event(), asyncio.Semaphore(0)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asked(reader)
        writer.write(CHUNKED + b"3\r\none\r\n")
        await writer.drain()
        began.set()
        try:
            assert await reader.read() == b""
        finally:
            gone.release()

    async with serving(handle) as url:
        async with http.posted(url, b"", {}) as answer, aclosing(answer.parts()) as parts:  # type: ignore[type-var]
            assert await anext(parts) == b"one"
        await gone.acquire()
        began.clear()
        asking = asyncio.create_task(http.post(url, b"", {}))
        await began.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await gone.acquire()


@pytest.mark.parametrize("status", [400, 404, 500, 501])
@pytest.mark.parametrize("apart", [True, False], ids=["body later", "body at once"])
async def test_a_connection_that_is_closed_behind_an_error_breaks_no_other_call(
    http: HttpClient, status: int, apart: bool
) -> None:
    """As uvicorn does where an application's last handler made the answer, vLLM 0.24's of a refusal for one."""
    calls: list[int] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asked(reader)
        calls.append(1)
        if len(calls) > 1:
            writer.write(OK)
        else:
            head = f"HTTP/1.1 {status} No\r\ncontent-length: 2\r\n\r\n".encode()
            if apart:
                writer.write(head)
                await going.wait()
            writer.write(b"no" if apart else head + b"no")
        # where another request comes, the connection is closed without an answer to it
        await reader.read(1)

    going = asyncio.Event()
    async with serving(handle) as url:
        async with http.posted(url, b"", {}) as answer:
            going.set()
            assert (answer.status, await answer.read()) == (status, b"no")
        assert (await http.post(url, b"", {})).content == b"ok"
    assert len(calls) == 2


async def test_the_connection_of_any_other_answer_is_kept(http: HttpClient) -> None:
    connections: list[int] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(1)
        for status in (200, 409, 429, 503):
            await asked(reader)
            writer.write(f"HTTP/1.1 {status} So\r\ncontent-length: 2\r\n\r\nok".encode())

    async with serving(handle) as url:
        for status in (200, 409, 429, 503):
            assert (await http.post(url, b"", {})).status == status
    assert connections == [1]


async def test_an_idle_connection_is_closed_in_time() -> None:
    closed = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asked(reader)
        writer.write(OK)
        assert await reader.read() == b""
        closed.set()

    http = HttpClient(keepalive=0.05)
    async with serving(handle) as url:
        await http.post(url, b"", {})
        await closed.wait()
        assert (await http.post(url, b"", {})).content == b"ok"
    await http.close()


async def test_closing_breaks_calls_under_way(http: HttpClient) -> None:
    began = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asked(reader)
        began.set()
        await reader.read()

    async with serving(handle) as url:
        asking = asyncio.create_task(http.post(url, b"", {}))
        await began.wait()
        await http.close()
        with pytest.raises(ConnectionBrokenError):
            await asking


async def test_closing_breaks_a_call_that_is_connecting(http: HttpClient) -> None:
    async with serving(saying(OK)) as url:
        # a name takes a thread to look up
        asking = asyncio.create_task(http.post(url.replace("127.0.0.1", "localhost"), b"", {}))
        await asyncio.sleep(0)
        await http.close()
        with pytest.raises(ConnectionBrokenError):
            await asking


async def test_a_closed_client_makes_no_connections() -> None:
    http = HttpClient(keepalive=60)
    await http.close()
    async with serving(saying(OK)) as url:
        with pytest.raises(ConnectionBrokenError, match="closed") as broken:
            await http.post(url, b"", {})
    assert broken.value.unsent


@pytest.mark.parametrize("whole", [True, False])
async def test_closing_makes_no_whole_answer_of_half_a_one(http: HttpClient, whole: bool) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asked(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nhalf")
        assert await reader.read() == b""

    async with serving(handle) as url, http.posted(url, b"", {}) as answer:
        parts = answer.parts()
        assert await anext(parts) == b"half"
        rest = asyncio.ensure_future(answer.read() if whole else anext(parts))
        # it is waiting for more
        await asyncio.sleep(0)
        await http.close()
        with pytest.raises(ConnectionBrokenError):
            await rest


@pytest.mark.parametrize(
    "url",
    [
        "http://a..b/",
        f"http://{64 * 'a'}.invalid/",
        "http://\u20ac..invalid/",
        "http://127.0.0.1:1/\u20ac",
        "http://[::1/",
    ],
)
async def test_an_address_that_cannot_be_is_told_as_nothing_sent(http: HttpClient, url: str) -> None:
    with pytest.raises(ConnectionBrokenError) as none:
        await http.post(url, b"", {})
    assert none.value.unsent


async def test_a_header_cannot_smuggle_another(http: HttpClient) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.read() == b""

    async with serving(handle) as url:
        with pytest.raises(ConnectionBrokenError) as none:
            await http.post(url, b"", {"x-a": "b\r\nx-c: d"})
    assert none.value.unsent


@pytest.mark.parametrize(
    ("variables", "proxy"),
    [
        ({"https_proxy": "proxy.test:3128"}, "http://proxy.test:3128"),
        ({"all_proxy": "http://me:mine@proxy.test"}, "http://me:mine@proxy.test"),
        ({"https_proxy": "https://own.test", "all_proxy": "proxy.test:1"}, "https://own.test"),
        ({"all_proxy": "socks5://proxy.test:1080"}, None),
        ({"http_proxy": "proxy.test:3128"}, None),
        ({"all_proxy": "proxy.test:1", "no_proxy": "outside.test"}, None),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_a_proxy_is_named_as_for_curl(
    variables: dict[str, str], proxy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert proxy_of("https://outside.test/v1") == proxy


async def test_a_proxy_of_the_environment_is_used_except_for_loopback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    came: asyncio.Queue[tuple[str, dict[str, str], bytes]] = asyncio.Queue()
    (tmp_path / "netrc").write_text("default login somebody password secret")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.put_nowait(await asked(reader))
        writer.write(OK)

    async with serving(handle) as url:
        monkeypatch.setenv("http_proxy", url.replace("http://", "http://me:mine@"))
        monkeypatch.setenv("no_proxy", "inside.test,judge.test:8001")
        for there in (
            "http://inside.test/",
            "http://inside.test:1/",
            "http://judge.test:8001/v1",
            "http://127.0.0.1:1/",
            "http://localhost/",
            "http://[::1]/",
            "https://a.test",
        ):
            assert not has_proxy(there)
        assert has_proxy("http://outside.test/") and has_proxy("http://judge.test:8002/v1")
        http = HttpClient(proxies=True)
        for given in ({}, {"authorization": "Bearer key"}):
            assert (await http.get("http://outside.test/v1", 60, given)).content == b"ok"
            line, sent, _ = came.get_nowait()
            assert line == "GET http://outside.test/v1 HTTP/1.1"
            assert sent["proxy-authorization"] == "Basic bWU6bWluZQ=="
            assert sent.get("authorization") == given.get("authorization"), "no password that nobody named"
        await http.close()


def probes(sock: socket.socket) -> tuple[bool, int, int]:
    """Whether the system asks over a silent connection, after how many seconds, and when it gives the connection up."""
    is_on = sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    first, pause, most = (
        sock.getsockopt(socket.IPPROTO_TCP, option)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    )
    return bool(is_on), first, first + pause * most


@pytest.mark.skipif(not hasattr(socket, "TCP_KEEPIDLE"), reason="another name in macOS")
async def test_a_call_that_waits_in_silence_is_not_forgotten_on_the_way(http: HttpClient) -> None:
    """An answer of a minute or more has no byte before it is whole, and routers forget connections that are silent."""
    seen: list[tuple[bool, int, int]] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asked(reader)
        caller = writer.get_extra_info("peername")
        [ours] = [one.fd for one in psutil.Process().net_connections() if one.laddr == caller]
        with socket.socket(fileno=os.dup(ours)) as sock:
            seen.append(probes(sock))
        writer.write(OK)

    async with serving(handle) as url:
        await http.post(url, b"", {})
    [(is_on, first, last)] = seen
    assert is_on and first < 60, "a minute is what many remember"
    assert 60 < last < 300, "a line that is down for a while costs nothing, and a peer that vanished is noticed"
