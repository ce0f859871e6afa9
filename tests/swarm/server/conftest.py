"""A server whose engine is a scripted vLLM: rolling, without an engine process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio.lowlevel
import httpx
import pytest
from starlette.applications import Starlette

from swarm.job import TrainJob
from swarm.link.messages import RolloutReady
from swarm.server.app import create_app
from swarm.server.config import ServerConfig
from swarm.server.engine.controller import Controller
from swarm.tokens import as_lists
from tests.standins.vllm import ENGINE_MODEL, ScriptedVllm
from tests.standins.vllm import listening as serving

JOB = TrainJob(model="tiny", batch_size=2, num_repeat=2, max_response_length=100, temperature=0.9)


def ready(address: str, version: int = 0, last_batch: str = "") -> RolloutReady:
    return RolloutReady(
        addresses=[address],
        model=ENGINE_MODEL,
        policy_version=version,
        next_step=version + 1,
        last_batch=last_batch,
    )


@dataclass
class Rig:
    """A swarm server over a real socket with a scripted vLLM behind it."""

    app: Starlette
    vllm: ScriptedVllm
    vllm_address: str
    client: httpx.AsyncClient

    @property
    def controller(self) -> Controller:
        return self.app.state.controller

    async def eventually(self, condition: Callable[[], bool]) -> None:
        """Give way to the server until ``condition`` holds."""
        async with asyncio.timeout(60):
            while not condition():
                await anyio.lowlevel.checkpoint()

    async def post(self, path: str, **body: Any) -> dict[str, Any]:
        response = await self.client.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    async def claim(self, client: str = "me", **more: Any) -> Claimed:
        answer = await self.post("/claim_episode", client_uuid=client, **more)
        assert answer["success"], answer
        return Claimed(self, answer["episode_uuid"], answer["openai_base_url"], answer["openai_api_key"], client)


@dataclass
class Claimed:
    """One claimed episode."""

    rig: Rig
    uuid: str
    base_url: str
    key: str
    client: str

    def request(self, **body: Any) -> httpx.Request:
        return self.rig.client.build_request(
            "POST",
            f"{self.base_url}/chat/completions",
            json={"messages": [{"role": "user", "content": "hi"}]} | body,
            headers={"authorization": f"Bearer {self.key}"},
        )

    async def chat(self, **body: Any) -> httpx.Response:
        return await self.rig.client.send(self.request(**body))

    async def end(self, task: str = "task", reward: float = 1.0) -> dict[str, Any]:
        return await self.rig.post(
            "/end_episode",
            client_uuid=self.client,
            episode_uuid=self.uuid,
            task_id=task,
            workflow_output={"reward": reward},
        )

    @property
    def calls(self) -> list[Any]:
        """What the pool has recorded for it, with lists for arrays."""
        recorded = self.rig.controller.pool.open(self.uuid, self.key).calls
        return [SimpleNamespace(**as_lists(call)) for call in recorded]


@pytest.fixture
def overrides() -> dict[str, Any]:
    """Fields of the server's configuration; a test parametrizes this."""
    return {}


@pytest.fixture
async def rig(tmp_path: Path, overrides: dict[str, Any]) -> AsyncGenerator[Rig]:
    vllm = ScriptedVllm()
    app = create_app(ServerConfig(run_dir=tmp_path, **{"post_rolling_timeout": 5.0} | overrides))
    async with serving(vllm.app) as vllm_url, serving(app) as url:
        address = vllm_url.removeprefix("http://")
        async with httpx.AsyncClient(base_url=url, timeout=20, trust_env=False, verify=False) as client:
            # answered once the lifespan has begun
            await client.get("/health")
            controller: Controller = app.state.controller
            controller.sync_job(JOB)
            controller.boot()
            controller.rollout_ready(ready(address))
            yield Rig(app, vllm, address, client)


@pytest.fixture
async def episode(rig: Rig) -> Claimed:
    return await rig.claim()
