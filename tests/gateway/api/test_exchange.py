"""Delivery in each dialect, over sockets: keep-alives, errors that come late, what is live, and callers who leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from adapters.dialects import ChatDialect, CompletionsDialect, Dialect, MessagesDialect, ResponsesDialect
from adapters.dialects.sse import SseDecoder
from gateway.api.exchange import Rendering, deliver
from gateway.app import create_app
from gateway.config.gateway import GatewayConfig
from gateway.types import Decided, Live, Outcome, Relayed
from swarm.errors import SwarmGatewayError, UpstreamError
from swarm.http.asgi import stopping
from swarm.http.serve import bind, url_of, uvicorn_config
from tests.gateway.api.conftest import calling, saying
from tests.gateway.conftest import Http, OpenGateway, serving, write_hooks
from tests.standins.swarm import Swarm, completion, error, hanging, once, said

pytestmark = pytest.mark.anyio

ASKS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
}
PING = 'event: ping\ndata: {"type":"ping"}\n\n'
ALIVE = {path: PING if path == "/v1/messages" else ": keep-alive\n\n" for path in ASKS}
DIALECTS: list[Dialect] = [ChatDialect(), CompletionsDialect(), ResponsesDialect(), MessagesDialect()]


@pytest.mark.parametrize("path", ASKS)
async def test_a_waiting_stream_is_kept_alive_in_its_dialect(
    swarm: Swarm, open_gateway: OpenGateway, path: str
) -> None:
    go = asyncio.Event()

    swarm.answer = once(go, lambda *_: said("late"))
    async with (
        open_gateway(keepalive_seconds=0.05) as http,
        http.stream("POST", path, json={**ASKS[path], "stream": True}) as response,
    ):
        parts = response.aiter_text()
        seen = ""
        while len(seen) < 2 * len(ALIVE[path]):
            seen += await anext(parts)
        assert seen.replace(ALIVE[path], "") == ""
        go.set()
        rest = "".join([part async for part in parts])
    assert "late" in rest


@pytest.mark.parametrize("path", ASKS)
async def test_an_error_before_the_headers_has_its_status_and_after_them_is_an_event(
    swarm: Swarm, open_gateway: OpenGateway, path: str
) -> None:
    go = asyncio.Event()

    swarm.answer = once(go, lambda *_: error(500, "boom"))
    body = {**ASKS[path], "stream": True}
    async with open_gateway(keepalive_seconds=0.05) as http, http.stream("POST", path, json=body) as response:
        parts = response.aiter_text()
        assert response.status_code == 200 and await anext(parts)
        go.set()
        told = "".join([part async for part in parts])
    assert "boom" in told and "[DONE]" not in told
    async with open_gateway() as http:
        response = await http.post(path, json=body)
    assert response.status_code == 502
    assert "boom" in response.json()["error"]["message"]
    assert (response.json().get("type") == "error") == (path == "/v1/messages")
    assert response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", ASKS)
async def test_who_leaves_cancels_what_is_sampled_for_him(
    swarm: Swarm, open_gateway: OpenGateway, path: str, streamed: bool
) -> None:
    swarm.answer = hanging
    async with open_gateway() as http:
        asking = asyncio.create_task(http.post(path, json={**ASKS[path], "stream": streamed}))
        await swarm.until(lambda: swarm.sampling == 4)
        asking.cancel()
        await swarm.until(lambda: swarm.cancelled == 4 and not swarm.open_episodes)
        assert (await http.get("/status")).json()["in_flight"] == 0


async def test_who_is_answered_as_the_gateway_stops_is_told_in_the_dialect(swarm: Swarm, tmp_path: Path) -> None:
    """uvicorn cancels what still runs once the time for it is over."""
    swarm.answer = hanging
    config = {"swarm_url": swarm.url, "hooks": str(write_hooks(tmp_path / "hooks")), "keepalive_seconds": 0.05}
    app = create_app(GatewayConfig.model_validate(config))
    with bind("127.0.0.1", 0) as sock:
        server = uvicorn.Server(uvicorn_config(app, shutdown_seconds=0, log_level="critical"))
        running = asyncio.create_task(server.serve(sockets=[sock]))
        async with httpx.AsyncClient(
            base_url=url_of(*sock.getsockname()), timeout=30, trust_env=False, verify=False
        ) as http:

            async def told(path: str, streaming: asyncio.Event) -> tuple[int, str]:
                async with http.stream("POST", path, json={**ASKS[path], "stream": True}) as response:
                    parts = response.aiter_text()
                    begun = await anext(parts)
                    streaming.set()
                    return response.status_code, begun + "".join([part async for part in parts])

            begun = {path: asyncio.Event() for path in ASKS}
            streams = [asyncio.create_task(told(path, begun[path])) for path in ASKS]
            plain = [asyncio.create_task(http.post(path, json=ASKS[path])) for path in ASKS]
            await asyncio.gather(*(event.wait() for event in begun.values()))
            await swarm.until(lambda: swarm.sampling == 4 * 2 * len(ASKS))
            server.should_exit = True
            for dialect, stream, whole in zip(DIALECTS, streams, plain, strict=True):
                status, text = await stream
                assert status == 200 and "the server is being stopped" in text and "[DONE]" not in text, text
                answer = await whole
                assert (answer.status_code, answer.headers["x-should-retry"]) == (503, "true")
                assert answer.json() == dialect.error(stopping())
        await running
    assert not swarm.open_episodes and not swarm.ends


async def test_a_response_goes_on_from_the_one_before(swarm: Swarm, gateway: Http) -> None:
    ask: dict[str, Any] = {"tools": [{"type": "function", "name": "look", "parameters": {"type": "object"}}]}
    swarm.answer = calling("Rome")
    first = (await gateway.post("/v1/responses", json={"input": "hi", **ask})).json()
    (call,) = [item for item in first["output"] if item["type"] == "function_call"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    swarm.answer = saying("It is.")
    asked = {"input": [result], "previous_response_id": first["id"], **ask}
    second = (await gateway.post("/v1/responses", json=asked)).json()
    assert second["previous_response_id"] == first["id"]
    assert [turn["role"] for turn in swarm.bodies[-1]["messages"]] == ["user", "assistant", "tool"]
    await gateway.post("/v1/responses", json={"input": "and?", "previous_response_id": second["id"]})
    assert [turn["role"] for turn in swarm.bodies[-1]["messages"]] == ["user", "assistant", "tool", "assistant", "user"]


async def test_a_message_that_is_whole_begins_with_the_tokens_of_its_prompt(gateway: Http) -> None:
    """Programs read them there, as Anthropic and vLLM say them there."""
    answer = await gateway.post("/v1/messages", json={**ASKS["/v1/messages"], "stream": True})
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    assert events[0]["message"]["usage"] == {"input_tokens": 5, "output_tokens": 0}
    assert events[-2]["usage"] == {"input_tokens": 5, "output_tokens": 3}


# ---------------------------------------------------------------------- the exchange alone


def chunk(text: str, finish: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}


class Delivery:
    """A server that delivers ``outcome`` in ``dialect``."""

    def __init__(self, dialect: Dialect, outcome: Outcome, streamed: bool = True) -> None:
        self.errors: list[SwarmGatewayError] = []
        self.closed = asyncio.Event()
        self.outcome = replace(outcome, close=self._close)
        self._rendering = Rendering(dialect, {}, streamed, {})
        self.app = Starlette(routes=[Route("/", self, methods=["POST"])])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await deliver(scope, receive, send, self._produce, self._rendering, keepalive=30.0, on_error=self.errors.append)

    async def _produce(self) -> Outcome:
        return self.outcome

    async def _close(self) -> None:
        self.closed.set()


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda one: one.path)
async def test_what_is_live_goes_out_chunk_by_chunk(dialect: Dialect) -> None:
    go = [asyncio.Event() for _ in range(3)]

    async def chunks() -> AsyncIterator[dict[str, Any]]:
        for number, event in enumerate(go):
            await event.wait()
            yield chunk(f"piece{number}")
        yield chunk("", "stop")

    delivery = Delivery(dialect, Live(chunks()))
    async with serving(delivery.app) as http:
        go[0].set()
        async with http.stream("POST", "/") as response:
            parts, seen = response.aiter_text(), ""
            for number in range(3):
                go[number].set()
                while f"piece{number}" not in seen:
                    seen += await anext(parts)
                assert f"piece{number + 1}" not in seen
            seen += "".join([part async for part in parts])
        await delivery.closed.wait()
    assert not delivery.errors


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda one: one.path)
async def test_a_live_answer_that_breaks_off_is_told_in_the_dialect(dialect: Dialect) -> None:
    async def chunks() -> AsyncIterator[dict[str, Any]]:
        yield chunk("piece")
        raise UpstreamError("cut")

    delivery = Delivery(dialect, Live(chunks()))
    async with serving(delivery.app) as http:
        told = (await http.post("/")).text
        await delivery.closed.wait()
    assert "piece" in told and "cut" in told
    assert [exc.message for exc in delivery.errors] == ["cut"]
    last = json.loads(told.strip().rpartition("data: ")[2])
    assert "error" in last or last["response"]["error"]["message"] == "cut"


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda one: one.path)
async def test_a_bug_is_a_500_that_says_no_more_than_the_request(dialect: Dialect) -> None:
    async def chunks() -> AsyncIterator[dict[str, Any]]:
        raise ZeroDivisionError("secret")
        yield {}

    delivery = Delivery(dialect, Live(chunks()))
    async with serving(delivery.app) as http:
        response = await http.post("/")
        await delivery.closed.wait()
    assert response.status_code == 500
    assert "secret" not in response.text and "quote request id" in response.text


@pytest.mark.parametrize("streamed", [False, True], ids=["forwarded", "streamed"])
@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n", "\r\r", "\n\r\n"])
@pytest.mark.parametrize("cut", ["", 'data: {"a": '])
async def test_half_an_event_of_an_upstream_is_no_event(
    streamed: bool, end: str, cut: str, caplog: pytest.LogCaptureFixture
) -> None:
    """SDKs read each event that ends as JSON, and report the one that says why there are no more."""

    async def parts() -> AsyncIterator[bytes]:
        yield b'data: {"a": 1}' + end[:-1].encode()
        yield end[-1].encode() + cut.encode()
        raise UpstreamError("gone")

    delivery = Delivery(ChatDialect(), Relayed(200, {"content-type": "text/event-stream"}, parts()), streamed)
    async with serving(delivery.app) as http:
        told = await http.post("/")
        await delivery.closed.wait()
    events = SseDecoder().feed(told.content)
    assert [set(json.loads(event)) for event in events] == [{"a"}, {"error"}]
    assert [exc.message for exc in delivery.errors] == ["gone"]
    assert [record.getMessage() for record in caplog.records] == ["an answer broke off: gone"]


async def test_a_body_that_breaks_off_breaks_the_connection_and_is_a_sentence_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield b'{"a": '
        raise UpstreamError("gone")

    delivery = Delivery(ChatDialect(), Relayed(200, {"content-type": "application/json"}, parts()))
    async with serving(delivery.app) as http:
        with pytest.raises(httpx.RemoteProtocolError):
            await http.post("/")
        await delivery.closed.wait()
    assert caplog.records[0].getMessage() == "an answer broke off: gone"
    assert not [record for record in caplog.records if record.exc_info]


async def test_no_proxy_holds_back_a_stream_that_is_passed_on() -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield b"data: {}\n\n"

    delivery = Delivery(ChatDialect(), Relayed(200, {"content-type": "text/event-stream"}, parts()))
    async with serving(delivery.app) as http:
        response = await http.post("/")
    assert (response.headers["x-accel-buffering"], response.headers["cache-control"]) == ("no", "no-cache")
    assert response.headers["content-type"] == "text/event-stream"


async def test_a_plain_answer_has_its_length_and_is_closed() -> None:
    decided = Decided(completion("hi"), {"x-swarm-trained": "true"})
    delivery = Delivery(ChatDialect(), decided, streamed=False)
    async with serving(delivery.app) as http:
        response = await http.post("/")
        await delivery.closed.wait()
    assert response.json() == completion("hi")
    assert response.headers["content-length"] == str(len(response.content))
    assert response.headers["x-swarm-trained"] == "true"


async def test_an_upstreams_bytes_are_not_touched() -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield b"\x00\xff"
        yield b"odd"

    relayed = Relayed(418, {"content-type": "application/x-odd", "retry-after": "7"}, parts())
    for streamed in (False, True):
        delivery = Delivery(MessagesDialect(), replace(relayed, body=parts()), streamed)
        async with serving(delivery.app) as http:
            response = await http.post("/")
        assert (response.status_code, response.content) == (418, b"\x00\xffodd")
        assert (response.headers["content-type"], response.headers["retry-after"]) == ("application/x-odd", "7")
