"""What becomes of a request is told right, however it ends."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from starlette.responses import Response

from tests.gateway.conftest import OpenGateway
from tests.gateway.observability.streams import streamed
from tests.gateway.observability.test_metrics import scrape
from tests.standins.swarm import Swarm, error

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


class Lines(logging.Handler):
    """What the access log says."""

    def __init__(self) -> None:
        super().__init__()
        self.said: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self.said.put_nowait({"message": record.getMessage(), **record.__dict__["fields"]})

    async def next(self) -> dict[str, Any]:
        async with asyncio.timeout(30):
            return await self.said.get()


@asynccontextmanager
async def access() -> AsyncGenerator[Lines]:
    log, lines = logging.getLogger("gateway.access"), Lines()
    level = log.level
    log.setLevel(logging.INFO)
    log.addHandler(lines)
    try:
        yield lines
    finally:
        log.removeHandler(lines)
        log.setLevel(level)


async def test_an_answer(open_gateway: OpenGateway) -> None:
    async with access() as lines, open_gateway(access_log=True) as http:
        await http.post(CHAT, json=BODY)
        line = await lines.next()
    assert line["message"].startswith("POST /v1/chat/completions 200 ok ")
    assert line["seconds"] >= line["own_seconds"] >= 0
    assert (line["policy"], "first_token_seconds" in line, "error_code" in line) == ("best", False, False)


async def test_without_an_access_log_nothing_is_said(open_gateway: OpenGateway) -> None:
    async with access() as lines, open_gateway() as http:
        await http.post(CHAT, json=BODY)
    assert lines.said.empty()


async def test_a_stream(swarm: Swarm, open_gateway: OpenGateway) -> None:
    swarm.answer = streamed
    async with access() as lines, open_gateway(access_log=True, policy="first") as http:
        await http.post(CHAT, json={**BODY, "stream": True})
        line = await lines.next()
    assert (line["policy"], line["status"]) == ("first", 200)
    assert line["seconds"] >= line["first_token_seconds"] > 0


async def test_an_error(swarm: Swarm, open_gateway: OpenGateway) -> None:
    async def broken(body: dict[str, Any], number: int) -> Response:
        return error(500, "it broke")

    swarm.answer = broken
    async with access() as lines, open_gateway(access_log=True) as http:
        await http.post(CHAT, json=BODY)
        line = await lines.next()
    assert (line["status"], line["outcome"], line["error_code"]) == (502, "unavailable", "engine_failed")


async def test_an_error_in_the_midst_of_a_stream(swarm: Swarm, open_gateway: OpenGateway) -> None:
    told = asyncio.Event()

    async def late(body: dict[str, Any], number: int) -> Response:
        await told.wait()
        return error(500, "it broke")

    swarm.answer = late
    async with access() as lines, open_gateway(access_log=True, keepalive_seconds=0.01) as http:
        async with http.stream("POST", CHAT, json={**BODY, "stream": True}) as answer:
            parts = answer.aiter_bytes()
            assert (await anext(parts)).startswith(b":")
            told.set()
            rest = b"".join([part async for part in parts])
        line = await lines.next()
    assert b'"error"' in rest
    assert (line["status"], line["outcome"], line["error_code"]) == (200, "broken", "engine_failed")


async def test_a_user_who_hangs_up(swarm: Swarm, open_gateway: OpenGateway) -> None:
    async def never(body: dict[str, Any], number: int) -> Response:
        await asyncio.Event().wait()
        raise AssertionError

    swarm.answer = never
    async with access() as lines, open_gateway(access_log=True) as http:
        asking = asyncio.create_task(http.post(CHAT, json=BODY))
        await swarm.until(lambda: swarm.sampling)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        line = await lines.next()
        found = await scrape(http)
    assert (line["status"], line["outcome"]) == (0, "disconnected")
    assert found.of("requests_total", route="default", policy="best", outcome="disconnected") == 1


async def test_a_defect_of_ours(open_gateway: OpenGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    def defect(*args: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr("gateway.api.endpoint.caller_of", defect)
    async with access() as lines, open_gateway(access_log=True) as http:
        assert (await http.post(CHAT, json=BODY)).status_code == 500
        line = await lines.next()
    assert (line["status"], line["outcome"]) == (500, "failed")


async def test_a_path_cannot_begin_a_line(open_gateway: OpenGateway) -> None:
    async with access() as lines, open_gateway(access_log=True) as http:
        await http.get("/v1/models/a%0Ab%1b")
        line = await lines.next()
    assert line["message"].startswith("GET /v1/models/a%0Ab%1B 404 refused ")


async def test_a_retry_that_joins_waits_and_is_not_ours_to_count(swarm: Swarm, open_gateway: OpenGateway) -> None:
    go = asyncio.Event()
    answer = swarm.answer

    async def when_told(body: dict[str, Any], number: int) -> Response:
        await go.wait()
        return await answer(body, number)

    swarm.answer = when_told
    keyed = {"idempotency-key": "k"}
    async with open_gateway() as http, httpx.AsyncClient(base_url=http.base_url, trust_env=False, timeout=30) as other:
        one = asyncio.create_task(http.post(CHAT, json=BODY, headers=keyed))
        await swarm.until(lambda: swarm.sampling)
        two = asyncio.create_task(other.post(CHAT, json=BODY, headers=keyed))
        async with asyncio.timeout(30):
            while not (await scrape(http)).of("joined_total"):
                pass
        go.set()
        assert (await one).content == (await two).content
        found = await scrape(http)
    assert found.of("requests_total", route="default", policy="joined", outcome="ok") == 1
    assert found.of("phase_seconds_count", route="default", phase="join") == 1
    assert json.loads((await one).content)["choices"]
