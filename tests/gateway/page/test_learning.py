"""Figures of a step, as the page draws them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from swarm.client import AsyncSwarmClient
from swarm.measures import EVAL_REWARD, REWARD, SPREAD, TASKS
from swarm.progress import DOING
from swarm.states import EngineState
from swarm.status import ServerStatus
from swarm.types import EvalResult, StepResult
from tests.gateway.conftest import OpenGateway
from tests.gateway.page.conftest import Site, site_before
from tests.standins.swarm import Swarm

pytestmark = pytest.mark.anyio


async def test_a_steps_mean_has_an_interval_that_counts_groups_and_not_answers(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = AsyncSwarmClient.status

    async def status(self: AsyncSwarmClient, **fields: object) -> ServerStatus:
        known = await real(self, episodes=0)
        measured = [
            {REWARD: 0.5, SPREAD: 0.2, TASKS: 16.0},
            {REWARD: 0.5, SPREAD: 0.2},
            {REWARD: 0.5, SPREAD: 0.2, TASKS: 1.0},
        ]
        return known.model_copy(
            update={
                "steps": [
                    StepResult(step=step, batch_id="b", metrics=metrics, seconds=1.0)
                    for step, metrics in enumerate(measured, 7)
                ]
            }
        )

    monkeypatch.setattr(AsyncSwarmClient, "status", status)
    [server] = (await (await site.visit("look")).get("/learning"))["servers"]
    assert [step["reward"] for step in server["steps"]] == [0.5] * 3
    assert server["learning"].startswith("not proven: reward")
    errors = [step["error"] for step in server["steps"]]
    assert errors == [pytest.approx(2.131 * 0.2 / math.sqrt(16), rel=1e-3), None, None]


@pytest.mark.parametrize("state", EngineState)
async def test_what_an_engine_without_a_step_does_is_said_in_words(
    site: Site, monkeypatch: pytest.MonkeyPatch, state: EngineState
) -> None:
    real = AsyncSwarmClient.status

    async def status(self: AsyncSwarmClient, **fields: object) -> ServerStatus:
        known = await real(self, episodes=0)
        return known.model_copy(update={"engine": known.engine.model_copy(update={"engine_status": state})})

    monkeypatch.setattr(AsyncSwarmClient, "status", status)
    [server] = (await (await site.visit("look")).get("/learning"))["servers"]
    assert (server["doing"], server["steps"]) == (DOING[state], [])


async def test_steps_of_weights_that_are_lost_are_not_drawn(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engine went back to the checkpoint of step 2, and did step 3 again."""
    real = AsyncSwarmClient.status

    async def status(self: AsyncSwarmClient, **fields: object) -> ServerStatus:
        known = await real(self, episodes=0)
        steps = [
            StepResult(step=step, batch_id=f"b{number}", metrics={REWARD: number / 10}, seconds=1.0)
            for number, step in enumerate((1, 2, 3, 4, 3))
        ]
        return known.model_copy(update={"steps": steps})

    monkeypatch.setattr(AsyncSwarmClient, "status", status)
    [server] = (await (await site.visit("look")).get("/learning"))["servers"]
    assert [(step["step"], step["reward"]) for step in server["steps"]] == [(1, 0.0), (2, 0.1), (3, 0.4)]


async def test_an_evaluation_that_goes_on_is_not_drawn(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    real = AsyncSwarmClient.status

    async def status(self: AsyncSwarmClient, **fields: object) -> ServerStatus:
        known = await real(self, episodes=0)
        evaluations = [
            EvalResult(step=step, episodes=episodes, metrics={EVAL_REWARD: reward})
            for step, episodes, reward in ((0, 50, 0.5), (10, 50, 0.6), (20, 1, 1.0))
        ]
        return known.model_copy(update={"evaluations": evaluations})

    monkeypatch.setattr(AsyncSwarmClient, "status", status)
    [server] = (await (await site.visit("look")).get("/learning"))["servers"]
    assert [(each["step"], each["reward"]) for each in server["evaluations"]] == [(0, 0.5), (10, 0.6)]


async def test_the_token_in_a_servers_address_is_shown_to_nobody(
    swarm: Swarm, open_gateway: OpenGateway, tmp_path: Path
) -> None:
    address = swarm.url.replace("http://", "http://x:token-of-the-swarm@")
    async with site_before(open_gateway, tmp_path, swarm_url=address) as site:
        told = await (await site.visit("look")).get("/learning")
    [server], [route] = told["servers"], told["routes"]
    assert server["url"] == route["server"] == swarm.url and not server["problem"]
