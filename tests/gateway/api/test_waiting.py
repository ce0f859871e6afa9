"""Streams that wait: no headers until an answer is on its way, so that an error has a status and SDKs ask again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response, StreamingResponse

from gateway.types import Prospect
from swarm.states import EngineState
from tests.gateway.api.conftest import saying
from tests.gateway.api.test_exchange import ASKS
from tests.gateway.conftest import BODY, CHAT, Http, OpenGateway
from tests.gateway.resilience.rig import until_async
from tests.standins.swarm import Swarm, once
from tests.standins.vllm import listening

pytestmark = pytest.mark.anyio

HI: Any = {"role": "user", "content": "hi"}
#: A wait for an engine is longer than two keep-alives, and a refusal shorter than one.
WAIT: dict[str, Any] = {"keepalive_seconds": 1.0, "offline_wait_seconds": 2.2, "claim_wait_seconds": 2.2}


@pytest.mark.parametrize("engine", [EngineState.OFFLINE, EngineState.BOOTING])
async def test_a_stream_that_waits_in_vain_for_an_engine_gets_a_status(
    swarm: Swarm, open_gateway: OpenGateway, engine: EngineState
) -> None:
    swarm.state = engine
    async with open_gateway(**WAIT) as http:
        asked = [http.post(path, json={**body, "stream": True}) for path, body in ASKS.items()]
        for response in await asyncio.gather(*asked):
            assert (response.status_code, response.headers.get("x-should-retry")) == (503, "true"), response.text
            assert float(response.headers["retry-after"]) > 0


async def test_a_group_that_is_lost_before_the_first_keep_alive_leaves_the_status(
    swarm: Swarm, open_gateway: OpenGateway
) -> None:
    async def dies(body: dict[str, Any], number: int) -> Response:
        swarm.state = EngineState.OFFLINE
        return JSONResponse({"error": {"message": "the engine is offline", "code": "engine_offline"}}, 503)

    swarm.answer = dies
    async with open_gateway(keepalive_seconds=1.0, offline_wait_seconds=1.5) as http:
        response = await http.post(CHAT, json=BODY | {"stream": True})
    assert (response.status_code, response.headers.get("x-should-retry")) == (503, "true"), response.text


@contextlib.asynccontextmanager
async def engine_starts_after_a_refusal(swarm: Swarm, http: Http) -> AsyncGenerator[None]:
    """Inside, the engine, which was offline when the gateway began, is so until that has refused a request."""

    async def refused() -> bool:
        return bool((await http.get("/status")).json()["errors"])

    async def start() -> None:
        await until_async(refused, 60.0, "no request was refused")
        await swarm.set_state(EngineState.ROLLING)

    starting = asyncio.create_task(start())
    try:
        yield
        await starting
    finally:
        starting.cancel()


async def test_real_sdks_ask_again_for_streams_that_waited_in_vain(swarm: Swarm, open_gateway: OpenGateway) -> None:
    import anthropic
    import openai

    swarm.answer, swarm.state = saying("here it is"), EngineState.OFFLINE
    async with (
        open_gateway(**WAIT) as http,
        engine_starts_after_a_refusal(swarm, http),
        openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="any", max_retries=5) as sdk,
    ):
        chunks = await sdk.chat.completions.create(model="tiny", messages=[HI], stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices])
        assert text == "here it is"
    swarm.state = EngineState.OFFLINE
    async with (
        open_gateway(**WAIT) as http,
        engine_starts_after_a_refusal(swarm, http),
        anthropic.AsyncAnthropic(base_url=str(http.base_url), api_key="any", max_retries=5) as claude,
        claude.messages.stream(model="tiny", max_tokens=9, messages=[HI]) as stream,
    ):
        assert (await stream.get_final_message()).content[0].to_dict()["text"] == "here it is"


async def test_a_claim_that_waits_for_an_engine_that_is_up_is_kept_alive(
    swarm: Swarm, open_gateway: OpenGateway
) -> None:
    await swarm.set_state(EngineState.WEIGHT_SYNCING)
    asked = BODY | {"stream": True}
    async with (
        open_gateway(keepalive_seconds=0.01, offline_wait_seconds=0.1) as http,
        http.stream("POST", CHAT, json=asked) as response,
    ):
        lines = response.aiter_lines()
        assert await anext(lines) == ": keep-alive"
        await swarm.set_state(EngineState.ROLLING)
        assert [line async for line in lines if line][-1] == "data: [DONE]"


async def test_a_retry_that_joins_is_kept_alive_as_well(swarm: Swarm, open_gateway: OpenGateway) -> None:
    go = asyncio.Event()
    swarm.answer = once(go, saying("late"))
    asked: dict[str, Any] = {"json": BODY | {"stream": True}, "headers": {"idempotency-key": "k"}}
    async with open_gateway(keepalive_seconds=0.01) as http, http.stream("POST", CHAT, **asked) as one:
        assert await anext(one.aiter_lines()) == ": keep-alive"
        async with http.stream("POST", CHAT, **asked) as other:
            lines = other.aiter_lines()
            assert await anext(lines) == ": keep-alive"
            assert (await http.get("/metrics")).text.count("gateway_joined_total 1.0") == 1
            go.set()
            assert [line async for line in lines if line][-1] == "data: [DONE]"


async def test_an_answer_of_several_parts_is_under_way_once_all_are() -> None:
    prospect, joined = Prospect(), Prospect()
    joined.follow(prospect)
    prospect.needed = 2
    gone = True
    with pytest.raises(KeyError), prospect.sampling():
        assert joined.since() is None
        with prospect.waiting(0.0, lambda: gone):
            assert joined.since() is None, "nobody could sample it"
            gone = False
            assert joined.since() is not None
        assert joined.since() is None
        with prospect.sampling():
            pass
        assert joined.since() is not None, "what was sampled stays"
        raise KeyError
    assert joined.since() is None, "a part failed"


@pytest.mark.parametrize("path", ASKS)
async def test_a_stream_whose_engine_is_cut_off_says_so_in_plain_words(
    swarm: Swarm, open_gateway: OpenGateway, path: str
) -> None:
    async def cut() -> AsyncIterator[bytes]:
        yield b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,'
        yield b'"delta":{"role":"assistant","content":"half"},"finish_reason":null}]}\n\n'
        raise ConnectionResetError

    swarm.answer = lambda *_: StreamingResponse(cut(), media_type="text/event-stream")
    async with open_gateway(policy="first") as http:
        told = (await http.post(path, json={**ASKS[path], "stream": True})).text
    assert "half" in told and "the connection broke in the middle of the answer" in told
    for raw in ("Payload", "message=", "Transfer", "aiohttp"):
        assert raw not in told


async def test_an_engine_that_closes_without_an_answer_is_told_in_plain_words(
    swarm: Swarm, open_gateway: OpenGateway
) -> None:
    async def reset(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/groups/"):
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
            await send({"type": "http.response.body", "body": b"{", "more_body": True})
            raise ConnectionResetError
        await swarm.app(scope, receive, send)

    async with listening(reset) as url:
        swarm.url = url
        async with open_gateway(swarm_url=url) as http:
            response = await http.post(CHAT, json=BODY)
    assert response.status_code == 503
    assert "Payload" not in response.text and "in the middle of the answer" in response.text
