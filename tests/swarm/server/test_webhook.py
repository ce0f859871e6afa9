"""The webhook: told of each move and each wait for a person, once, and in nobody's way."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from swarm.evidence.alarms import Alarm
from swarm.evidence.stages import ServingStage, StageRules
from swarm.protocol import FollowedRoute, PolicyStatus
from swarm.server.webhook import Webhook
from tests.standins.vllm import listening
from tests.swarm.server import conftest as server
from tests.swarm.server.conftest import Rig
from tests.swarm.server.episodes.test_comparisons import pair

pytestmark = pytest.mark.anyio

rig = server.rig
RULES = StageRules(num_repeat=2)


class Told:
    """Who is told; it fails as often as ``failures`` says."""

    def __init__(self) -> None:
        self.got: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.failures = 0
        self.url = ""

    async def take(self, request: Request) -> Response:
        if self.failures:
            self.failures -= 1
            return JSONResponse({}, 503)
        self.got.put_nowait(await request.json())
        return JSONResponse({})

    async def next(self) -> dict[str, Any]:
        return await asyncio.wait_for(self.got.get(), 60)


@pytest.fixture
async def told() -> AsyncGenerator[Told]:
    told = Told()
    async with listening(Starlette(routes=[Route("/hook", told.take, methods=["POST"])])) as url:
        told.url = f"{url}/hook"
        yield told


@pytest.fixture
def overrides(told: Told, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    for name in ("_LOOK", "_FIRST_PAUSE", "_LONGEST_PAUSE"):
        monkeypatch.setattr(f"swarm.server.webhook.{name}", 0.01)
    return {"webhook": told.url}


async def test_who_is_asked_hears_of_each_move_and_of_what_waits_for_him(rig: Rig, told: Told) -> None:
    episodes = rig.controller.episodes
    await episodes.follow_stages([FollowedRoute(route="chat", incumbent="gpt", rules=RULES)], None, 0.0)
    stages = rig.controller.pool.stages.pointers
    stage = stages["chat", "gpt"]
    for number in range(200):
        of: dict[str, Any] = {
            "ours": 0.9,
            "theirs": 0.1,
            "challenger": stage.challenger,
            "stage": "shadow",
            "model": "tiny",
        }
        await episodes.record_pair(pair(f"g{number}", **of))
    waits = await told.next()
    assert (waits["event"], waits["policy"]["waits"]) == ("waits", "promote")
    # it looks while pairs still come: "not worse" is proven before "better"
    assert "waits for a person (promote): " in waits["text"] and "0.80" in waits["text"]
    told.failures = 2
    moved = await rig.client.post("/policies/promote", json={"reason": "read 50 of both", "share": 0.05})
    assert moved.status_code == 200
    up = await told.next()
    assert (up["event"], up["policy"]["stage"]["share"]) == ("moved", 0.05)
    assert up["text"].endswith("canary 0.05, by anonymous: read 50 of both")
    await rig.client.post("/policies/rollback", json={"reason": "users complain"})
    heard = [await told.next(), await told.next()]
    assert [one["event"] for one in heard] == ["moved", "waits"]
    assert told.got.empty()


@pytest.mark.usefixtures("overrides")
async def test_what_cannot_be_told_is_in_the_log_without_the_address(
    told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    told.failures = 4
    stage = ServingStage.begun("chat", "gpt", RULES, 0.0, "")
    now = [stage]

    def policies() -> list[PolicyStatus]:
        # it moves between two looks, and again once the first move could not be told
        seen = now[0]
        if seen.share == 0:
            now[0] = stage.moved(0.05, 1.0, "ann", "first")
        elif not told.failures:
            now[0] = stage.moved(0.25, 2.0, "ann", "second")
        return [PolicyStatus(stage=seen, verdict=None)]

    running = asyncio.create_task(Webhook(told.url, policies, list).run())
    assert (await told.next())["policy"]["stage"]["share"] == 0.25
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    [line] = [record.getMessage() for record in caplog.records if record.name == "swarm.server.webhook"]
    assert line.endswith("was not told that route chat moved: HTTP 503") and "/hook" not in line


@pytest.mark.usefixtures("overrides")
async def test_an_address_where_nobody_takes_a_connection_or_that_cannot_be_is_not_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("swarm.http.client.CONNECT_SECONDS", 0.05)
    monkeypatch.setattr("swarm.server.webhook._TRIES", 1)
    stage = ServingStage.begun("chat", "gpt", RULES, 0.0, "")
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.socket() as first, socket.socket() as second:
        for taken in (first, second):
            taken.setblocking(False)
            taken.connect_ex(full.getsockname())
        for address in (f"http://127.0.0.1:{full.getsockname()[1]}/T0/key", "http://127.0.0.1:99999/T0/key"):
            looks = iter((False, True))
            told = asyncio.Event()

            def policies(looks: Iterator[bool] = looks, told: asyncio.Event = told) -> list[PolicyStatus]:
                if next(looks, True):
                    told.set()
                return [PolicyStatus(stage=stage, verdict=None, waits="promote")]

            running = asyncio.create_task(Webhook(address, policies, list).run())
            await asyncio.wait_for(told.wait(), 60)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            [line] = caplog.messages
            assert "was not told that route chat waits" in line and "T0" not in line and "key" not in line
            caplog.clear()


@pytest.mark.usefixtures("overrides")
async def test_an_alarm_that_is_over_says_so_and_asks_nobody(told: Told) -> None:
    alarm = Alarm(kind="signal", text="nothing was learned", since=4, action="pause", pauses=True)
    looks = iter([[alarm]])
    running = asyncio.create_task(Webhook(told.url, list, lambda: next(looks, [])).run())
    begun, over = await told.next(), await told.next()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert (begun["event"], begun["text"]) == ("alarm", alarm.sentence)
    assert (over["event"], over["text"]) == ("alarm_over", "over: signal, since step 4: nothing was learned")
    assert (over["alarm"]["kind"], over["alarm"]["pauses"]) == ("signal", False)
