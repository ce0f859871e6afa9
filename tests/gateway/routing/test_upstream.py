"""A plain upstream: relayed as it came, translated where it must be, left alone while it fails."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from adapters.dialects import ChatDialect, LLMRequest, MessagesDialect
from gateway.config.route import UpstreamConfig
from gateway.routing.breaker import BreakerState
from gateway.routing.upstream import Upstream
from gateway.types import Caller, Decided, Incoming, Live, Outcome, Relayed
from swarm.errors import RelayedError, SwarmGatewayError, UnavailableError, UpstreamError
from tests.standins.swarm import completion, error
from tests.standins.vllm import listening

pytestmark = pytest.mark.anyio
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
STREAM = [b'data: {"choices": [], ', b'"odd":  1}\n\n', b"data: [DONE]\n\n"]
KEY = "sk-very-secret"


class Plain:
    """A scripted upstream: ``answers`` by path, else a 404 as the frameworks give it."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {CHAT: lambda body: JSONResponse(completion("hi"))}
        self.got: list[tuple[str, dict[str, str], Any]] = []
        self.models_status = 200
        self.asked = 0
        self.url = ""
        self.left = asyncio.Event()
        self.arrived = asyncio.Event()
        self.app = Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/{path:path}", self._answer, methods=["POST", "PUT", "DELETE"]),
            ]
        )

    async def _models(self, request: Request) -> Response:
        self.asked += 1
        return JSONResponse({"data": []}, self.models_status)

    async def _answer(self, request: Request) -> Response:
        body = await request.body()
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        self.got.append((target, dict(request.headers), json.loads(body) if body else None))
        self.arrived.set()
        if (make := self.answers.get(request.url.path)) is None:
            return JSONResponse({"detail": "Not Found"}, 404)
        made = make(self.got[-1][2])
        return made if isinstance(made, Response) else await made

    async def hanging(self, first: bytes = b"data: {}\n\n") -> Response:
        async def body() -> AsyncIterator[bytes]:
            try:
                yield first
                await asyncio.Event().wait()
            finally:
                self.left.set()

        return StreamingResponse(body(), media_type="text/event-stream")


@pytest.fixture
async def plain() -> AsyncIterator[Plain]:
    stand_in = Plain()
    async with listening(stand_in.app) as url:
        stand_in.url = f"{url}/v1"
        yield stand_in


@pytest.fixture
async def upstream(plain: Plain) -> AsyncIterator[Upstream]:
    async with Upstream(UpstreamConfig.model_validate({"base_url": plain.url, "api_key": KEY}), 30) as upstream:
        yield upstream


def chat(**fields: Any) -> Incoming:
    body = BODY | fields
    return incoming(CHAT, body, ChatDialect().parse(body))


def incoming(path: str, body: dict[str, Any], call: LLMRequest, **headers: str) -> Incoming:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Incoming(call, named, Caller(), path, json.dumps(body).encode(), "req")


def message(**fields: Any) -> Incoming:
    body = BODY | {"max_tokens": 5} | fields
    return incoming(MESSAGES, body, MessagesDialect().parse(body), anthropic_version="2023-06-01")


def whole(outcome: Outcome) -> tuple[int, Any]:
    assert isinstance(outcome, Relayed) and isinstance(outcome.body, bytes)
    return outcome.status, json.loads(outcome.body)


async def parts(outcome: Outcome) -> list[bytes]:
    assert isinstance(outcome, Relayed) and not isinstance(outcome.body, bytes) and outcome.close is not None
    try:
        return [part async for part in outcome.body]
    finally:
        await outcome.close()


async def test_an_answer_comes_as_it_is_with_the_headers_that_matter(plain: Plain, upstream: Upstream) -> None:
    headers = {"x-ratelimit-remaining-tokens": "7", "server": "secret-sauce", "retry-after-ms": "3"}
    plain.answers[CHAT] = lambda body: JSONResponse(completion("hi"), headers=headers)
    outcome = await upstream.relay(chat(odd=[1]), "engine_syncing")
    assert whole(outcome) == (200, completion("hi"))
    assert outcome.headers == {
        "content-type": "application/json",
        "retry-after-ms": "3",
        "x-ratelimit-remaining-tokens": "7",
        "x-swarm-trained": "false",
        "x-swarm-drop-reason": "engine_syncing",
    }
    [(path, sent, body)] = plain.got
    assert (path, body, sent["authorization"]) == (CHAT, BODY | {"odd": [1]}, f"Bearer {KEY}")
    assert "x-api-key" not in sent


async def test_the_model_is_renamed_and_nothing_else(plain: Plain) -> None:
    config = UpstreamConfig.model_validate({"base_url": plain.url + "/", "model": "other"})
    async with Upstream(config, 30) as upstream:
        outcome = await upstream.relay(chat(odd=[1.5, None, "ü"]), "")
    assert "x-swarm-drop-reason" not in outcome.headers
    [(_, sent, body)] = plain.got
    assert body == BODY | {"odd": [1.5, None, "ü"], "model": "other"} and "authorization" not in sent


async def test_a_stream_is_passed_on_part_by_part(plain: Plain, upstream: Upstream) -> None:
    go = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield STREAM[0]
        await go.wait()
        for part in STREAM[1:]:
            yield part

    plain.answers[CHAT] = lambda _: StreamingResponse(body(), media_type="text/event-stream")
    outcome = await upstream.relay(chat(stream=True), "")
    assert isinstance(outcome, Relayed) and not isinstance(outcome.body, bytes)
    assert outcome.headers["content-type"].startswith("text/event-stream")
    assert await anext(outcome.body) == STREAM[0], "before the rest is there"
    go.set()
    assert b"".join(await parts(outcome)) == b"".join(STREAM[1:])


@pytest.mark.parametrize("how", ["while it waits", "while it streams"])
async def test_leaving_reaches_the_upstream(plain: Plain, upstream: Upstream, how: str) -> None:
    if how == "while it streams":
        plain.answers[CHAT] = lambda body: plain.hanging()
        outcome = await upstream.relay(chat(stream=True), "")
        assert isinstance(outcome, Relayed) and not isinstance(outcome.body, bytes) and outcome.close is not None
        await anext(outcome.body)
        await outcome.close()
    else:
        plain.answers[CHAT] = lambda body: plain.hanging(b" ")
        asking = asyncio.create_task(upstream.relay(chat(), ""))
        await plain.arrived.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    async with asyncio.timeout(5):
        await plain.left.wait()
    assert upstream.state is BreakerState.CLOSED


@pytest.mark.parametrize("stream", [False, True])
async def test_its_errors_are_its_own(plain: Plain, upstream: Upstream, stream: bool) -> None:
    plain.answers[CHAT] = lambda body: error(429, "full", retry_after="7")
    outcome = await upstream.relay(chat(stream=stream), "")
    status, body = whole(outcome)
    assert (status, body["error"]["message"], outcome.headers["retry-after"]) == (429, "full", "7")
    assert upstream.available


async def test_a_refused_key_is_not_the_applications_fault_and_stays_secret(plain: Plain, upstream: Upstream) -> None:
    plain.answers[CHAT] = lambda body: error(401, f"Incorrect API key provided: {KEY}")
    with pytest.raises(UpstreamError) as refused:
        await upstream.relay(chat(), "")
    assert (refused.value.status, refused.value.code) == (502, "upstream_refuses_key")
    assert KEY not in str(refused.value.body())


async def test_the_key_does_not_follow_a_redirect(plain: Plain, upstream: Upstream) -> None:
    plain.answers[CHAT] = lambda body: Response(status_code=307, headers={"location": f"{plain.url}/elsewhere"})
    with pytest.raises(UpstreamError, match="base_url"):
        await upstream.relay(chat(), "")
    assert len(plain.got) == 1


async def test_another_dialect_goes_where_it_is_spoken(plain: Plain, upstream: Upstream) -> None:
    plain.answers[MESSAGES] = lambda body: JSONResponse({"type": "message"})
    assert whole(await upstream.relay(message(), "")) == (200, {"type": "message"})
    [(path, sent, body)] = plain.got
    assert (path, sent["x-api-key"], sent["anthropic-version"]) == (MESSAGES, KEY, "2023-06-01")
    assert body == BODY | {"max_tokens": 5}


async def test_a_dialect_that_is_not_spoken_becomes_a_chat(plain: Plain, upstream: Upstream) -> None:
    for _ in range(2):
        outcome = await upstream.relay(message(), "why")
        assert isinstance(outcome, Decided) and outcome.completion == completion("hi")
        assert outcome.headers == {"x-swarm-trained": "false", "x-swarm-drop-reason": "why"}
        said = [chunk["choices"][0]["delta"].get("content") async for chunk in outcome.chunks() if chunk["choices"]]
        assert "".join(filter(None, said)) == "hi"
    assert [path for path, _, _ in plain.got] == [MESSAGES, CHAT, CHAT], "asked once, then known"


async def test_a_translated_stream_is_live(plain: Plain, upstream: Upstream) -> None:
    chunk = {"choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": None}]}

    async def body() -> AsyncIterator[bytes]:
        yield b"data: " + json.dumps(chunk).encode()
        yield b"\n\ndata: [DONE]\n\n"

    plain.answers[CHAT] = lambda _: StreamingResponse(body(), media_type="text/event-stream")
    outcome = await upstream.relay(message(stream=True), "")
    assert isinstance(outcome, Live) and outcome.close is not None
    assert [part async for part in outcome.chunks] == [chunk]
    await outcome.close()
    assert plain.got[-1][2]["stream_options"] == {"include_usage": True}


async def test_an_unknown_model_is_not_an_unknown_dialect(plain: Plain, upstream: Upstream) -> None:
    plain.answers[MESSAGES] = lambda body: error(404, "The model `tiny` does not exist.")
    status, body = whole(await upstream.relay(message(), ""))
    assert (status, len(plain.got)) == (404, 1) and "tiny" in body["error"]["message"]


async def test_where_nothing_is_spoken_its_own_words_come_back(plain: Plain, upstream: Upstream) -> None:
    plain.answers.clear()
    assert whole(await upstream.relay(message(), "")) == (404, {"detail": "Not Found"})


@pytest.mark.parametrize(
    ("answer", "raised", "status"),
    [
        (error(400, "too long"), RelayedError, 400),
        (error(503, "busy", retry_after="9"), UnavailableError, 503),
        (error(500, "boom"), UpstreamError, 502),
        (Response("no json"), UpstreamError, 502),
        (JSONResponse([1]), UpstreamError, 502),
        (JSONResponse({"choices": []}), UpstreamError, 502),
    ],
)
async def test_errors_of_a_translated_chat(
    plain: Plain, upstream: Upstream, answer: Response, raised: type[SwarmGatewayError], status: int
) -> None:
    plain.answers[CHAT] = lambda body: answer
    with pytest.raises(raised) as told:
        await upstream.relay(message(), "")
    assert told.value.status == status


async def test_an_error_within_a_translated_stream(plain: Plain, upstream: Upstream) -> None:
    event = StreamingResponse(iter([b'data: {"error": {"message": "boom"}}\n\n']), media_type="text/event-stream")
    plain.answers[CHAT] = lambda body: event
    outcome = await upstream.relay(message(stream=True), "")
    assert isinstance(outcome, Live) and outcome.close is not None
    with pytest.raises(UpstreamError, match="boom"):
        await anext(outcome.chunks)
    await outcome.close()


async def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    config = UpstreamConfig.model_validate({"base_url": f"http://127.0.0.1:{port}/v1", "api_key": KEY})
    async with Upstream(config, 30) as upstream:
        with pytest.raises(UnavailableError) as told:
            await upstream.relay(chat(), "")
    assert told.value.code == "upstream_unreachable" and told.value.should_retry


async def test_what_was_certainly_not_read_is_sent_again() -> None:
    stand_in = Plain()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    config = UpstreamConfig.model_validate({"base_url": f"http://127.0.0.1:{port}/v1"})
    tried: list[int] = []
    async with Upstream(config, 30) as upstream:
        reach = upstream._http.posted

        def counted(*args: Any, **kwargs: Any) -> Any:
            tried.append(1)
            return reach(*args, **kwargs)

        upstream._http.posted = counted  # pyright: ignore
        with pytest.raises(UnavailableError):
            await upstream.relay(chat(), "")
        assert len(tried) == 2
        tried.clear()
        # read, and then the connection breaks: something may have been sampled
        async with listening(stand_in.app) as url:
            upstream._base = f"{url}/v1"

            async def breaks(body: Any) -> Response:
                class Broken(Response):
                    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
                        await send(
                            {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]}
                        )
                        await send({"type": "http.response.body", "body": b"{"})
                        raise ConnectionResetError

                return Broken()

            stand_in.answers[CHAT] = breaks
            with pytest.raises(UpstreamError) as told:
                await upstream.relay(chat(), "")
        assert (told.value.code, len(tried)) == ("upstream_broke_off", 1)


async def test_a_silent_upstream_is_given_up(plain: Plain) -> None:
    plain.answers[CHAT] = lambda body: plain.hanging()
    async with Upstream(UpstreamConfig.model_validate({"base_url": plain.url}), 0.05) as upstream:
        with pytest.raises(UpstreamError) as told:
            await upstream.relay(chat(), "")
        assert told.value.status == 504
        outcome = await upstream.relay(chat(stream=True), "")
        with pytest.raises(UpstreamError, match="silent"):
            await parts(outcome)


async def test_one_that_fails_is_left_alone_until_it_answers(plain: Plain, upstream: Upstream) -> None:
    plain.models_status = 500
    plain.answers[CHAT] = lambda body: error(500, "boom")
    for _ in range(5):
        assert whole(await upstream.relay(chat(), ""))[0] == 500
    assert not upstream.available
    with pytest.raises(UnavailableError) as told:
        await upstream.relay(chat(), "")
    assert (told.value.code, len(plain.got)) == ("upstream_unavailable", 5)
    plain.models_status = 200
    [probing] = [task for task in asyncio.all_tasks() if task.get_name().startswith("probing")]
    async with asyncio.timeout(10):
        await probing
    assert upstream.available and upstream.state is BreakerState.CLOSED
    assert (plain.asked, len(plain.got)) == (1, 5), "nobody's request was the trial"


async def test_anything_else_is_forwarded(plain: Plain, upstream: Upstream) -> None:
    plain.answers["/v1/embeddings"] = lambda body: JSONResponse({"data": [1]})
    given = {"content-type": "application/json", "authorization": "Bearer the-applications-own", "cookie": "a=b"}
    outcome = await upstream.forward("POST", "/v1/embeddings", given, b'{"input": "x"}', query="a=1&b=2")
    assert json.loads(b"".join(await parts(outcome))) == {"data": [1]}
    [(target, sent, body)] = plain.got
    assert (target, body, sent["authorization"]) == ("/v1/embeddings?a=1&b=2", {"input": "x"}, f"Bearer {KEY}")
    assert "cookie" not in sent
    outcome = await upstream.forward("GET", "/v1/models", {}, b"")
    assert json.loads(b"".join(await parts(outcome))) == {"data": []}
