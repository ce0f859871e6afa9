"""A server that goes and comes back, followed over a socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.tui.asking import Why
from gateway.tui.following import SwarmFollower
from gateway.tui.targets import make_targets
from swarm.server.config import ServerConfig
from swarm.server.run import serve
from swarm.states import EngineState
from swarm.types import StepResult
from tests.gateway.tui.conftest import DEADLINE, watching
from tests.swarm.server import conftest as server

pytestmark = pytest.mark.anyio

overrides = server.overrides
rig = server.rig


@asynccontextmanager
async def swarm_server(run_dir: Path, port: int = 0) -> AsyncGenerator[str]:
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve(ServerConfig(port=port, run_dir=run_dir), on_ready=url.set_result))
    try:
        await asyncio.wait({task, url}, return_when=asyncio.FIRST_COMPLETED)
        yield url.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_server_that_goes_is_told_and_shown_again_once_it_is_back(tmp_path: Path) -> None:
    async with swarm_server(tmp_path) as url:
        watch = watching([url])
        screen = await watch.__aenter__()
        try:
            await screen.shows("the swarm server answers", "○ OFFLINE")
        except BaseException:
            await watch.__aexit__(None, None, None)
            raise
    try:
        await screen.shows("the swarm server does not answer", "! AWAY", "what stands below is", "○ OFFLINE")
        await screen.says(f"no swarm server answers at {url}")
        await screen.until(lambda _: screen.app.followers[0].failures >= 3)
        async with swarm_server(tmp_path, int(url.rpartition(":")[2])):
            await screen.press("r")
            await screen.shows("the swarm server answers", "○ OFFLINE", "answers again, after")
            await screen.until(lambda text: "! AWAY" not in text)
    finally:
        await watch.__aexit__(None, None, None)


@asynccontextmanager
async def following(url: str, interval: float) -> AsyncGenerator[tuple[SwarmFollower, asyncio.Event]]:
    news = asyncio.Event()
    [target] = make_targets([url], [], [], [])
    follower = SwarmFollower(target, interval, news.set)
    task = asyncio.create_task(follower.run())
    try:
        yield follower, news
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_change_of_state_is_news_at_once_and_steps_are_asked_for_by_a_few(rig: server.Rig) -> None:
    asked: list[str] = []
    whole = rig.controller.status
    rig.controller.status = lambda steps: asked.append(str(steps)) or whole(steps)  # type: ignore[method-assign,func-returns-value]
    # a look a minute: what comes sooner came by the long poll
    async with following(str(rig.client.base_url), 50.0) as (follower, news), asyncio.timeout(DEADLINE):
        await news.wait()
        assert follower.status is not None and follower.age is not None and follower.trouble is None
        follower.hurry()
        await rig.eventually(lambda: len(asked) >= 1)
        news.clear()
        # the second question is under way before the change, or sees it as it comes
        rig.controller.offline("by the test")
        while follower.status.engine.engine_status is not EngineState.OFFLINE:
            await news.wait()
            news.clear()
            follower.hurry()
    assert asked[0] == "300" and set(asked[1:]) == {"5"}
    assert [line.text for line in follower.chronicle.lines][-1] == "engine: OFFLINE: by the test"


async def test_steps_done_while_somebody_watches_are_told(rig: server.Rig) -> None:
    async with following(str(rig.client.base_url), 0.2) as (follower, news), asyncio.timeout(DEADLINE):
        await news.wait()
        for reward in (0.0, 1.0):
            for task in ("one", "two"):
                episode = await rig.claim()
                await episode.chat()
                await episode.end(task, reward)
        batch = await rig.controller.next_batch()
        rig.controller.step_done(StepResult(step=1, batch_id=batch.batch_id, metrics={}, seconds=2.0))
        while not follower.history.steps:
            news.clear()
            await news.wait()
    assert "step    1  reward 0.500  2.0 s  2 tokens/answer" in [line.text for line in follower.chronicle.lines]


async def test_patience_with_one_that_is_not_there_grows_and_is_bounded(nobody: str) -> None:
    async with following(nobody, 0.2) as (follower, news), asyncio.timeout(DEADLINE):
        pauses: list[float] = []
        while follower.failures < 8:
            await news.wait()
            news.clear()
            pauses.append(follower.next_try)
            follower.hurry()
        assert follower.trouble is not None and follower.trouble.why is Why.AWAY
        assert follower.status is None and follower.age is None
    assert pauses[0] <= 0.5 < pauses[-1] <= 10.0
    assert len(follower.chronicle.lines) == 1, "the same trouble is told once"
