"""``/metrics``: what each way through the gateway leaves there, and who may read it."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from swarm.states import EngineState
from tests.gateway.conftest import OpenGateway
from tests.standins.swarm import Swarm

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


class Found(dict[tuple[str, frozenset[tuple[str, str]]], float]):
    """The series of one scrape."""

    def of(self, name: str, **labels: str) -> float:
        return self[f"gateway_{name}", frozenset(labels.items())]

    def names(self) -> set[str]:
        return {name for name, _ in self}


async def scrape(http: httpx.AsyncClient) -> Found:
    answer = await http.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain; version=")
    samples = [one for family in text_string_to_metric_families(answer.text) for one in family.samples]
    found = Found({(one.name, frozenset(one.labels.items())): one.value for one in samples})
    assert not [name for name in found.names() if name.endswith("_created")]
    assert len(found) == len(samples), "a series stands there twice"
    return found


async def test_a_group_from_request_to_acknowledgement(swarm: Swarm, open_gateway: OpenGateway) -> None:
    async with open_gateway() as http:
        assert (await http.post(CHAT, json=BODY)).status_code == 200
        found = await scrape(http)
    assert found.of("requests_total", route="default", policy="best", outcome="ok") == 1
    assert found.of("request_seconds_count", route="default", policy="best") == 1
    assert found.of("overhead_seconds_count", route="default", policy="best") == 1
    own = found.of("overhead_seconds_sum", route="default", policy="best")
    assert found.of("request_seconds_sum", route="default", policy="best") > own > 0
    # claim: the job and the episodes; hook: the request's and the group's
    for phase, times in {"queue": 1, "claim": 2, "sample": 1, "hook": 2, "submit": 1}.items():
        assert found.of("phase_seconds_count", route="default", phase=phase) == times, phase
    assert "gateway_first_token_seconds_count" not in found.names()
    assert found.of("trained_groups_total", route="default") == 1
    assert found.of("submitted_groups_total", route="default", informative="true") == 1
    assert found.of("informative_group_share", route="default") == 1
    # four answers of three tokens, of which one went out
    assert found.of("tokens_total", route="default", fate="delivered") == 3
    assert found.of("tokens_total", route="default", fate="wasted") == 9
    assert found.of("in_flight", route="default") == 0
    assert found.of("shed_total", route="default") == 0
    assert found.of("swarm_up", swarm=swarm.url) == 1


async def test_a_stream_tells_its_first_token(open_gateway: OpenGateway) -> None:
    async with open_gateway(keepalive_seconds=0.01) as http:
        assert (await http.post(CHAT, json={**BODY, "stream": True})).text.endswith("data: [DONE]\n\n")
        found = await scrape(http)
    assert found.of("first_token_seconds_count", route="default", policy="best") == 1
    assert found.of("overhead_seconds_count", route="default", policy="best") == 1


async def test_what_is_shed_and_what_waits(swarm: Swarm, open_gateway: OpenGateway) -> None:
    swarm.state = EngineState.WEIGHT_SYNCING
    async with open_gateway(max_in_flight=1, max_queued=0) as http, asyncio.TaskGroup() as group:
        waits = group.create_task(http.post(CHAT, json=BODY))
        await swarm.until(lambda: swarm.claims)
        assert (await http.post(CHAT, json=BODY)).status_code == 429
        found = await scrape(http)
        load = (await http.get("/status")).json()["routes"]["default"]["load"]
        await swarm.set_state(EngineState.ROLLING)
        assert (await waits).status_code == 200
    assert found.of("in_flight", route="default") == 1
    assert found.of("queued", route="default") == 0
    assert found.of("shed_total", route="default") == 1
    assert found.of("requests_total", route="default", policy="", outcome="overloaded") == 1
    assert found.of("errors_total", code="overloaded") == 1
    assert load == {"running": 1, "waiting": 0, "refused": 1}


async def test_errors_by_kind(open_gateway: OpenGateway) -> None:
    async with open_gateway() as http:
        assert (await http.post(CHAT, content=b"{")).status_code == 400
        assert (await http.post(CHAT, json={**BODY, "model": "other"})).status_code == 404
        found = await scrape(http)
    assert found.of("errors_total", code="malformed_json") == 1
    assert found.of("errors_total", code="model_not_found") == 1
    assert found.of("requests_total", route="", policy="", outcome="refused") == 2
    assert "gateway_overhead_seconds_count" not in found.names()


async def test_a_hook_that_fails(open_gateway: OpenGateway) -> None:
    failing = "def on_compute_relative_reward(task, candidates, context):\n    raise KeyError(task.main_query)\n"
    async with open_gateway(reward=failing) as http:
        assert (await http.post(CHAT, json=BODY)).status_code == 200
        found = await scrape(http)
    assert "gateway_hook_failures_total" in found.names()
    assert found.of("dropped_groups_total", route="default", reason="reward_hook_failed") == 1


async def test_a_server_that_is_down_says_since_when(open_gateway: OpenGateway) -> None:
    async with open_gateway(swarm_url="http://user:pass@127.0.0.1:9", offline_wait_seconds=0) as http:
        assert (await http.post(CHAT, json=BODY)).status_code == 503
        found = await scrape(http)
        (first,) = (await http.get("/status")).json()["swarms"]
        (later,) = (await http.get("/status")).json()["swarms"]
    assert found.of("swarm_up", swarm="http://127.0.0.1:9") == 0
    assert found.of("errors_total", code="server_unreachable") == 1
    assert first["down_since"] == later["down_since"] and first["down_since"].endswith("+00:00")


async def test_a_key_is_asked_for_as_for_the_status(open_gateway: OpenGateway) -> None:
    async with open_gateway(api_keys=["sk-app"]) as http:
        assert (await http.get("/metrics")).status_code == 401
        assert (await http.get("/metrics", headers={"authorization": "Bearer sk-app"})).status_code == 200


async def test_series_do_not_grow_with_what_callers_say(open_gateway: OpenGateway) -> None:
    async with open_gateway() as http:
        before = len(await scrape(http))
        for number in range(5):
            await http.post(f"/v1/odd/{number}", json={"model": f"m{number}"})
            await http.get(f"/v1/models/m{number}")
        after = len(await scrape(http))
        for number in range(5, 20):
            await http.post(f"/v1/odd/{number}", json={"model": f"m{number}"})
            await http.get(f"/v1/models/m{number}")
        assert len(await scrape(http)) == after > before
