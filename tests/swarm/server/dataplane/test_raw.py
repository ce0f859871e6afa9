"""Raw prompts through an episode's and a group's address, over real sockets: sampled at vLLM's /v1/completions and
recorded as they were."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import httpx
import pytest
from msgspec import structs
from starlette.responses import Response

from tests.standins.vllm import ENGINE_MODEL, PROMPT, completion_chunk, logprob, streamed, told, usage_chunk
from tests.swarm.server.conftest import Claimed, Rig, ready
from tests.swarm.server.dataplane.group import claim_group

pytestmark = pytest.mark.anyio


async def complete(episode: Claimed, **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {episode.key}"}
    url = f"{episode.base_url}/completions"
    answer = await episode.rig.client.post(url, json={"model": "any", "prompt": "Once"} | body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


def text(streamed: httpx.Response) -> str:
    *lines, done = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line]
    assert done == "[DONE]"
    return "".join(choice["text"] for line in lines for choice in json.loads(line)["choices"])


@pytest.mark.parametrize("prompt", ["Once upon", [5, 6, 7]])
async def test_a_prompt_is_continued_and_recorded(rig: Rig, episode: Claimed, prompt: Any) -> None:
    rig.vllm.script += [told([21, 22]), told([21])]
    answer = (await complete(episode, prompt=prompt, max_tokens=9, logprobs=0)).json()
    (choice,) = answer["choices"]
    assert (answer["object"], choice["text"], choice["finish_reason"]) == ("text_completion", "t21 t22 ", "stop")
    logprobs = choice["logprobs"]
    assert (logprobs["tokens"], logprobs["token_logprobs"]) == (["t21", "t22"], [logprob(21), logprob(22)])
    path, sent = rig.vllm.requests[-1]
    assert path == "/v1/completions"
    assert (sent["prompt"], sent["max_tokens"], sent["logprobs"], sent["return_token_ids"]) == (prompt, 9, 0, True)
    assert (sent["model"], sent["temperature"]) == (ENGINE_MODEL, rig.controller.job.temperature)
    assert not {"messages", "top_logprobs", "include_reasoning"} & sent.keys()
    (call,) = episode.calls
    assert (call.prompt_ids, call.response_ids) == (PROMPT, [21, 22])
    assert call.logprobs == [logprob(21), logprob(22)]
    await complete(episode)
    assert rig.vllm.requests[-1][1]["max_tokens"] == 16, "OpenAI's length where none is asked for"


async def test_a_stream_cut_by_a_weight_sync_goes_on_and_is_recorded(rig: Rig, episode: Claimed) -> None:
    rig.vllm.script += [
        streamed(completion_chunk([21], prompt=PROMPT), completion_chunk([22], "abort"), usage_chunk(2)),
        streamed(completion_chunk([23], "stop", [*PROMPT, 21, 22]), usage_chunk(1, prompt=len(PROMPT) + 2)),
    ]
    assert text(await complete(episode, stream=True, max_tokens=9)) == "t21 t22 t23 "
    assert rig.vllm.requests[-1][1]["prompt"] == [*PROMPT, 21, 22]
    assert rig.vllm.requests[-1][1]["max_tokens"] == 7
    assert [call.response_ids for call in episode.calls] == [[21, 22, 23]]


@pytest.mark.parametrize("streaming", [False, True])
async def test_tokens_of_a_raw_prompt_keep_their_versions_over_a_weight_sync(rig: Rig, streaming: bool) -> None:
    rig.controller.rollout_ready(structs.replace(ready(rig.vllm_address), serving="always"))
    begun, synced = asyncio.Event(), asyncio.Event()

    async def sync() -> None:
        begun.set()
        await synced.wait()

    async def late(body: dict[str, Any]) -> Response:
        await sync()
        return cast("Response", told([21, 22])(body))

    first, last = completion_chunk([21], prompt=PROMPT), completion_chunk([22], "stop")
    rig.vllm.script.append(streamed(first, sync, last, usage_chunk(2) | {"id": "cmpl-1"}) if streaming else late)
    episode = await rig.claim()
    call = asyncio.create_task(complete(episode, stream=streaming))
    await begun.wait()
    rig.controller.weight_sync_begins()
    rig.controller.weights_synced(1, {"cmpl-1": {0: 1}})
    synced.set()
    await call
    (recorded,) = episode.calls
    assert recorded.versions == [(0, 0), (1, 1)]


async def test_a_group_samples_one_answer_for_each_episode(rig: Rig) -> None:
    rig.vllm.script.append(told([21, 22], [31]))
    group = await claim_group(rig)
    response = await group.chat(prompt="Once", messages=None)
    assert response.status_code == 200, response.text
    assert response.headers["x-swarm-completion-tokens"] == "2,1"
    assert [choice["message"]["content"] for choice in response.json()["choices"]] == ["t21 t22 ", "t31 "]
    assert rig.vllm.requests[-1][1]["n"] == 2
    assert group.sampled == [[[21, 22]], [[31]]]


async def test_a_prompt_that_is_none_is_refused_by_name(rig: Rig, episode: Claimed) -> None:
    headers = {"authorization": f"Bearer {episode.key}"}
    for prompt in ("", [], ["a", "b"], [[1], [2]], 3, None, [True], [-1]):
        for path, body in (("completions", {}), ("chat/completions", {"messages": None})):
            url = f"{episode.base_url}/{path}"
            response = await rig.client.post(url, json={"prompt": prompt} | body, headers=headers)
            param = "messages" if prompt is None and path == "chat/completions" else "prompt"
            assert (response.status_code, response.json()["error"]["param"]) == (400, param), (path, prompt)
    assert (await episode.chat(prompt="Once")).json()["error"]["param"] == "prompt"
    assert not rig.vllm.requests


async def test_a_prompt_of_null_is_no_prompt(rig: Rig, episode: Claimed) -> None:
    group = await claim_group(rig)
    for asked in (episode, group):
        response = await asked.chat(prompt=None)
        assert response.status_code == 200, response.text
        assert rig.vllm.requests[-1][0] == "/v1/chat/completions"
