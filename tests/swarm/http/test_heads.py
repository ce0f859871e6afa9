"""Known heads: what they are, and that a connection which knows them does what one does that parses each request."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvicorn
from hypothesis import example, given, settings
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send

from swarm.http.heads import MAX_BYTES, Heads
from swarm.http.protocol import GatheringProtocol
from swarm.http.serve import uvicorn_config
from swarm.http.shortcuts import Head, ShortRequest

HEAD = b"POST /short HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\nContent-Length: 4\r\n\r\n"


def never(request: ShortRequest) -> bool:
    raise AssertionError("nobody asks here")


def head_of(length: int = 4, *headers: tuple[bytes, bytes]) -> Head:
    return Head("/short", never, list(headers), length)


def test_one_whole_request_with_a_known_head_is_found() -> None:
    heads, head = Heads({}), head_of()
    assert heads.find(HEAD + b"body") is None
    heads.learn(HEAD + b"body", head)
    assert heads.find(HEAD + b"ydob") == (head, b"ydob")
    for other in (HEAD, HEAD + b"bod", HEAD + b"body+", HEAD.lower() + b"body", b"\r\n" + HEAD + b"body", b"", b"body"):
        assert heads.find(other) is None


@pytest.mark.parametrize(
    ("data", "head"),
    [
        (HEAD + b"body" + HEAD + b"body", head_of()),
        (HEAD + b"body\r\n", head_of()),
        (HEAD.replace(b"\r\n\r\n", b"\n\n") + b"\r\n\r\n", head_of()),
        (HEAD + b"body", head_of(4, (b"transfer-encoding", b"identity"))),
        (HEAD.replace(b"here", b"h" * MAX_BYTES) + b"body", head_of()),
    ],
    ids=["two requests", "more than the request", "another end of a head", "another end of a body", "too large"],
)
def test_what_may_be_something_else_is_not_learned(data: bytes, head: Head) -> None:
    heads = Heads({})
    heads.learn(data, head)
    assert heads.find(data) is None


def test_no_more_heads_are_kept_than_that() -> None:
    heads, requests = Heads({}, limit=2), [HEAD.replace(b"here", host) + b"body" for host in (b"one", b"two", b"three")]
    for request in requests:
        heads.learn(request, head_of())
    assert [heads.find(request) is not None for request in requests] == [False, False, True]


# ------------------------------------------------------------------ with and without


class Forgetful(Heads):
    """Knows none."""

    def learn(self, data: bytes, head: Head) -> None: ...


class Wire:
    """A transport that remembers."""

    def __init__(self) -> None:
        self.sent = b""
        self.closing = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("127.0.0.1", 5), "sockname": ("127.0.0.1", 6)}.get(name, default)

    def is_closing(self) -> bool:
        return self.closing

    def write(self, data: bytes) -> None:
        self.sent += data

    def close(self) -> None:
        self.closing = True

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


class Served:
    """Connections to one server, one after the other, and whatever it did.

    The shortcut answers at once where a body begins with ``n``, after what is read next with ``l``, fails with ``f``,
    and leaves the rest to the application.
    """

    def __init__(self, heads: type[Heads]) -> None:
        self.did: list[Any] = []
        self._later: list[ShortRequest] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await self.app(scope, receive, send)

        self._config = uvicorn_config(app, shutdown_seconds=1, log_level="critical")
        self._config.load()
        self._state = uvicorn.Server(self._config).server_state
        self._heads = heads({"/short": self.shortcut})

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.did.append("left")
                return
            body, more = body + message["body"], message["more_body"]
        self.did.append((scope["method"], scope["path"], sorted(scope["headers"]), body))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"3")]})
        await send({"type": "http.response.body", "body": b"app"})

    def shortcut(self, request: ShortRequest) -> bool:
        self.did.append((request.head.path, sorted(request.head.headers), request.head.length, request.body))
        match request.body[:1]:
            case b"n":
                self.answer(request)
            case b"l":
                self._later.append(request)
            case b"f":
                raise RuntimeError
            case _:
                return False
        return True

    def answer(self, request: ShortRequest) -> None:
        request.answer(200, b"content-length: 5\r\n", b"short")

    async def connection(self, reads: list[bytes]) -> tuple[Any, ...]:
        """What was read and sent, whether the connection was closed, and how many requests there were so far."""
        made: Any = self._config.http_protocol_class
        wire = Wire()
        protocol = made(config=self._config, server_state=self._state, app_state={}, heads=self._heads)
        protocol.connection_made(wire)
        for read in (*reads, b""):
            if wire.closing:
                break
            later, self._later = self._later, []
            if read:
                protocol.data_received(read)
            await self.turns()
            for request in later:
                self.answer(request)
            await self.turns()
        done = wire.sent, wire.closing, self._state.total_requests, protocol._watch.awaited
        protocol.connection_lost(None)
        await self.turns()
        self._later.clear()
        assert not self._state.tasks
        did, self.did = self.did, []
        return did, *done

    async def turns(self) -> None:
        for _ in range(12):
            await asyncio.sleep(0)


def post(body: bytes, *headers: bytes, path: bytes = b"/short", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    lines = [b"POST %b HTTP/1.1" % path, b"host: x", *headers, b"content-length: %d" % size, b"", body]
    return b"\r\n".join(lines)


REQUESTS = st.one_of(
    st.sampled_from(
        [
            post(b"now"),
            post(b"nn"),
            post(b"late"),
            post(b"other"),
            post(b"fail"),
            post(b"now", b"X-Some: Thing"),
            post(b"now").replace(b"content-length", b"CONTENT-LENGTH"),
            post(b"late", b"connection: close"),
            post(b"now", b"expect: 100-continue"),
            post(b"now", path=b"/short?query"),
            post(b"now", path=b"/long"),
            post(b"now", length=2),
            post(b"now", length=5),
            post(b"now\r\n\r\n"),
            post(b"now", b"transfer-encoding: chunked"),
            post(b"now", b"connection: upgrade", b"upgrade: something"),
            post(b"now").replace(b"\r\n", b"\n"),
            b"\r\n" + post(b"now"),
            post(b"now") + b"\r\n",
            post(b"now").replace(b"HTTP/1.1", b"HTTP/1.0"),
            b"GET /short HTTP/1.1\r\nhost: x\r\n\r\n",
            b"POST /short HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nnow\r\n0\r\n\r\n",
            b"no request at all\r\n\r\n",
        ]
    ),
    st.builds(
        post, st.sampled_from([b"n", b"l", b"o"]).flatmap(lambda first: st.binary(max_size=4).map(first.__add__))
    ),
)


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    """What is read: mostly a request at a time and the same ones again, at times in other pieces."""
    chosen = draw(st.lists(REQUESTS, min_size=1, max_size=3))
    reads = draw(st.lists(st.sampled_from(chosen), min_size=1, max_size=8))
    if draw(st.booleans()):
        return reads
    stream = b"".join(reads)
    cuts = sorted(draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    return [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True) if start < end]


BEGUN = b"POST /short HTTP/1.1\r\nx-some: "


@settings(max_examples=300, deadline=None)
@example([[post(b"now")] * 3])
@example([[post(b"now"), post(b"other"), post(b"nn")]])
@example([[post(b"now"), post(b"fail")[:-4] + b"now!", post(b"now")]])
# what is known comes before the answer to what came before
@example([[post(b"late"), post(b"late"), post(b"late"), post(b"late") * 2]])
# what might be a request is the rest of another one
@example([[BEGUN, post(b"now"), post(b"now")]])
@example([[post(b"now"), BEGUN, post(b"now"), post(b"now")]])
# a connection that one request ended is not gone on with by the next
@example([[post(b"late", b"connection: close")]] * 2)
@example([[post(b"now", b"connection: upgrade", b"upgrade: some"), post(b"now"), post(b"now")]])
@given(st.lists(streams(), min_size=1, max_size=3))
def test_a_server_does_the_same_whether_it_knows_heads_or_not(connections: list[list[bytes]]) -> None:
    async def both() -> None:
        knowing, forgetful = Served(Heads), Served(Forgetful)
        for reads in connections:
            assert await knowing.connection(reads) == await forgetful.connection(reads)

    asyncio.run(both())


@pytest.mark.anyio
async def test_a_request_that_is_sent_again_is_not_parsed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []
    on_url: Any = GatheringProtocol.on_url  # type: ignore[attr-defined]

    def noting(self: Any, url: bytes) -> None:
        parsed.append(url)
        on_url(self, url)

    # the parser looks for its callbacks when it is made
    monkeypatch.setattr(GatheringProtocol, "on_url", noting)
    served = Served(Heads)
    reads = [post(b"now"), post(b"nix"), post(b"old"), post(b"now", b"x: y"), post(b"nie")]
    did, sent, closing, requests, _ = await served.connection(reads)
    assert len(parsed) == 3, "the first, the one that was left to the application, and the one with another head"
    assert [entry[-1] for entry in did] == [b"now", b"nix", b"old", b"old", b"now", b"nie"]
    assert (sent.count(b"\r\n\r\nshort"), sent.count(b"\r\n\r\napp"), closing, requests) == (4, 1, False, 5)
