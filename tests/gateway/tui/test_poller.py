"""A server that goes and comes back, followed over a socket."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.stats import GatewayStatus
from gateway.tui.poller import FEW_STEPS, GatewayPoller, MonitorLog, StepHistory, SwarmPoller
from gateway.tui.targets import STEPS, Reason, make_targets
from swarm.states import EngineState
from swarm.status import LogEntry
from swarm.types import StepResult
from tests.gateway.tui.conftest import DEADLINE
from tests.standins.vllm import listening
from tests.swarm.server import conftest as server

pytestmark = pytest.mark.anyio

overrides = server.overrides
rig = server.rig


@asynccontextmanager
async def following(url: str, interval: float) -> AsyncGenerator[tuple[SwarmPoller, asyncio.Event]]:
    news = asyncio.Event()
    [target] = make_targets([url], None, [], None)
    poller = SwarmPoller(target, interval, news.set)
    task = asyncio.create_task(poller.run())
    try:
        yield poller, news
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_change_of_state_is_news_at_once_and_steps_are_asked_for_by_a_few(rig: server.Rig) -> None:
    asked: list[str] = []
    whole = rig.controller.status
    rig.controller.status = lambda steps: asked.append(str(steps)) or whole(steps)  # type: ignore[method-assign,func-returns-value]
    # a look a minute: what comes sooner came by the long poll
    async with following(str(rig.client.base_url), 50.0) as (poller, news), asyncio.timeout(DEADLINE):
        await news.wait()
        assert poller.status is not None and poller.age is not None and poller.trouble is None
        # the second question is under way before the change, or sees it as it comes
        rig.controller.offline("by the test")
        while poller.status.engine.engine_status is not EngineState.OFFLINE:
            news.clear()
            await news.wait()
    assert asked[0] == "300" and set(asked[1:]) == {"5"}
    assert [line.message for line in poller.log.lines][-1] == "engine: OFFLINE: by the test"


async def test_steps_done_while_somebody_watches_are_told(rig: server.Rig) -> None:
    async with following(str(rig.client.base_url), 0.2) as (poller, news), asyncio.timeout(DEADLINE):
        await news.wait()
        for reward in (0.0, 1.0):
            for task in ("one", "two"):
                episode = await rig.claim()
                await episode.chat()
                await episode.end(task, reward)
        batch = await rig.controller.next_batch()
        rig.controller.step_done(StepResult(step=1, batch_id=batch.batch_id, metrics={}, seconds=2.0))
        while not poller.history.steps:
            news.clear()
            await news.wait()
    assert "step    1  reward 0.500 ±0.500  2 of 2 groups differ  2.0 s  2 tokens/answer" in [
        line.message for line in poller.log.lines
    ]


async def test_a_gateways_log_has_what_its_hooks_and_its_reloads_failed_with() -> None:
    told = GatewayStatus(routes={}, hook_errors=Counter({"on_compute_relative_reward raised KeyError": 2}))

    async def status(request: Request) -> Response:
        return Response(told.model_dump_json(), media_type="application/json")

    news = asyncio.Event()
    async with listening(Starlette(routes=[Route("/status", status)])) as url, asyncio.timeout(DEADLINE):
        [target] = make_targets([], None, [url], None)
        poller = GatewayPoller(target, 0.2, news.set)
        task = asyncio.create_task(poller.run())
        await news.wait()
        told = told.model_copy(update={"reload_failures": 1, "reload_error": "unknown key 'x'"})
        while len(poller.log.lines) < 2:
            news.clear()
            await news.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert [line.message for line in poller.log.lines] == [
        "the hook fails, 2 x on_compute_relative_reward raised KeyError",
        "a reload failed, the configuration before stays: unknown key 'x'",
    ]


def test_what_fails_after_a_gateway_was_started_again_is_told() -> None:
    [target] = make_targets([], None, ["http://127.0.0.1:1"], None)
    poller = GatewayPoller(target, 1.0, lambda: None)
    before = GatewayStatus(routes={}, requests=9, errors=Counter(engine_offline=5))
    poller._take(before, None)  # pyright: ignore[reportPrivateUsage]
    after = GatewayStatus(routes={}, requests=3, errors=Counter(engine_offline=2), hook_errors=Counter(late=1))
    poller._take(after, before)  # pyright: ignore[reportPrivateUsage]
    assert [line.message for line in poller.log.lines] == [
        "the gateway restarted: its counts begin at 0",
        "2 callers got the error engine_offline",
        "the hook fails, 1 x late",
    ]


async def test_one_that_is_not_there_is_asked_again_after_pauses(nobody: str) -> None:
    async with following(nobody, 0.2) as (poller, news), asyncio.timeout(DEADLINE):
        while poller.failures < 3:
            await news.wait()
            news.clear()
            assert poller.next_try <= 0.5 * 2 ** (poller.failures - 1)
        assert poller.trouble is not None and poller.trouble.reason is Reason.AWAY
        assert poller.status is None and poller.age is None
    assert len(poller.log.lines) == 1, "the same trouble is told once"


def step(number: int, run: str = "a") -> StepResult:
    return StepResult(step=number, batch_id=f"{run}{number}", metrics={}, seconds=1.0)


def test_steps_are_asked_for_in_full_once() -> None:
    history = StepHistory()
    assert history.wanted == STEPS
    assert history.add([step(1), step(2)]) == [step(1), step(2)]
    assert history.wanted == FEW_STEPS
    assert history.add([step(2), step(3)]) == [step(3)]
    assert history.steps == [step(1), step(2), step(3)]


def test_steps_that_do_not_join_are_of_another_run_or_were_missed() -> None:
    history = StepHistory()
    history.add([step(1)])
    history.add([step(1, "b")])
    assert history.steps == [step(1, "b")] and history.wanted == STEPS
    history.add([])
    assert history.steps == []


def test_after_an_absence_all_are_asked_for_again() -> None:
    history = StepHistory()
    history.add([step(1)])
    history.forget()
    assert history.wanted == STEPS and history.steps == [step(1)]


@given(st.lists(st.integers(1, 2 * FEW_STEPS), min_size=1, max_size=30))
def test_what_is_known_is_what_the_server_has(growths: list[int]) -> None:
    history, server = StepHistory(), list[StepResult]()
    for growth in growths:
        server += [step(len(server) + number) for number in range(1, growth + 1)]
        # looks again at once where it missed some, as the follower does at its next look
        for _ in range(2):
            history.add(server[-history.wanted :])
    assert history.steps == server[-STEPS:]


def test_a_pushed_line_is_kept_once_and_longer_than_by_the_server() -> None:
    log = MonitorLog()
    one, two = LogEntry(timestamp=1.0, message="one"), LogEntry(timestamp=3.0, tag="vllm", message="two")
    for entries in ([one, one], [one, two], [two], []):
        log.add(entries)
    log.note("a step of now")
    assert [(line.tag, line.message) for line in log.lines] == [("log", "one"), ("vllm", "two"), ("", "a step of now")]
