"""A plain upstream: relayed as it came, translated where it must be, left alone while it fails."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response, StreamingResponse

from adapters.dialects import ChatDialect, LLMRequest, MessagesDialect, ResponsesDialect
from gateway.config.route import UpstreamConfig
from gateway.routing import breaker
from gateway.routing.breaker import BreakerState
from gateway.routing.upstream import Upstream
from gateway.types import AnyRequest, Caller, Decided, Incoming, Live, Outcome, Relayed
from swarm.errors import (
    NotFoundError,
    OverloadedError,
    RelayedError,
    SwarmGatewayError,
    UnavailableError,
    UpstreamError,
)
from swarm.http.client import HttpClient
from tests.gateway.conftest import BODY, CHAT
from tests.standins.swarm import completion, error
from tests.standins.upstream import Upstream as Plain

pytestmark = pytest.mark.anyio
MESSAGES = "/v1/messages"
STREAM = [b'data: {"choices": [], ', b'"odd":  1}\n\n', b"data: [DONE]\n\n"]
KEY = "sk-very-secret"


@pytest.fixture
def plain(upstream: Plain) -> Plain:
    return upstream


@pytest.fixture
async def ours(plain: Plain) -> AsyncIterator[Upstream]:
    async with relay_to(plain.url) as one:
        yield one


def relay_to(url: str, timeout: float = 30) -> Upstream:
    return Upstream(UpstreamConfig.model_validate({"base_url": url, "api_key": KEY}), timeout)


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


async def test_an_answer_comes_as_it_is_with_the_headers_that_matter(plain: Plain, ours: Upstream) -> None:
    headers = {"x-ratelimit-remaining-tokens": "7", "server": "secret-sauce", "retry-after-ms": "3"}
    plain.answers[CHAT] = lambda body: JSONResponse(completion("from the upstream"), headers=headers)
    outcome = await ours.relay(chat(odd=[1]), "engine_syncing")
    assert whole(outcome) == (200, completion("from the upstream"))
    assert outcome.headers == {
        "content-type": "application/json",
        "retry-after-ms": "3",
        "x-ratelimit-remaining-tokens": "7",
        "x-swarm-trained": "false",
        "x-swarm-drop-reason": "engine_syncing",
    }
    [got] = plain.got
    assert (got.target, got.body, got.headers["authorization"]) == (CHAT, BODY | {"odd": [1]}, f"Bearer {KEY}")
    assert "x-api-key" not in got.headers


async def test_a_header_is_passed_on_in_the_bytes_in_which_it_came(plain: Plain, ours: Upstream) -> None:
    def answered(_: dict[str, Any]) -> Response:
        answer = JSONResponse(completion("from the upstream"))
        answer.raw_headers += [(b"x-ratelimit-left", "5 \u2013 6".encode()), (b"x-ratelimit-right", b"5 \xff 6")]
        return answer

    plain.answers[CHAT] = answered
    outcome = await ours.relay(chat(), "")
    assert isinstance(outcome, Relayed)
    sent = {name: value.encode("latin-1") for name, value in outcome.headers.items()}
    assert sent["x-ratelimit-left"] == "5 \u2013 6".encode() and sent["x-ratelimit-right"] == b"5 \xff 6"


async def test_a_stream_is_passed_on_part_by_part(plain: Plain, ours: Upstream) -> None:
    go = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield STREAM[0]
        await go.wait()
        for part in STREAM[1:]:
            yield part

    plain.answers[CHAT] = lambda _: StreamingResponse(body(), media_type="text/event-stream")
    outcome = await ours.relay(chat(stream=True), "")
    assert isinstance(outcome, Relayed) and not isinstance(outcome.body, bytes)
    assert outcome.headers["content-type"].startswith("text/event-stream")
    assert await anext(outcome.body) == STREAM[0], "before the rest is there"
    go.set()
    assert b"".join(await parts(outcome)) == b"".join(STREAM[1:])


@pytest.mark.parametrize("how", ["while it waits", "while it streams"])
async def test_leaving_reaches_the_upstream(plain: Plain, ours: Upstream, how: str) -> None:
    if how == "while it streams":
        plain.answers[CHAT] = lambda body: plain.hanging()
        outcome = await ours.relay(chat(stream=True), "")
        assert isinstance(outcome, Relayed) and not isinstance(outcome.body, bytes) and outcome.close is not None
        await anext(outcome.body)
        await outcome.close()
    else:
        plain.answers[CHAT] = lambda body: plain.hanging(b" ")
        asking = asyncio.create_task(ours.relay(chat(), ""))
        await plain.arrived.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    async with asyncio.timeout(60):
        await plain.left.wait()
    assert ours.breaker.state is BreakerState.CLOSED


async def test_a_refused_key_is_not_the_applications_fault_and_stays_secret(plain: Plain, ours: Upstream) -> None:
    plain.answers[CHAT] = lambda body: error(401, f"Incorrect API key provided: {KEY}")
    with pytest.raises(UpstreamError) as refused:
        await ours.relay(chat(), "")
    assert (refused.value.status, refused.value.code) == (502, "upstream_refuses_key")
    assert KEY not in str(refused.value.body())


async def test_the_key_does_not_follow_a_redirect(plain: Plain, ours: Upstream) -> None:
    plain.answers[CHAT] = lambda body: Response(status_code=307, headers={"location": f"{plain.url}/elsewhere"})
    with pytest.raises(UpstreamError, match="base_url"):
        await ours.relay(chat(), "")
    assert len(plain.got) == 1


@pytest.mark.parametrize(
    "path",
    [
        "/v1/../stop_engine",
        "/v1/x/..%2f..%2fstop_engine",
        "/v1/%2e%2e/status",
        "/v1/%252e%252e/status",
        "/v1/..\\status",
        "/v1/%" + "25" * 10_000 + "2e./status",
        "/v1/..",
        "/v1/./chat/completions",
        "/v1/%2e/chat/completions",
    ],
)
async def test_no_path_leads_out_of_its_address_or_to_another_path(plain: Plain, ours: Upstream, path: str) -> None:
    asked = len(plain.got)
    with pytest.raises(NotFoundError, match="lead elsewhere"):
        await ours.forward(AnyRequest("GET", path, "", {}, b"", None, Caller()))
    assert len(plain.got) == asked
    # dots that lead nowhere are names, and a query may have any
    await ours.forward(AnyRequest("GET", "/v1/files/..a/b..", "at=../x", {}, b"", None, Caller()))
    assert len(plain.got) == asked + 1


async def test_another_dialect_goes_where_it_is_spoken(plain: Plain, ours: Upstream) -> None:
    plain.answers[MESSAGES] = lambda body: JSONResponse({"type": "message"})
    assert whole(await ours.relay(message(), "")) == (200, {"type": "message"})
    [got] = plain.got
    assert (got.target, got.headers["x-api-key"], got.headers["anthropic-version"]) == (MESSAGES, KEY, "2023-06-01")
    assert got.body == BODY | {"max_tokens": 5}


async def test_a_dialect_that_is_not_spoken_becomes_a_chat(plain: Plain, ours: Upstream) -> None:
    for _ in range(2):
        outcome = await ours.relay(message(), "why")
        assert isinstance(outcome, Decided) and outcome.completion == completion("from the upstream")
        assert outcome.headers == {"x-swarm-trained": "false", "x-swarm-drop-reason": "why"}
    assert [got.target for got in plain.got] == [MESSAGES, CHAT, CHAT], "asked once, then known"
    await ours.relay(message(metadata={"session_id": "s"}), "")
    assert "metadata" not in plain.got[-1].body, "OpenAI refuses it in a chat that it does not store"


async def test_a_response_that_was_cut_is_carried_on_by_no_chat_of_another_server(plain: Plain, ours: Upstream) -> None:
    """As by OpenAI, whose chats refuse the fields and whose responses begin anew."""
    cut = {"type": "message", "role": "assistant", "id": "msg_1", "status": "incomplete", "content": "Once u"}
    body: dict[str, Any] = {"model": "tiny", "input": [{"role": "user", "content": "hello"}, cut]}
    call = ResponsesDialect().parse(body)
    assert call.body["continue_final_message"]
    await ours.relay(incoming("/v1/responses", body, call), "")
    assert plain.got[-1].body == {"model": "tiny", "messages": call.messages}


async def test_a_translated_stream_is_live(plain: Plain, ours: Upstream) -> None:
    chunk = {"choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": None}]}

    async def body() -> AsyncIterator[bytes]:
        yield b"data: " + json.dumps(chunk).encode()
        yield b"\n\ndata: [DONE]\n\n"

    plain.answers[CHAT] = lambda _: StreamingResponse(body(), media_type="text/event-stream")
    outcome = await ours.relay(message(stream=True), "")
    assert isinstance(outcome, Live) and outcome.close is not None
    assert [part async for part in outcome.chunks] == [chunk]
    await outcome.close()
    assert plain.got[-1].body["stream_options"] == {"include_usage": True}


async def test_an_unknown_model_is_not_an_unknown_dialect(plain: Plain, ours: Upstream) -> None:
    plain.answers[MESSAGES] = lambda body: error(404, "The model `tiny` does not exist.")
    status, body = whole(await ours.relay(message(), ""))
    assert (status, len(plain.got)) == (404, 1) and "tiny" in body["error"]["message"]


async def test_an_unknown_item_is_not_an_unknown_dialect(plain: Plain, ours: Upstream) -> None:
    """OpenAI's 404 for a reasoning item that it did not store: else nobody's responses were asked for as such for a
    while."""
    path, body = "/v1/responses", {"model": "tiny", "input": [{"type": "reasoning", "id": "rs_1", "summary": []}]}
    unknown = {"message": "Item with id 'rs_1' not found.", "type": "invalid_request_error", "param": "input"}
    plain.answers[path] = lambda body: JSONResponse({"error": unknown | {"code": None}}, 404)
    for _ in range(2):
        status, answer = whole(await ours.relay(incoming(path, body, ResponsesDialect().parse(body)), ""))
        assert (status, answer["error"]["message"]) == (404, unknown["message"])
    assert [got.target for got in plain.got] == [path, path]


async def test_what_was_spoken_once_is_known(plain: Plain, ours: Upstream) -> None:
    plain.answers[MESSAGES] = lambda body: JSONResponse({"type": "message"})
    assert whole(await ours.relay(message(), ""))[0] == 200
    gone = {"type": "error", "error": {"type": "not_found_error", "message": "File not found: file_1"}}
    plain.answers[MESSAGES] = lambda body: JSONResponse(gone, 404)
    assert whole(await ours.relay(message(), "")) == (404, gone)
    assert [got.target for got in plain.got] == [MESSAGES, MESSAGES]


async def test_where_nothing_is_spoken_its_own_words_come_back(plain: Plain, ours: Upstream) -> None:
    plain.answers.clear()
    assert whole(await ours.relay(message(), "")) == (404, {"detail": "Not Found"})


@pytest.mark.parametrize(
    ("answer", "raised", "status"),
    [
        (error(400, "too long"), RelayedError, 400),
        (error(503, "busy", retry_after="9"), UnavailableError, 503),
        (error(429, "slower", retry_after="9"), OverloadedError, 429),
        (error(500, "boom"), UpstreamError, 502),
        (Response("no json"), UpstreamError, 502),
        (JSONResponse([1]), UpstreamError, 502),
        (JSONResponse({"choices": []}), UpstreamError, 502),
    ],
)
async def test_errors_of_a_translated_chat(
    plain: Plain, ours: Upstream, answer: Response, raised: type[SwarmGatewayError], status: int
) -> None:
    plain.answers[CHAT] = lambda body: answer
    with pytest.raises(raised) as told:
        await ours.relay(message(), "")
    assert told.value.status == status


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ([{"error": {"code": 400, "message": "odd", "status": "INVALID_ARGUMENT"}}], "odd"),
        ({"object": "error", "message": "odd", "type": "invalid_model", "code": "1500"}, "odd"),
        ({"object": "error", "message": {"detail": [{"msg": "odd"}]}, "code": None}, '{"detail":[{"msg":"odd"}]}'),
        ({"error": "odd", "error_type": "validation"}, "odd"),
        ({"detail": "odd"}, "odd"),
    ],
)
async def test_the_words_of_an_error_in_another_form_reach_the_caller(
    plain: Plain, ours: Upstream, body: Any, words: str
) -> None:
    """Gemini's, Mistral's, TGI's and FastAPI's."""
    plain.answers[CHAT] = lambda _: JSONResponse(body, 422)
    with pytest.raises(RelayedError) as told:
        await ours.relay(message(), "")
    assert (told.value.status, told.value.body()["error"]["message"]) == (422, words)


@pytest.mark.parametrize("failed", [{"message": "boom"}, "boom"])
async def test_an_error_within_a_translated_answer(plain: Plain, ours: Upstream, failed: Any) -> None:
    """Of status 200, since it has begun."""
    event = json.dumps({"error": failed, "choices": [{"index": 0, "delta": {}, "finish_reason": "error"}]})
    first = json.dumps({"error": None, "choices": []})
    events = [f"data: {one}\n\n".encode() for one in (first, event)]
    plain.answers[CHAT] = lambda body: StreamingResponse(iter(events), media_type="text/event-stream")
    outcome = await ours.relay(message(stream=True), "")
    assert isinstance(outcome, Live) and outcome.close is not None
    assert await anext(outcome.chunks) == json.loads(first)
    with pytest.raises(UpstreamError, match="boom"):
        await anext(outcome.chunks)
    await outcome.close()
    plain.answers[CHAT] = lambda body: JSONResponse({"error": failed})
    with pytest.raises(UpstreamError, match="boom"):
        await ours.relay(message(), "")


async def test_only_what_was_certainly_not_read_is_sent_again(plain: Plain, monkeypatch: pytest.MonkeyPatch) -> None:
    posted, tried = HttpClient.posted, list[str]()

    def counted(self: HttpClient, url: str, *args: Any, **kwargs: Any) -> Any:
        tried.append(url)
        return posted(self, url, *args, **kwargs)

    async def parts() -> AsyncIterator[bytes]:
        yield b"{"

    monkeypatch.setattr(HttpClient, "posted", counted)
    async with relay_to("http://127.0.0.1:9/v1") as ours:
        with pytest.raises(UnavailableError):
            await ours.relay(chat(), "")
    assert len(tried) == 2
    # read, and then the connection breaks: something may have been sampled
    plain.answers[CHAT] = lambda body: StreamingResponse(parts(), headers={"content-length": "9"})
    async with relay_to(plain.url) as ours:
        with pytest.raises(UpstreamError) as told:
            await ours.relay(chat(), "")
    assert (told.value.code, len(tried)) == ("upstream_broke_off", 3)
    assert told.value.should_retry, "as an SDK would ask the upstream itself"


async def test_a_silent_upstream_is_given_up(plain: Plain) -> None:
    plain.answers[CHAT] = lambda body: plain.hanging()
    async with relay_to(plain.url, timeout=0.05) as ours:
        with pytest.raises(UpstreamError) as told:
            await ours.relay(chat(), "")
        assert told.value.status == 504
        # before its headers or after them
        with pytest.raises(UpstreamError) as told:
            await parts(await ours.relay(chat(stream=True), ""))
        assert told.value.code == "upstream_timeout"


async def test_one_that_fails_is_left_alone_until_it_answers(
    plain: Plain, ours: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain.answers[CHAT] = lambda body: error(500, "boom")
    for _ in range(5):
        assert whole(await ours.relay(chat(), ""))[0] == 500
    assert not ours.available
    with pytest.raises(UnavailableError) as told:
        await ours.relay(chat(), "")
    assert (told.value.code, len(plain.got)) == ("upstream_unavailable", 5)
    plain.answers[CHAT] = lambda body: JSONResponse(completion("well again"))
    monkeypatch.setattr(breaker, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 1.0))
    assert whole(await ours.relay(chat(), ""))[0] == 200
    assert ours.available and ours.breaker.state is BreakerState.CLOSED
