"""Whatever is sent to whatever address: an answer or a 4xx, at an LLM address in its dialect, soon, and no episode is
left behind."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.app import create_app
from gateway.config.gateway import GatewayConfig
from tests.gateway.conftest import write_hooks
from tests.standins.swarm import Swarm, completion
from tests.standins.vllm import listening

_SECONDS = 60.0
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
_TEXT = st.text(max_size=8)
_MESSAGE = {"role": "user", "content": "hi"}
_VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [_MESSAGE]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [_MESSAGE], "max_tokens": 9},
}
_FIELDS = [
    *("model", "messages", "input", "prompt", "max_tokens", "n", "stream", "stream_options", "temperature", "top_p"),
    *("tools", "tool_choice", "system", "instructions", "stop", "stop_sequences", "echo", "logprobs", "top_logprobs"),
    *("metadata", "thinking", "reasoning", "text", "store", "previous_response_id", "response_format", "output_config"),
    *(
        "best_of",
        "suffix",
        "user",
        "include",
        "chat_template_kwargs",
        "max_output_tokens",
        "seed",
        "parallel_tool_calls",
    ),
]
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"]
_ADDRESSES = [
    *_VALID,
    *("/v1/messages/count_tokens", "/v1/models", "/v1/models/tiny", "/v1/feedback", "/v1/sessions/s/end"),
    *("/v1/responses/resp_1", "/v1/embeddings", "/v1/v1/models", "/health", "/status", "/metrics", "/openapi.json"),
    *("/admin/reload", "/", "/v1", "/v1/", "/chat/completions"),
]
_SEGMENT = st.text(max_size=8).map(lambda text: quote(text, safe=""))
_ANY_ADDRESS = st.sampled_from(_ADDRESSES) | st.lists(_SEGMENT, max_size=4).map(lambda parts: "/v1/" + "/".join(parts))
_HEADERS = [
    *("x-swarm-policy", "x-swarm-train", "x-swarm-session", "idempotency-key", "x-request-id"),
    *(
        "x-swarm-when-batch-waits",
        "x-stainless-retry-count",
        "x-stainless-read-timeout",
        "traceparent",
        "content-type",
        "content-encoding",
    ),
    *("accept", "authorization", "x-api-key", "anthropic-version", "host", "origin", "cookie"),
]
_SENSIBLE = [
    "true",
    "false",
    "first",
    "best;quorum=1",
    "best;deadline=0.01",
    "0",
    "1",
    "application/json",
    "text/plain",
]
_VALUE = st.sampled_from(_SENSIBLE) | st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=12).map(
    str.strip
)
_BODY = st.sampled_from([json.dumps(body).encode() for body in _VALID.values()]) | st.binary(max_size=40)


@dataclass
class Running:
    """A gateway before a stand-in swarm, in a loop of its own."""

    url: str
    swarm: Swarm
    loop: asyncio.AbstractEventLoop

    def settled(self) -> None:
        """Wait until every episode that was claimed has been ended or given back."""
        waiting = self.swarm.until(lambda: not self.swarm.open_episodes, _SECONDS)
        asyncio.run_coroutine_threadsafe(waiting, self.loop).result(2 * _SECONDS)

    def rested(self, http: httpx.Client) -> None:
        """The same, and until the gateway has seen the last answer out, which may have been read before that."""
        self.settled()
        deadline = time.monotonic() + _SECONDS
        while http.get("/status").json()["in_flight"]:
            assert time.monotonic() < deadline, "a request is still served"


async def answered(request: Request) -> Response:
    return JSONResponse({**completion("word"), "count": 3})


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder: Path = tmp_path_factory.mktemp("fuzz")
    ready, over = threading.Event(), threading.Event()
    held: list[Running] = []

    async def serve() -> None:
        swarm = Swarm(num_repeat=2)
        # the engine's own addresses: of a chat without an episode, and for counting
        swarm.app.router.routes += [
            Route("/v1/chat/completions", answered, methods=["POST"]),
            Route("/tokenize", answered, methods=["POST"]),
        ]
        async with listening(swarm.app) as url:
            swarm.url = url
            config = GatewayConfig(swarm_url=url, hooks=str(write_hooks(folder / "hooks")))
            async with listening(create_app(config)) as gateway:
                held.append(Running(gateway, swarm, asyncio.get_running_loop()))
                ready.set()
                await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(_SECONDS)
    yield held[0]
    over.set()
    thread.join()


def check(http: httpx.Client, path: str, content: bytes) -> None:
    response = http.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code in (200, 400, 404, 413), (response.status_code, response.text, content)
    if response.status_code != 200:
        body = response.json()
        assert body["error"]["message"] and body["error"]["type"]
        assert ("type" in body) == path.startswith("/v1/messages")
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert b"internal error" not in response.content


@pytest.mark.property
@pytest.mark.parametrize("path", _VALID)
def test_any_body_gets_an_answer(running: Running, path: str) -> None:
    with httpx.Client(base_url=running.url, timeout=_SECONDS, trust_env=False, verify=False) as http:

        @given(st.binary(max_size=40) | _JSON.map(lambda value: json.dumps(value).encode()))
        def anything(content: bytes) -> None:
            check(http, path, content)

        @given(st.dictionaries(st.sampled_from(_FIELDS) | _TEXT, _JSON, min_size=1, max_size=3))
        def one_field_changed(change: dict[str, Any]) -> None:
            check(http, path, json.dumps(_VALID[path] | change).encode())

        anything()
        one_field_changed()
        running.rested(http)


@pytest.mark.property
def test_any_address_gets_an_answer(running: Running) -> None:
    with httpx.Client(base_url=running.url, timeout=_SECONDS, trust_env=False, verify=False) as http:

        @given(
            method=st.sampled_from(_METHODS),
            address=_ANY_ADDRESS,
            query=st.just("") | _SEGMENT.map(lambda text: f"?{text}=1"),
            headers=st.dictionaries(st.sampled_from(_HEADERS), _VALUE, max_size=4),
            content=st.just(b"") | _BODY,
        )
        def anything(method: str, address: str, query: str, headers: dict[str, str], content: bytes) -> None:
            response = http.request(method, address + query, headers=headers, content=content)
            assert response.status_code < 500, (response.status_code, response.text)
            if response.status_code >= 400 and method != "HEAD" and address.startswith("/v1"):
                assert response.json()["error"]["message"]

        anything()
        running.rested(http)
