"""One route on the real swarm server, whose engine is a scripted vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from adapters.dialects import ChatDialect
from gateway.config.route import RouteSettings
from gateway.rollout.server import Swarm, Training
from gateway.stats import Stats
from gateway.types import Caller, Decided, Incoming, Live
from reward_hooks import Candidate, HookContext, HookRunner, Hooks
from swarm.job import TrainJob
from swarm.types import Task
from tests.swarm.server import conftest as server

overrides = server.overrides
pairs = server.rig
JOB = TrainJob(model="tiny", batch_size=2, num_repeat=4, max_response_length=100)


class Judge:
    """A hook that gives an answer of k characters the reward k, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[Candidate]] = []

    async def reward(self, task: Task, candidates: list[Candidate], context: HookContext) -> list[float]:
        self.asked.append(candidates)
        return [float(len(candidate.text)) for candidate in candidates]


OpenRoute = Callable[..., AbstractAsyncContextManager[Training]]


@pytest.fixture
def judge() -> Judge:
    return Judge()


@pytest.fixture
def rig(pairs: server.Rig) -> server.Rig:
    """A server whose groups are of four."""
    pairs.controller.offline("another job")
    pairs.controller.sync_job(JOB)
    pairs.controller.boot()
    pairs.controller.rollout_ready(server.ready(pairs.vllm_address))
    return pairs


@pytest.fixture
def open_route(rig: server.Rig, judge: Judge) -> OpenRoute:
    @asynccontextmanager
    async def open_one(**settings: Any) -> AsyncGenerator[Training]:
        given = RouteSettings.model_validate({"swarm_url": str(rig.client.base_url), "hooks": "judge"} | settings)
        async with Swarm(str(rig.client.base_url), "") as swarm:
            yield Training(swarm, HookRunner(Hooks(reward=judge.reward)), given, Stats())

    return open_one


def asking(**body: Any) -> Incoming:
    """A request with the fields of ``body``."""
    call = ChatDialect().parse({"messages": [{"role": "user", "content": "hi"}], **body})
    return Incoming(call, {}, Caller(), "/v1/chat/completions", b"", "req-1")


async def chunks_of(outcome: Live | Decided) -> list[dict[str, Any]]:
    """The whole stream; the outcome is closed."""
    whole = isinstance(outcome, Decided)
    said = list(outcome.chunks()) if whole else [chunk async for chunk in outcome.chunks]
    if outcome.close is not None:
        await outcome.close()
    return said


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    """What the deltas of one choice say."""
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


async def at_rest(rig: server.Rig, route: Training) -> None:
    """Return once no work is left behind and no episode runs."""
    await route.swarm.background.settle(20)
    async with asyncio.timeout(20):
        while rig.controller.pool.information().running_episodes:
            await rig.client.get("/health")
