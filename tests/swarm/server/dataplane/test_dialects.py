"""The episode endpoint in other dialects, over a real socket."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from swarm.server.engine.requests import EpisodeRequests
from tests.standins.vllm import (
    plain,
    role_chunk,
    streamed,
    token_chunk,
    usage_chunk,
)
from tests.swarm.server.conftest import Claimed, Rig

pytestmark = pytest.mark.anyio


HI: Any = {"role": "user", "content": "hi"}


ASKS: dict[str, dict[str, Any]] = {
    "messages": {"messages": [HI], "max_tokens": 20},
    "responses": {"input": "hi"},
}


ENDS = {"messages": "message_delta", "responses": "response.completed"}


def request(episode: Claimed, path: str, **more: Any) -> httpx.Request:
    headers = {"x-api-key": episode.key}
    return episode.rig.client.build_request(
        "POST", f"{episode.base_url}/{path}", json=ASKS[path] | more, headers=headers
    )


@pytest.mark.parametrize("path", ASKS)
async def test_the_end_is_told_once_it_is_on_disk(
    rig: Rig, episode: Claimed, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.vllm.script.append(streamed(role_chunk(), token_chunk([5]), token_chunk([6], "stop"), usage_chunk(2)))
    on_disk: list[bool] = []
    synced = EpisodeRequests.synced

    async def watched(requests: EpisodeRequests) -> None:
        assert ENDS[path] not in told
        await synced(requests)
        on_disk.append(True)

    monkeypatch.setattr(EpisodeRequests, "synced", watched)
    told = ""
    response = await rig.client.send(request(episode, path, stream=True), stream=True)
    async for text in response.aiter_text():
        told += text
        assert on_disk or ENDS[path] not in told
    await response.aclose()
    assert f"event: {ENDS[path]}\ndata: " in told
    assert [call.response_ids for call in episode.calls] == [[5, 6]]
    assert response.headers["x-swarm-policy-version"] == "0"


@pytest.mark.parametrize("path", ASKS)
async def test_an_episode_that_is_over_takes_no_calls(rig: Rig, episode: Claimed, path: str) -> None:
    assert (await rig.client.send(request(episode, path))).status_code == 200
    await episode.end()
    response = await rig.client.send(request(episode, path))
    chat = await episode.chat()
    assert response.status_code == chat.status_code
    assert response.json()["error"]["message"] == chat.json()["error"]["message"]
    assert response.headers["x-should-retry"] == chat.headers["x-should-retry"]


@pytest.mark.parametrize("path", ASKS)
async def test_an_answer_that_makes_no_sense_is_not_trained(rig: Rig, episode: Claimed, path: str) -> None:
    call = {"type": "function", "function": {"arguments": "{}"}}
    rig.vllm.script.append(plain([5], message={"role": "assistant", "content": None, "tool_calls": [call]}))
    response = await rig.client.send(request(episode, path))
    assert response.status_code == 502
    assert "without a name" in response.json()["error"]["message"]
    assert rig.controller.pool.open(episode.uuid, episode.key).quarantine_reason
