"""The tutorial's judge that is the model itself: gateway, swarm server, and an engine that answers and judges."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from starlette.responses import JSONResponse, Response

from gateway.app import create_app
from gateway.config.gateway import GatewayConfig
from tests.standins.vllm import listening, plain_choice, several
from tests.swarm.server import conftest as server

FOLDER = Path(__file__).parents[2] / "tutorial" / "opencode_build_concise_agent"
TEXTS = ["A default is made once, and shared after that.", "Defaults are made once, when the function is defined."]

overrides = server.overrides
rig = server.rig


def engine(judged: list[dict[str, Any]]) -> Any:
    """Samples ``TEXTS``, and as a judge prefers the one that tells when."""

    def reply(body: dict[str, Any]) -> Response:
        if "response_format" not in body:
            choices = [
                plain_choice([1, 2], index=index, message={"role": "assistant", "content": text})
                for index, text in enumerate(TEXTS)
            ]
            answer = several(*choices)(body)
            assert isinstance(answer, JSONResponse)
            return answer
        judged.append(body)
        asked = body["messages"][-1]["content"]
        verdict = "A" if asked.index(TEXTS[1]) < asked.index(TEXTS[0]) else "B"
        message = {"role": "assistant", "content": json.dumps({"verdict": verdict})}
        answer = several(plain_choice([1], message=message))(body)
        assert isinstance(answer, JSONResponse)
        return answer

    return reply


@pytest.mark.anyio
async def test_the_served_model_judges_its_own_answers_and_learns_only_from_those(
    rig: server.Rig, tmp_path: Path
) -> None:
    judged: list[dict[str, Any]] = []
    rig.vllm.default = engine(judged)
    blend = yaml.safe_load((FOLDER / "self_judge.yaml").read_text())
    gate, judge = blend["parts"]
    assert judge["options"]["endpoint"]["base_url"].endswith(":10086/v1")
    judge["options"]["endpoint"]["base_url"] = f"{rig.client.base_url}/v1".replace("//v1", "/v1")
    (tmp_path / "hooks.yaml").write_text(yaml.safe_dump({"parts": [gate, judge]}))
    config = GatewayConfig(swarm_url=str(rig.client.base_url), hooks=str(tmp_path / "hooks.yaml"))
    async with (
        listening(create_app(config)) as url,
        httpx.AsyncClient(base_url=url, timeout=120, trust_env=False, verify=False) as http,
    ):
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Why are default values shared?"}]}
        response = await http.post("/v1/chat/completions", json=body)
    assert response.json()["choices"][0]["message"]["content"] == TEXTS[1]
    assert len(judged) == 2  # the one pair, in both orders
    information = rig.controller.pool.information()
    assert (information.completed_tasks, information.completed_episodes) == (1, 2)
