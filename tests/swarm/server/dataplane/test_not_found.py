"""Addresses below an episode's or a group's that do not exist: what is said instead."""

from __future__ import annotations

import pytest

from tests.swarm.server.conftest import Rig

pytestmark = pytest.mark.anyio


CASES = [
    ("POST", "/episodes/e/v1/messages/count_tokens", 404, "POST /tokenize"),
    ("POST", "/episodes/e/v1/responses/input_tokens", 404, "POST /tokenize"),
    ("POST", "/episodes/e/v1/v1/messages", 404, "without its last part"),
    ("POST", "/episodes/e/v1/embeddings", 404, "there are v1/chat/completions, v1/completions, v1/messages"),
    ("POST", "/episodes/e", 404, "there are v1/chat/completions"),
    ("GET", "/episodes/e/v1/chat/completions", 405, "use POST"),
    ("POST", "/episodes/e/v1/models", 405, "use GET"),
    ("POST", "/groups/g/v1/messages", 404, "use the addresses of its episodes"),
    ("POST", "/groups/g/v1/other", 404, "there are v1/chat/completions, v1/models"),
]


async def test_what_is_not_there(rig: Rig) -> None:
    for method, path, status, said in CASES:
        answer = await rig.client.request(method, path, json={})
        assert answer.status_code == status, path
        body = answer.json()
        assert said in body["error"]["message"], path
        # Anthropic's SDK knows its own errors only
        assert (body.get("type") == "error") == ("messages" in path)
        assert "code" in body["error"] or "messages" in path
        assert answer.headers["x-should-retry"] == "false"
        assert answer.headers.get("allow") == (said.removeprefix("use ") if status == 405 else None)
