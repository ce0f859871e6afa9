"""A stand-in swarm and gateways in front of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.app import create_app
from gateway.config.gateway import GatewayConfig
from swarm.http.serve import bind
from tests.standins.swarm import Swarm
from tests.standins.vllm import listening

#: Longer answers are better; the reward of k words is k / 10.
REWARD = """
def on_compute_relative_reward(task, candidates, context):
    return [len(candidate.text.split()) / 10 for candidate in candidates]
"""

OpenGateway = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


def write_hooks(folder: Path, reward: str = REWARD, submit: str | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "on_compute_relative_reward.py").write_text(reward)
    if submit is not None:
        (folder / "on_user_submit_new_requests.py").write_text(submit)
    return folder


@pytest.fixture
async def swarm() -> AsyncIterator[Swarm]:
    stand_in = Swarm()
    async with listening(stand_in.app) as url:
        stand_in.url = url
        yield stand_in


@pytest.fixture
def open_gateway(swarm: Swarm, tmp_path: Path) -> OpenGateway:
    """``async with open_gateway(**settings) as http``: a gateway on a socket and a client that talks to it."""

    @asynccontextmanager
    async def open_one(
        reward: str = REWARD, submit: str | None = None, **settings: Any
    ) -> AsyncIterator[httpx.AsyncClient]:
        hooks = write_hooks(tmp_path / "hooks", reward, submit)
        config = GatewayConfig(
            **{
                "swarm_url": swarm.url,
                "hooks": str(hooks),
                # tests read what became of the group in the answer's headers, and count claims
                "acknowledge_seconds": 5.0,
                **settings,
            }
        )
        async with (
            listening(create_app(config)) as url,
            httpx.AsyncClient(base_url=url, timeout=30, trust_env=False, verify=False) as http,
        ):
            yield http

    return open_one


@pytest.fixture
async def gateway(open_gateway: OpenGateway) -> AsyncIterator[httpx.AsyncClient]:
    async with open_gateway() as http:
        yield http


@pytest.fixture
def nobody() -> str:
    """An address where nobody listens."""
    with bind("127.0.0.1", 0) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"
