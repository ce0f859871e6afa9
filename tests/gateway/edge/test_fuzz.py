"""Whatever is sent to an LLM address: an answer or a 4xx in its dialect, soon, and no episode is left behind."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.app import create_app
from gateway.config import GatewayConfig
from tests.gateway.conftest import write_hooks
from tests.gateway.stand_in import Swarm, listening

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


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder: Path = tmp_path_factory.mktemp("fuzz")
    ready, over = threading.Event(), threading.Event()
    held: list[Running] = []

    async def serve() -> None:
        swarm = Swarm(num_repeat=2)
        async with listening(swarm.app) as url:
            swarm.url = url
            config = GatewayConfig(swarm_url=url, hooks=str(write_hooks(folder / "hooks")), warm_groups=0)
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


@pytest.mark.parametrize("path", _VALID)
def test_any_body_gets_an_answer(running: Running, path: str) -> None:
    with httpx.Client(base_url=running.url, timeout=_SECONDS, trust_env=False) as http:

        @settings(max_examples=60)
        @given(st.binary(max_size=40) | _JSON.map(lambda value: json.dumps(value).encode()))
        def anything(content: bytes) -> None:
            check(http, path, content)

        @settings(max_examples=120)
        @given(st.dictionaries(st.sampled_from(_FIELDS) | _TEXT, _JSON, min_size=1, max_size=3))
        def one_field_changed(change: dict[str, Any]) -> None:
            check(http, path, json.dumps(_VALID[path] | change).encode())

        anything()
        one_field_changed()
        running.settled()
        deadline = time.monotonic() + _SECONDS
        # the last answer is read before the gateway has seen it out
        while http.get("/status").json()["in_flight"]:
            assert time.monotonic() < deadline, "a request is still served"
