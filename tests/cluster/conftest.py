"""Two Ray nodes with a token, as an operator would start them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.ray_nodes import RayNode


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RayNode]]:
    """The head, and another node; engines that are started meanwhile find them."""
    token = tmp_path / "auth_token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    # else the head asks for the token of earlier local clusters, if there is one, and nobody else brings it
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    with RayNode("127.0.0.2") as head, RayNode("127.0.0.3", head.head) as other:
        monkeypatch.setenv("RAY_ADDRESS", head.head)
        yield [head, other]
