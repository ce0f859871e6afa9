"""Groups as the page keeps them beside the requests: what comes late, what fails, and what is forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response

from gateway.page.kept_groups import KeptGroups
from tests.gateway.conftest import OpenGateway, ask
from tests.standins.swarm import Swarm, by_number, made, said

pytestmark = pytest.mark.anyio

#: Waits for a third answer before it judges two; the later call waits for nothing.
SLOW = """
import asyncio, pathlib
async def on_compute_relative_reward(task, candidates, context):
    folder = pathlib.Path(__file__).parent
    (folder / "asked").touch()
    while not (folder / "go").exists():
        await asyncio.sleep(0.001)
    return [float(candidate.index) for candidate in candidates]
"""


def held(swarm: Swarm, last: Callable[[], Response] = lambda: said("a b c d e")) -> asyncio.Event:
    """Holds the last answer of the group back, until the event is set."""
    go = asyncio.Event()

    async def answer(body: dict[str, Any], number: int) -> Response:
        if number < 3:
            return await made(by_number(body, number))
        await go.wait()
        return last()

    swarm.answer, swarm.grouped = answer, False
    return go


async def test_an_answer_that_comes_while_the_hook_judges_fails_no_request(
    open_gateway: OpenGateway, swarm: Swarm, tmp_path: Path
) -> None:
    go, hooks = held(swarm), tmp_path / "hooks"
    async with open_gateway(ui={}, reward=SLOW, quorum=3, acknowledge_seconds=0.0) as http:
        asking = asyncio.create_task(ask(http))
        async with asyncio.timeout(20):
            while not (hooks / "asked").exists():
                await http.get("/health")
            go.set()
            await swarm.until(lambda: swarm.sampling == 0)
            # the gateway reads the answer before it answers this
            await http.get("/status")
            (hooks / "go").touch()
            answer = await asking
            assert answer.status_code == 200, answer.text
            while len((await http.get("/ui/api/groups")).json()["groups"][0]["rewards"]) < 4:
                pass


async def test_a_page_that_fails_harms_no_request(
    open_gateway: OpenGateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    for name in ("judged", "settling", "over"):
        monkeypatch.setattr(KeptGroups, name, fail)
    async with open_gateway(ui={}) as http:
        answer = await ask(http)
        assert (answer.status_code, answer.headers["x-swarm-trained"]) == (200, "true")
    assert "what watches the groups has failed" in caplog.text


async def test_a_late_private_answer_takes_its_group_off_the_page(open_gateway: OpenGateway, swarm: Swarm) -> None:
    go = held(swarm, lambda: said("write to anna.schmidt@example.org"))
    async with open_gateway(ui={}, quorum=3, acknowledge_seconds=0.0, data={"redact": "group"}) as http:
        assert (await ask(http)).status_code == 200
        assert len((await http.get("/ui/api/groups")).json()["groups"]) == 1
        async with http.stream("GET", "/ui/api/events") as stream:
            parts = stream.aiter_text()
            go.set()
            async with asyncio.timeout(20):
                while "event: reset" not in await anext(parts):
                    pass
        assert (await http.get("/ui/api/groups")).json()["groups"] == []
