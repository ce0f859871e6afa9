"""``/metrics`` and the access log: what each way through the gateway leaves there, and who may read it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.responses import JSONResponse, Response

from gateway.stats import RECENT_GROUPS, Recent
from reward_hooks.contract import GroupScore, Reward
from swarm.states import EngineState
from tests.gateway.conftest import BODY, CHAT, Http, OpenGateway, ask
from tests.standins.swarm import Answer, Swarm, by_number, completion, error, hanging, once

pytestmark = pytest.mark.anyio

ROUTE = {"route": "default", "policy": "best"}


class Found(dict[tuple[str, frozenset[tuple[str, str]]], float]):
    """The series of one scrape."""

    def of(self, name: str, **labels: str) -> float:
        return self[f"gateway_{name}", frozenset(labels.items())]

    def names(self) -> set[str]:
        return {name for name, _ in self}


async def scrape(http: Http) -> Found:
    answer = await http.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain; version=")
    samples = [one for family in text_string_to_metric_families(answer.text) for one in family.samples]
    found = Found({(one.name, frozenset(one.labels.items())): one.value for one in samples})
    assert not [name for name in found.names() if name.endswith("_created")]
    assert len(found) == len(samples), "a series stands there twice"
    return found


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


@pytest.fixture
def access() -> Iterator[Lines]:
    log, lines = logging.getLogger("gateway.access"), Lines()
    level = log.level
    log.setLevel(logging.INFO)
    log.addHandler(lines)
    yield lines
    log.removeHandler(lines)
    log.setLevel(level)


# ------------------------------------------------------------------ the ways that a request ends


async def test_a_group_from_request_to_acknowledgement(swarm: Swarm, open_gateway: OpenGateway, access: Lines) -> None:
    async with open_gateway(access_log=True) as http:
        assert (await ask(http)).status_code == 200
        line, found = await access.next(), await scrape(http)
    assert line["message"].startswith("POST /v1/chat/completions 200 ok ")
    assert line["seconds"] >= line["own_seconds"] >= 0
    assert (line["policy"], "first_token_seconds" in line, "error_code" in line) == ("best", False, False)
    assert found.of("requests_total", **ROUTE, outcome="ok") == 1
    assert found.of("request_seconds_count", **ROUTE) == found.of("overhead_seconds_count", **ROUTE) == 1
    assert found.of("request_seconds_sum", **ROUTE) > found.of("overhead_seconds_sum", **ROUTE) > 0
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
    assert found.of("in_flight", route="default") == found.of("shed_total", route="default") == 0
    assert found.of("swarm_up", swarm=swarm.url) == 1


async def test_cached_prompt_tokens_count_once_for_a_group(swarm: Swarm, open_gateway: OpenGateway) -> None:
    def answer(cached: int | None) -> Answer:
        details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}

        def answered(body: dict[str, Any], number: int) -> Response:
            whole = completion("x")
            return JSONResponse(whole | {"usage": whole["usage"] | details})

        return answered

    async with open_gateway() as http:
        # an engine that does not tell, a prompt that is new, and the same again
        for cached in (None, 0, 4):
            swarm.answer = answer(cached)
            usage = (await ask(http)).json()["usage"]
            assert usage.get("prompt_tokens_details", {}).get("cached_tokens") == cached
        found = await scrape(http)
    assert found.of("prompt_tokens_total", route="default", source="computed") == 5 + 1
    assert found.of("prompt_tokens_total", route="default", source="cached") == 4


async def test_without_an_access_log_nothing_is_said(gateway: Http, access: Lines) -> None:
    await ask(gateway)
    assert access.said.empty()


@pytest.mark.parametrize("policy", ["best", "first"])
async def test_a_stream_tells_its_first_token(open_gateway: OpenGateway, access: Lines, policy: str) -> None:
    async with open_gateway(keepalive_seconds=0.01, policy=policy, access_log=True) as http:
        assert (await ask(http, stream=True)).text.endswith("data: [DONE]\n\n")
        line, found = await access.next(), await scrape(http)
    assert (line["policy"], line["status"]) == (policy, 200)
    assert line["seconds"] >= line["first_token_seconds"] > 0
    assert found.of("first_token_seconds_count", route="default", policy=policy) == 1
    # what comes live is not waited for
    assert (found.get(("gateway_overhead_seconds_count", frozenset(ROUTE.items()))) == 1) == (policy == "best")


async def test_what_is_shed_and_what_waits(swarm: Swarm, open_gateway: OpenGateway) -> None:
    swarm.state = EngineState.WEIGHT_SYNCING
    async with open_gateway(max_in_flight=1, max_queued=0) as http, asyncio.TaskGroup() as group:
        waits = group.create_task(ask(http))
        await swarm.until(lambda: swarm.claims)
        refused = await ask(http)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.headers["x-should-retry"] == "true"
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


async def test_requests_at_fault(open_gateway: OpenGateway, access: Lines) -> None:
    async with open_gateway(access_log=True) as http:
        # a path cannot begin a line
        await http.get("/v1/models/a%0Ab%1b")
        assert (await access.next())["message"].startswith("GET /v1/models/a%0Ab%1B 404 refused ")
        assert (await http.post(CHAT, content=b"{")).status_code == 400
        assert (await ask(http, model="other")).status_code == 404
        found = await scrape(http)
    assert found.of("errors_total", code="malformed_json") == 1
    assert found.of("errors_total", code="model_not_found") == 1
    assert found.of("requests_total", route="", policy="", outcome="refused") == 3
    assert "gateway_overhead_seconds_count" not in found.names()


async def test_an_engine_that_fails(swarm: Swarm, open_gateway: OpenGateway, access: Lines) -> None:
    go = asyncio.Event()
    swarm.answer = once(go, lambda *_: error(500, "it broke"))
    async with open_gateway(access_log=True, keepalive_seconds=0.01) as http:
        async with http.stream("POST", CHAT, json=BODY | {"stream": True}) as answer:
            parts = answer.aiter_bytes()
            assert (await anext(parts)).startswith(b":")
            go.set()
            assert b'"error"' in b"".join([part async for part in parts])
        broken = await access.next()
        await ask(http)
        refused = await access.next()
    said = [(line["status"], line["outcome"], line["error_code"]) for line in (broken, refused)]
    assert said == [(200, "broken", "engine_failed"), (502, "unavailable", "engine_failed")]


async def test_a_user_who_hangs_up(swarm: Swarm, open_gateway: OpenGateway, access: Lines) -> None:
    swarm.answer = hanging
    async with open_gateway(access_log=True) as http:
        asking = asyncio.create_task(ask(http))
        await swarm.until(lambda: swarm.sampling)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        line, found = await access.next(), await scrape(http)
    assert (line["status"], line["outcome"]) == (0, "disconnected")
    assert found.of("requests_total", **ROUTE, outcome="disconnected") == 1


async def test_a_defect_of_ours(open_gateway: OpenGateway, access: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.api.endpoint.caller_of", lambda scope: 1 / 0)
    async with open_gateway(access_log=True) as http:
        assert (await ask(http)).status_code == 500
        line = await access.next()
    assert (line["status"], line["outcome"]) == (500, "failed")


async def test_a_retry_that_joins_waits_and_is_not_ours_to_count(swarm: Swarm, gateway: Http) -> None:
    go, keyed = asyncio.Event(), {"idempotency-key": "k"}
    swarm.answer = once(go, by_number)
    one = asyncio.create_task(ask(gateway, keyed))
    await swarm.until(lambda: swarm.sampling)
    two = asyncio.create_task(ask(gateway, keyed))
    async with asyncio.timeout(30):
        while not (await scrape(gateway)).of("joined_total"):
            pass
    go.set()
    assert (await one).json() == (await two).json() and (await one).json()["choices"]
    found = await scrape(gateway)
    assert found.of("requests_total", route="default", policy="joined", outcome="ok") == 1
    assert found.of("phase_seconds_count", route="default", phase="join") == 1


async def test_the_rewards_of_the_latest_groups(open_gateway: OpenGateway) -> None:
    scoring = """
def on_compute_relative_reward(task, candidates, context):
    return [0.5] * 4 if task.main_query == "all alike" else [0.0, 0.0, 1.0, 1.0]
"""
    async with open_gateway(reward=scoring) as http:
        for asked in ("all alike", "one", "all alike", "two"):
            answer = await ask(http, messages=[{"role": "user", "content": asked}])
            assert answer.headers["x-swarm-trained"] == "true"
        found = await scrape(http)
    assert found.of("reward_mean", route="default") == 0.5
    assert found.of("reward_spread", route="default") == 0.25
    assert found.of("informative_group_share", route="default") == 0.5


async def test_what_was_long_ago_no_longer_counts() -> None:
    recent, alike = Recent(), GroupScore(rewards=[Reward(value=1.0)] * 2)
    for _ in range(RECENT_GROUPS):
        recent.add(GroupScore(rewards=[Reward(value=0.0), Reward(value=2.0)]))
    assert (recent.groups, recent.with_signal, recent.spread) == (RECENT_GROUPS, RECENT_GROUPS, RECENT_GROUPS)
    for _ in range(RECENT_GROUPS):
        recent.add(alike)
    assert (recent.groups, recent.with_signal, recent.reward, recent.spread) == (RECENT_GROUPS, 0, RECENT_GROUPS, 0)
    both = recent + Recent(groups=1, with_signal=1)
    assert (both.groups, both.with_signal) == (RECENT_GROUPS + 1, 1)


async def test_a_hook_that_fails(open_gateway: OpenGateway) -> None:
    failing = "def on_compute_relative_reward(task, candidates, context):\n    raise KeyError(task.main_query)\n"
    async with open_gateway(reward=failing) as http:
        assert (await ask(http)).status_code == 200
        found = await scrape(http)
    assert found.of("hook_failures_total", route="default", code="hook_raised") == 1
    assert "gateway_reward_mean" not in found.names(), "a value that nobody measured is absent"
    assert found.of("dropped_groups_total", route="default", reason="reward_hook_failed") == 1


async def test_a_server_that_is_down_says_since_when(open_gateway: OpenGateway) -> None:
    async with open_gateway(swarm_url="http://user:pass@127.0.0.1:9", offline_wait_seconds=0) as http:
        assert (await ask(http)).status_code == 503
        found = await scrape(http)
        (first,) = (await http.get("/status")).json()["swarms"]
        (later,) = (await http.get("/status")).json()["swarms"]
    assert found.of("swarm_up", swarm="http://127.0.0.1:9") == 0
    assert found.of("errors_total", code="server_unreachable") == 1
    assert first["down_since"] == later["down_since"] and first["down_since"].endswith("+00:00")


# ------------------------------------------------------------------ the page


async def test_a_key_is_asked_for_as_for_the_status(open_gateway: OpenGateway) -> None:
    async with open_gateway(api_keys=["sk-app"]) as http:
        assert (await http.get("/metrics")).status_code == 401
        assert (await http.get("/metrics", headers={"authorization": "Bearer sk-app"})).status_code == 200


async def test_series_do_not_grow_with_what_callers_say(gateway: Http) -> None:
    async def say(numbers: range) -> int:
        for number in numbers:
            await gateway.post(f"/v1/odd/{number}", json={"model": f"m{number}"})
            await gateway.get(f"/v1/models/m{number}")
        return len(await scrape(gateway))

    nothing, few = await say(range(0)), await say(range(5))
    assert await say(range(5, 20)) == few > nothing
