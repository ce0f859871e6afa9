"""A gateway whose reward is a judge that asks the very model in training, at the swarm server that a test runs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx

from gateway.app import create_app
from gateway.config.gateway import GatewayConfig
from tests.standins.vllm import listening

#: what a random model is held to: a verdict without a choice of its own between white space and words
VERDICT = r'\{"scores":\[\{"criterion":"quality","score":[0-9]\}\]\}'
#: tokens of a verdict
VERDICT_TOKENS = 64

REWARD = '''
import asyncio

import httpx

from reward_hooks import Reward
from reward_hooks.judges.pointwise import Pointwise

SWARM, HELD = {swarm!r}, {held}
judge = Pointwise(
    explain=False,
    max_tokens={tokens},
    endpoint={{
        "base_url": SWARM + "/v1",
        "attempts": 10,
        "extra_body": {{"response_format": {{"type": "text"}}, "structured_outputs": {{"regex": {verdict!r}}}}},
    }},
)
both_sampled, both_looked = asyncio.Barrier(2), asyncio.Barrier(2)
groups = 0


async def on_compute_relative_reward(task, candidates, context):
    """Judges when two groups are sampled, which hold every slot that the job has until they are judged."""
    global groups
    groups += 1
    if groups <= 2:
        await both_sampled.wait()
        async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
            pool = (await http.get(SWARM + "/status")).json()["pool"]
        await both_looked.wait()
        assert pool["running_episodes"] >= HELD, pool
    rewards = await judge.on_compute_relative_reward(task, candidates, context)
    calls = {{"calls": judge.client.spent.calls}}
    return [Reward(value=one.value, components=one.components | calls) for one in rewards]
'''


def judged_by_itself(
    swarm_url: str, folder: Path, body: dict[str, Any], slots: int, seconds: float
) -> tuple[dict[str, Any], int]:
    """Ask for four groups at once, twice as many as there are slots for.

    Returns:
        the gateway's counts once all are settled, and how many requests were answered once because a step was computed
        and enough episodes for the next one waited or ran.

    Raises:
        AssertionError: one of the four users got no answer.
        TimeoutError: they wait for each other.
    """

    async def run() -> tuple[dict[str, Any], int]:
        # a group that is not needed is not judged, so that the counts of the judge are those of groups that train
        config = GatewayConfig(
            swarm_url=swarm_url,
            hooks=str(folder),
            claim_wait_seconds=seconds,
            hook_timeout_seconds=60,
            when_batch_waits="single",
        )
        async with (
            asyncio.timeout(seconds),
            listening(create_app(config)) as url,
            httpx.AsyncClient(base_url=url, timeout=seconds, trust_env=False) as http,
        ):
            users = await asyncio.gather(*(http.post("/v1/chat/completions", json=body) for _ in range(4)))
            assert [one.status_code for one in users] == [200] * 4, [one.text for one in users]
            while (counts := (await http.get("/status")).json())["background"]:
                pass
            return counts, [one.headers.get("x-swarm-drop-reason") for one in users].count("batch_waits")

    folder.mkdir()
    text = REWARD.format(swarm=swarm_url, held=slots, tokens=VERDICT_TOKENS, verdict=VERDICT)
    (folder / "on_compute_relative_reward.py").write_text(text)
    return asyncio.run(run())


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
