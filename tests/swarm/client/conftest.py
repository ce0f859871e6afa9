"""A scripted server per test, and a policy that is quick."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from swarm.client import RetryPolicy, SwarmClient
from tests.swarm.client.scripted import ScriptedServer

QUICK = RetryPolicy(attempts=5, base=0.002, cap=0.01, total=20.0)


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SWARM_TOKEN", raising=False)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[SwarmClient]:
    with SwarmClient(server.url, client_uuid="me", policy=QUICK, begin_timeout=5.0, boot_timeout=5.0) as client:
        yield client
