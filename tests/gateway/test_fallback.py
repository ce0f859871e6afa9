"""When the swarm cannot serve: wait, then the fallback upstream, then a 503 that says when to come back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from swarm.states import EngineState
from tests.gateway.conftest import OpenGateway
from tests.standins.swarm import Swarm, completion, error
from tests.standins.vllm import listening

pytestmark = pytest.mark.anyio

BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
CHAT = "/v1/chat/completions"
STREAM = b'data: {"choices": [], "odd":  1}\n\ndata: [DONE]\n\n'
NOWHERE = "http://127.0.0.1:9"


class Upstream:
    """Records what it gets; answers with ``status``."""

    def __init__(self) -> None:
        self.status = 200
        self.got: list[tuple[dict[str, Any], str]] = []
        self.url = ""
        self.app = Starlette(routes=[Route(CHAT, self._chat, methods=["POST"])])

    async def _chat(self, request: Request) -> Response:
        body = json.loads(await request.body())
        self.got.append((body, request.headers.get("authorization", "")))
        if self.status != 200:
            return error(self.status, "fallback is full", retry_after="7")
        if body.get("stream"):
            return StreamingResponse(iter([STREAM]), media_type="text/event-stream")
        return JSONResponse(completion("from the fallback"))


async def engine_itself(request: Request) -> Response:
    """The engine without an episode, at the swarm server's own address."""
    if not (await request.json()).get("stream"):
        return JSONResponse(completion("from the engine"))
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    delta = {"index": 0, "delta": {"role": "assistant", "content": "from the engine"}, "finish_reason": "stop"}
    events = [f"data: {json.dumps({**head, 'choices': [delta]})}\n\n", "data: [DONE]\n\n"]
    return StreamingResponse(iter(events), media_type="text/event-stream")


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    stand_in = Upstream()
    async with listening(stand_in.app) as url:
        stand_in.url = f"{url}/v1"
        yield stand_in


@pytest.mark.parametrize("swarm_url", [NOWHERE, None])
async def test_without_a_fallback_it_is_a_503_with_retry_after(
    swarm: Swarm, open_gateway: OpenGateway, swarm_url: str | None
) -> None:
    swarm.state = EngineState.OFFLINE
    async with open_gateway(swarm_url=swarm_url or swarm.url, offline_wait_seconds=0.1) as http:
        response = await http.post(CHAT, json=BODY)
        error = response.json()["error"]
        assert (response.status_code, error["type"]) == (503, "service_unavailable_error")
        assert error["code"] == ("server_unreachable" if swarm_url else "engine_offline")
        assert int(response.headers["retry-after"]) >= 1
        assert response.headers["x-should-retry"] == "true"
        assert (await http.get("/status")).json()["errors"] == {error["code"]: 1}


async def test_a_sync_longer_than_the_bound_is_a_503(swarm: Swarm, open_gateway: OpenGateway) -> None:
    swarm.state = EngineState.WEIGHT_SYNCING
    async with open_gateway(claim_wait_seconds=0.2) as http:
        response = await http.post(CHAT, json=BODY)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_syncing")


async def test_the_fallback_answers_plain(swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway) -> None:
    fallback = {"base_url": upstream.url, "api_key": "other-key", "model": "other"}
    async with open_gateway(swarm_url=NOWHERE, offline_wait_seconds=0, upstream=fallback) as http:
        response = await http.post(CHAT, json={**BODY, "odd": 1})
        assert response.json() == completion("from the fallback")
        assert response.headers["x-swarm-trained"] == "false"
        assert response.headers["x-swarm-drop-reason"] == "server_unreachable"
        assert upstream.got == [({**BODY, "odd": 1, "model": "other"}, "Bearer other-key")]
        assert (await http.get("/status")).json()["fallbacks"] == {"server_unreachable": 1}


async def test_who_has_a_fallback_does_not_wait_for_an_engine_that_boots(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway
) -> None:
    swarm.state = EngineState.BOOTING
    async with open_gateway(offline_wait_seconds=0, upstream={"base_url": upstream.url}) as http:
        for _ in range(2):
            response = await http.post(CHAT, json=BODY)
            assert response.json() == completion("from the fallback")
            assert response.headers["x-swarm-drop-reason"] == "engine_booting"
    assert not swarm.claimed


async def test_without_a_fallback_an_engine_that_boots_is_waited_for(swarm: Swarm, open_gateway: OpenGateway) -> None:
    swarm.state = EngineState.BOOTING
    async with open_gateway(offline_wait_seconds=0) as http:
        asking = asyncio.create_task(http.post(CHAT, json=BODY))
        await swarm.until(lambda: swarm.claims)
        await swarm.set_state(EngineState.ROLLING)
        assert (await asking).status_code == 200


async def test_the_fallback_streams_its_own_bytes(swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway) -> None:
    async with open_gateway(swarm_url=NOWHERE, offline_wait_seconds=0, upstream={"base_url": upstream.url}) as http:
        response = await http.post(CHAT, json={**BODY, "stream": True})
    assert response.content == STREAM
    assert response.headers["x-swarm-trained"] == "false"
    assert upstream.got == [({**BODY, "stream": True}, "")]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_fallbacks_own_errors_pass_through(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway, stream: bool
) -> None:
    upstream.status = 429
    async with open_gateway(swarm_url=NOWHERE, offline_wait_seconds=0, upstream={"base_url": upstream.url}) as http:
        response = await http.post(CHAT, json={**BODY, "stream": stream})
    assert (response.status_code, response.json()["error"]["message"]) == (429, "fallback is full")
    assert response.headers["retry-after"] == "7"


async def test_a_late_fallback_error_is_an_event(swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway) -> None:
    upstream.status = 429
    swarm.state = EngineState.WEIGHT_SYNCING
    async with open_gateway(
        claim_wait_seconds=0.3, keepalive_seconds=0.05, upstream={"base_url": upstream.url}
    ) as http:
        response = await http.post(CHAT, json={**BODY, "stream": True})
    assert response.status_code == 200
    comments, _, event = response.text.rpartition("data: ")
    assert comments.count(": keep-alive") >= 1
    assert json.loads(event)["error"]["message"] == "fallback is full"


async def test_failed_samples_go_to_the_fallback(swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway) -> None:
    async def fails(body: dict[str, Any], number: int) -> Response:
        return error(500, "boom")

    swarm.answer = fails
    async with open_gateway(upstream={"base_url": upstream.url}) as http:
        response = await http.post(CHAT, json=BODY)
        assert response.json() == completion("from the fallback")
        assert response.headers["x-swarm-drop-reason"] == "engine_failed"
    assert not swarm.open_episodes


async def test_a_request_at_fault_does_not_go_to_the_fallback(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway
) -> None:
    async def refuses(body: dict[str, Any], number: int) -> Response:
        return error(400, "too long")

    swarm.answer = refuses
    async with open_gateway(upstream={"base_url": upstream.url}) as http:
        assert (await http.post(CHAT, json=BODY)).status_code == 400
    assert not upstream.got


async def test_an_unreachable_fallback_is_a_503(swarm: Swarm, open_gateway: OpenGateway) -> None:
    async with open_gateway(swarm_url=NOWHERE, offline_wait_seconds=0, upstream={"base_url": f"{NOWHERE}/v1"}) as http:
        response = await http.post(CHAT, json=BODY)
    assert response.status_code == 503
    assert "upstream 127.0.0.1:9 cannot be reached" in response.json()["error"]["message"]


@pytest.mark.parametrize("with_upstream", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_engine_answers_without_training_where_nothing_else_does(
    swarm: Swarm, open_gateway: OpenGateway, with_upstream: bool, stream: bool
) -> None:
    swarm.app.router.routes.append(Route(CHAT, engine_itself, methods=["POST"]))
    swarm.state = EngineState.WEIGHT_SYNCING
    upstream = {"base_url": f"{NOWHERE}/v1"} if with_upstream else None
    async with open_gateway(claim_wait_seconds=0.1, upstream=upstream) as http:
        response = await http.post(CHAT, json={**BODY, "stream": stream})
        assert response.status_code == 200 and "from the engine" in response.text
        assert response.headers["x-swarm-trained"] == "false"
        assert response.headers["x-swarm-drop-reason"] == "engine_syncing"
        assert (await http.get("/status")).json()["fallbacks"] == {"engine_syncing": 1}


async def test_an_open_breaker_leads_to_the_engine(swarm: Swarm, open_gateway: OpenGateway) -> None:
    swarm.app.router.routes.append(Route(CHAT, engine_itself, methods=["POST"]))
    swarm.state = EngineState.WEIGHT_SYNCING
    async with open_gateway(claim_wait_seconds=0.05, upstream={"base_url": f"{NOWHERE}/v1"}) as http:
        answers = [await http.post(CHAT, json=BODY) for _ in range(8)]
    assert [answer.status_code for answer in answers] == [200] * 8


async def test_nobody_waits_for_an_engine_that_has_been_away_for_long(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway
) -> None:
    swarm.state = EngineState.OFFLINE
    async with open_gateway(offline_wait_seconds=0, upstream={"base_url": upstream.url}) as http:
        for _ in range(3):
            response = await http.post(CHAT, json=BODY)
            assert response.headers["x-swarm-drop-reason"] == "engine_offline"
        assert not swarm.claims
        swarm.state = EngineState.ROLLING
        async with asyncio.timeout(60):
            while response.headers["x-swarm-trained"] != "true":
                response = await http.post(CHAT, json=BODY)


@pytest.mark.parametrize("code", [401, 422])
async def test_a_swarm_server_that_refuses_the_gateway_is_not_the_users_fault(
    swarm: Swarm, open_gateway: OpenGateway, code: int
) -> None:
    async def refuse(request: Request) -> Response:
        return error(code, "count is above the slots")

    swarm.app.router.routes.insert(0, Route("/claim_group", refuse, methods=["POST"]))
    async with open_gateway() as http:
        response = await http.post(CHAT, json=BODY)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "swarm_refused")
    assert "count is above the slots" in response.json()["error"]["message"]
