"""A stand-in swarm and gateways in front of it."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp

from gateway.app import create_app
from gateway.config.gateway import GatewayConfig
from tests.standins.swarm import Swarm
from tests.standins.upstream import Upstream
from tests.standins.vllm import listening

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
#: Longer answers are better; the reward of k words is k / 10.
REWARD = """
def on_compute_relative_reward(task, candidates, context):
    return [len(candidate.text.split()) / 10 for candidate in candidates]
"""

Http = httpx.AsyncClient
OpenGateway = Callable[..., AbstractAsyncContextManager[Http]]


def write_hooks(folder: Path, reward: str = REWARD, submit: str | None = None, session_end: str | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "on_compute_relative_reward.py").write_text(reward)
    if submit is not None:
        (folder / "on_user_submit_new_requests.py").write_text(submit)
    if session_end is not None:
        (folder / "on_session_end.py").write_text(session_end)
    return folder


@asynccontextmanager
async def serving(app: ASGIApp) -> AsyncIterator[httpx.AsyncClient]:
    """``app`` on a socket, and a client that talks to it."""
    async with (
        listening(app) as url,
        httpx.AsyncClient(base_url=url, timeout=60, trust_env=False, verify=False) as http,
    ):
        yield http


async def ask(http: httpx.AsyncClient, headers: Mapping[str, str] | None = None, **fields: Any) -> httpx.Response:
    """A chat with ``fields``."""
    return await http.post(CHAT, json=BODY | fields, headers=headers)


@pytest.fixture
async def swarm() -> AsyncIterator[Swarm]:
    stand_in = Swarm()
    async with listening(stand_in.app) as url:
        stand_in.url = url
        yield stand_in


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    stand_in = Upstream()
    async with listening(stand_in.app) as url:
        stand_in.url = f"{url}/v1"
        yield stand_in


@asynccontextmanager
async def gateway_before(
    swarm_url: str,
    folder: Path,
    reward: str = REWARD,
    submit: str | None = None,
    session_end: str | None = None,
    **settings: Any,
) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway on a socket, with its hooks in ``folder``, and a client that talks to it."""
    hooks = str(write_hooks(folder / "hooks", reward, submit, session_end))
    # tests read what became of the group in the answer's headers, and count claims
    config = {"swarm_url": swarm_url, "hooks": hooks, "acknowledge_seconds": 5.0, **settings}
    async with serving(create_app(GatewayConfig.model_validate(config))) as http:
        yield http


@pytest.fixture
def open_gateway(swarm: Swarm, tmp_path: Path) -> OpenGateway:
    """``async with open_gateway(**settings) as http``: a gateway before ``swarm``."""
    return lambda **settings: gateway_before(**{"swarm_url": swarm.url, "folder": tmp_path, **settings})


@pytest.fixture
async def gateway(open_gateway: OpenGateway) -> AsyncIterator[httpx.AsyncClient]:
    async with open_gateway() as http:
        yield http


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address where nobody listens, and nobody else will."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"
