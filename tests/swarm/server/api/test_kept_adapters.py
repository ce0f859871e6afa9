"""A kept version answers at its own address, beside the newest, or nobody does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swarm.job import LoraSettings
from swarm.kept_adapters import adapter_folder, kept_model, kept_version
from tests.standins.vllm import ENGINE_MODEL, status
from tests.swarm.server.conftest import JOB, Rig, ready

pytestmark = pytest.mark.anyio

PATHS = ["/v1/chat/completions", "/v1/completions"]
BODY: dict[str, Any] = {"model": "whatever#kept-9", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def lora(rig: Rig, tmp_path: Path) -> Rig:
    """Version 3 of its job is kept, and version 7 the newest."""
    rig.controller.offline("stopped")
    rig.controller.sync_job(JOB.model_copy(update={"lora": LoraSettings(rank=4)}))
    rig.controller.boot()
    rig.controller.rollout_ready(ready(rig.vllm_address, 7))
    folder = adapter_folder(tmp_path, 3)
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").touch()
    return rig


def body(path: str, **more: Any) -> dict[str, Any]:
    return (BODY if "chat" in path else {"model": BODY["model"], "prompt": "hi"}) | more


def test_a_name_says_which_version_is_asked_for() -> None:
    assert kept_version(kept_model("/models/a#kept-2", 12)) == 12
    assert [kept_version(name) for name in (None, "", "tiny", "tiny#kept-", "tiny#kept-x", "tiny@3")] == [None] * 6


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("version", [3, 0])
async def test_a_kept_version_is_asked_for_by_its_address(lora: Rig, path: str, version: int) -> None:
    if path == "/v1/completions":
        lora.vllm.script.append(status(200, {"model": "x", "choices": [{"text": "a", "finish_reason": "stop"}]}))
    response = await lora.client.post(f"/kept/{version}{path}", json=body(path))
    assert response.status_code == 200, response.text
    assert response.headers["x-swarm-policy-version"] == str(version) and response.json()["model"] == "tiny"
    [(asked, sent)] = lora.vllm.requests
    assert (asked, sent["model"]) == (path, kept_model(ENGINE_MODEL, version))


async def test_the_models_of_a_version_are_listed_once_vllm_has_it(lora: Rig) -> None:
    lora.vllm.script += [status(200, {"tokens": [1]}), status(404, {"error": {"message": "no tensors"}})]
    assert (await lora.client.get("/kept/3/v1/models")).json()["data"][0]["id"] == "tiny"
    [(asked, sent)] = lora.vllm.requests
    assert (asked, sent["model"]) == ("/tokenize", kept_model(ENGINE_MODEL, 3))
    for version in (3, 4):
        response = await lora.client.get(f"/kept/{version}/v1/models")
        assert (response.status_code, response.json()["error"]["code"]) == (503, "version_not_kept")


@pytest.mark.parametrize("path", PATHS)
async def test_no_user_chooses_a_version(lora: Rig, path: str) -> None:
    await lora.client.post(path, json=body(path))
    episode = await lora.claim()
    await episode.chat(model="whatever#kept-9")
    assert {sent["model"] for _, sent in lora.vllm.requests} == {ENGINE_MODEL}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_version_that_is_not_there_is_answered_by_nobody(lora: Rig, path: str, stream: bool) -> None:
    response = await lora.client.post(f"/kept/4{path}", json=body(path, stream=stream))
    assert (response.status_code, response.json()["error"]["code"]) == (503, "version_not_kept")
    assert response.headers["retry-after"] and not lora.vllm.requests
    lora.vllm.script.append(status(404, {"error": {"message": "it cannot be loaded: no tensors", "code": 404}}))
    response = await lora.client.post(f"/kept/3{path}", json=body(path, stream=stream))
    assert (response.status_code, response.json()["error"]["code"]) == (503, "version_not_kept")
    assert "version 3 does not answer: it cannot be loaded: no tensors" in response.json()["error"]["message"]
    assert response.headers["retry-after"] and len(lora.vllm.requests) == 1
    # all that vLLM holds still answer: soon one of them does not
    lora.vllm.script.append(status(409, {"error": {"message": "no room", "code": 409}}))
    response = await lora.client.post(f"/kept/3{path}", json=body(path, stream=stream))
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_busy")


async def test_without_an_engine_a_kept_version_is_away(lora: Rig) -> None:
    lora.controller.offline("stopped")
    response = await lora.client.post("/kept/3/v1/chat/completions", json=BODY)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_offline")


@pytest.mark.parametrize("version", ["x", "-1", "1" * 12, "²"])
async def test_what_is_no_version_is_not_found(lora: Rig, version: str) -> None:
    assert (await lora.client.post(f"/kept/{version}/v1/chat/completions", json=BODY)).status_code == 404


async def test_an_engine_that_trains_all_weights_has_one_version(rig: Rig) -> None:
    response = await rig.client.post("/kept/0/v1/chat/completions", json=BODY)
    assert response.status_code == 404 and "trains all weights" in response.json()["error"]["message"]
