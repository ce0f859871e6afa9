"""The page of a gateway, in front of a real one."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from starlette.responses import Response

from gateway.app import create_app
from gateway.config.gateway import GatewayConfig
from swarm.states import EngineState
from tests.gateway.conftest import OpenGateway
from tests.gateway.tui.conftest import watching
from tests.standins.swarm import Swarm, error
from tests.standins.vllm import listening

pytestmark = pytest.mark.anyio

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
CHAT = "/v1/chat/completions"


async def test_what_requests_and_their_groups_became(open_gateway: OpenGateway, swarm: Swarm) -> None:
    async with open_gateway() as http, watching([], [str(http.base_url)]) as screen:
        await screen.shows("● engine ROLLING", "policy version 7, model tiny", "0 requests", "nothing has failed")
        assert (await http.post(CHAT, json=BODY)).status_code == 200
        await screen.shows("1 requests", "1 trained, 100% of those submitted informative", "3 delivered")
        await screen.shows("9 wasted (75% of all: the price of the fan-out)")
        rows = ["100%", "75%", "│ default "]
        await screen.until(lambda text: any(all(word in row for word in rows) for row in text.splitlines()))
        await http.post(CHAT, json=BODY, headers={"x-swarm-policy": "nonsense"})
        await screen.shows("1 errors", "errors that callers got, by code", "1 callers got the error")
        await screen.press("w")
        await screen.shows("Swarm servers (w)", swarm.url.removeprefix("http://"))
        assert [panel.key for panel in screen.app.pages[0].board.panels] == ["g", "w", "f", "l"]


async def test_an_engine_that_goes_and_a_hook_that_fails(open_gateway: OpenGateway, swarm: Swarm) -> None:
    reward = "def on_compute_relative_reward(task, candidates, context):\n    raise ValueError('no')\n"
    async with open_gateway(reward=reward) as http, watching([], [str(http.base_url)]) as screen:
        assert (await http.post(CHAT, json=BODY)).status_code == 200
        await screen.shows("1 dropped", "reward_hook_failed", "hooks without a result, by code")
        await swarm.set_state(EngineState.OFFLINE)
        await screen.shows("○ engine OFFLINE")


async def test_a_breaker_that_opens(swarm: Swarm, nobody: str) -> None:
    config = GatewayConfig(swarm_url=None, upstream={"base_url": f"{nobody}/v1"}, hooks=None)
    async with listening(create_app(config)) as url, watching([], [url]) as screen:
        await screen.shows("no swarm server", "closed")
        async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False, verify=False) as http:
            for _ in range(6):
                assert (await http.post(CHAT, json=BODY)).status_code in (502, 503)
        await screen.shows("breaker of route default's upstream is")
        await screen.until(lambda text: "! open" in text or "! half_open" in text)


async def test_requests_under_way_and_in_the_queue(open_gateway: OpenGateway, swarm: Swarm) -> None:
    held = asyncio.Event()

    async def hold(body: dict[str, Any], number: int) -> Response:
        await held.wait()
        return error(500, "held")

    swarm.answer = hold
    async with open_gateway(max_in_flight=1) as http, watching([], [str(http.base_url)]) as screen:
        asking = [asyncio.create_task(http.post(CHAT, json={**BODY, "user": str(number)})) for number in range(3)]
        await screen.shows("3 in flight", "2 queued")
        held.set()
        await asyncio.gather(*asking)
        await screen.shows("0 in flight, 0 queued")


async def test_a_gateway_and_its_swarm_server_on_one_page(open_gateway: OpenGateway, swarm: Swarm) -> None:
    async with open_gateway() as http, watching([swarm.url], [str(http.base_url)], size=(80, 24)) as screen:
        await screen.shows("2 of 2 servers answer", "● ROLLING")
        await screen.until(lambda text: text.count("ROLLING") >= 2, "ROLLING of both")
        await screen.press("3")
        await screen.shows("engine ROLLING", "Routes (g)")
        for key, words in (("f", "nothing has failed"), ("l", "nothing has happened yet"), ("g", "default")):
            await screen.press(key)
            await screen.shows(words)
        await screen.press("tab")
        await screen.shows("Swarm servers (w)")
        await screen.press("shift+tab")
        await screen.shows("Routes (g)")
        assert all(len(line) <= 80 for line in screen.text.splitlines())
