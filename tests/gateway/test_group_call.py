"""Groups sampled in one call: when, what comes of it, and when not."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.rollout.sampling import Sampler
from swarm.client import EpisodeEndpoint, EpisodeGroup
from swarm.errors import UpstreamError
from swarm.http.client import HttpClient
from swarm.job import TrainJob
from tests.gateway.conftest import OpenGateway
from tests.standins.swarm import MODEL, Swarm, completion, error
from tests.standins.vllm import listening

pytestmark = pytest.mark.anyio

BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
CHAT = "/v1/chat/completions"
VARIES = """
def on_user_submit_new_requests(request, context):
    return [{**request.body, "seed": k // 2} for k in range(context.num_repeat)]
"""


async def test_each_answer_keeps_its_own_usage_and_fields(swarm: Swarm, gateway: httpx.AsyncClient) -> None:
    async def answer(body: dict[str, Any], number: int) -> Response:
        one = completion("word " * number, tokens=10 + number)
        one["choices"][0] |= {"stop_reason": number, "logprobs": {"content": [{"token": str(number)}]}}
        return JSONResponse(one)

    swarm.answer = answer
    body = (await gateway.post(CHAT, json={**BODY, "n": 2, "logprobs": True})).json()
    assert swarm.calls == [4]
    assert [choice["stop_reason"] for choice in body["choices"]] == [3, 2]
    assert [choice["logprobs"]["content"][0]["token"] for choice in body["choices"]] == ["3", "2"]
    assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 25, "total_tokens": 30}


async def test_bodies_that_a_hook_varies_are_sampled_one_by_one(swarm: Swarm, open_gateway: OpenGateway) -> None:
    async with open_gateway(submit=VARIES) as http:
        assert (await http.post(CHAT, json=BODY)).headers["x-swarm-trained"] == "true"
    assert swarm.calls == [1] * 4


async def test_a_server_without_addresses_for_groups_is_called_one_by_one(
    swarm: Swarm, gateway: httpx.AsyncClient
) -> None:
    swarm.grouped = False
    assert (await gateway.post(CHAT, json=BODY)).headers["x-swarm-trained"] == "true"
    assert swarm.calls == [1] * 4


@pytest.mark.parametrize(
    ("sampling", "asked", "calls"),
    [
        ("trainer", {"temperature": 0}, [4]),
        ("app", {"temperature": 0}, [1] * 4),
        ("app", {"temperature": 0.5}, [4]),
        ("app", {}, [4]),
    ],
)
async def test_greedy_calls_share_nothing(
    swarm: Swarm, gateway: httpx.AsyncClient, sampling: Any, asked: dict[str, Any], calls: list[int]
) -> None:
    swarm.job = TrainJob(model=MODEL, num_repeat=4, batch_size=2, sampling=sampling)
    assert (await gateway.post(CHAT, json=BODY | asked)).headers["x-swarm-trained"] == "true"
    assert swarm.calls == calls


async def test_a_group_that_was_not_begun_is_tried_once_more(swarm: Swarm, gateway: httpx.AsyncClient) -> None:
    async def first_is_early(body: dict[str, Any], number: int) -> Response:
        return error(503, "syncing", retry_after="0") if len(swarm.calls) == 1 else JSONResponse(completion("x"))

    swarm.answer = first_is_early
    response = await gateway.post(CHAT, json=BODY)
    assert (response.headers["x-swarm-trained"], swarm.calls, len(swarm.claims)) == ("true", [4, 4], 1)


async def test_a_group_whose_engine_is_gone_gives_way_to_another(swarm: Swarm, gateway: httpx.AsyncClient) -> None:
    async def first_is_lost(body: dict[str, Any], number: int) -> Response:
        gone = {"error": {"message": "the engine is gone", "code": "engine_offline"}}
        return JSONResponse(gone, 503) if len(swarm.calls) == 1 else JSONResponse(completion("x"))

    swarm.answer = first_is_lost
    response = await gateway.post(CHAT, json=BODY)
    assert (response.headers["x-swarm-trained"], swarm.calls, len(swarm.claims)) == ("true", [4, 4], 2)
    assert len(swarm.aborted) == 4


@pytest.mark.parametrize("counts", ["1", "1,1,1", "", "1,x"])
async def test_an_answer_that_does_not_count_its_choices_is_refused(counts: str) -> None:
    one = completion("x")
    one["choices"].append(one["choices"][0] | {"index": 1})
    headers = {"x-swarm-completion-tokens": counts}

    async def answer(request: Request) -> Response:
        return JSONResponse(one, headers=headers)

    app = Starlette(routes=[Route("/groups/g/v1/chat/completions", answer, methods=["POST"])])
    http = HttpClient()
    async with listening(app) as url:
        episodes = [EpisodeEndpoint(episode_uuid=f"e{k}", base_url="http://x", api_key="k") for k in range(2)]
        group = EpisodeGroup(episodes, "g", f"{url}/groups/g/v1", "key")
        with pytest.raises(UpstreamError, match="choices"):
            await Sampler(http).sample_group(group, (0, 1), b"{}", asyncio.get_running_loop().time() + 10)
        headers["x-swarm-completion-tokens"] = "1,2"
        first, second = await Sampler(http).sample_group(group, (0, 1), b"{}", asyncio.get_running_loop().time() + 10)
        await http.close()
    assert (first.answer.usage["completion_tokens"], second.answer.usage["total_tokens"]) == (1, 7)
