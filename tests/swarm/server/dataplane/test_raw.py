"""Raw prompts through an episode's and a group's address, over real sockets: sampled at vLLM's /v1/completions and
recorded as they were."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest

from tests.standins.vllm import ENGINE_MODEL, PROMPT, completion_chunk, logprob, streamed, told, usage_chunk
from tests.swarm.server.conftest import Claimed, Rig
from tests.swarm.server.dataplane.group import claim_group

pytestmark = pytest.mark.anyio


@pytest.fixture
async def episode(rig: Rig) -> Claimed:
    return await rig.claim()


@pytest.fixture
async def sdk(episode: Claimed) -> AsyncGenerator[Any]:
    import openai  # to import an SDK takes seconds, in every worker that collects tests

    async with openai.AsyncOpenAI(base_url=episode.base_url, api_key=episode.key, max_retries=0) as client:
        yield client


@pytest.mark.parametrize("prompt", ["Once upon", [5, 6, 7]])
async def test_a_prompt_is_continued_and_recorded(rig: Rig, episode: Claimed, sdk: Any, prompt: Any) -> None:
    rig.vllm.script.append(told([21, 22]))
    answer = await sdk.completions.create(model="any", prompt=prompt, max_tokens=9, logprobs=0)
    assert (answer.object, answer.choices[0].text, answer.choices[0].finish_reason) == (
        "text_completion",
        "t21 t22 ",
        "stop",
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert (logprobs.tokens, logprobs.token_logprobs) == (["t21", "t22"], [logprob(21), logprob(22)])
    path, sent = rig.vllm.requests[-1]
    assert path == "/v1/completions"
    assert (sent["prompt"], sent["max_tokens"], sent["logprobs"], sent["return_token_ids"]) == (prompt, 9, 0, True)
    assert (sent["model"], sent["temperature"]) == (ENGINE_MODEL, rig.controller.job.temperature)
    assert not {"messages", "top_logprobs", "include_reasoning"} & sent.keys()
    (call,) = episode.calls
    assert (call.prompt_ids, call.response_ids) == (PROMPT, [21, 22])
    assert call.logprobs == [logprob(21), logprob(22)]


async def test_the_length_is_openais_where_none_is_asked_for(rig: Rig, sdk: Any) -> None:
    rig.vllm.script.append(told([21]))
    await sdk.completions.create(model="any", prompt="Once")
    assert rig.vllm.requests[-1][1]["max_tokens"] == 16


async def test_a_stream_is_recorded_too(rig: Rig, episode: Claimed, sdk: Any) -> None:
    rig.vllm.script.append(
        streamed(completion_chunk([21], prompt=PROMPT), completion_chunk([22], "stop"), usage_chunk(2))
    )
    stream = await sdk.completions.create(
        model="any", prompt="Once", stream=True, stream_options={"include_usage": True}, max_tokens=9
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "t21 t22 "
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 2
    assert [call.response_ids for call in episode.calls] == [[21, 22]]


async def test_a_stream_cut_by_a_weight_sync_goes_on(rig: Rig, episode: Claimed, sdk: Any) -> None:
    rig.vllm.script.append(
        streamed(completion_chunk([21], prompt=PROMPT), completion_chunk([22], "abort"), usage_chunk(2))
    )
    rig.vllm.script.append(
        streamed(completion_chunk([23], "stop", [*PROMPT, 21, 22]), usage_chunk(1, prompt=len(PROMPT) + 2))
    )
    stream = await sdk.completions.create(model="any", prompt="Once", stream=True, max_tokens=9)
    text = "".join([choice.text async for chunk in stream for choice in chunk.choices])
    assert text == "t21 t22 t23 "
    assert rig.vllm.requests[-1][1]["prompt"] == [*PROMPT, 21, 22]
    assert rig.vllm.requests[-1][1]["max_tokens"] == 7
    assert [call.response_ids for call in episode.calls] == [[21, 22, 23]]


async def test_an_aborted_answer_is_asked_for_again(rig: Rig, episode: Claimed, sdk: Any) -> None:
    rig.vllm.script += [told([21], finish="abort"), told([22])]
    answer = await sdk.completions.create(model="any", prompt="Once")
    assert answer.choices[0].text == "t22 "
    assert [call.response_ids for call in episode.calls] == [[22]]


async def test_tokens_and_usage_that_disagree_are_never_trained(rig: Rig, episode: Claimed, sdk: Any) -> None:
    rig.vllm.script.append(told([21, 22], counted=3))
    await sdk.completions.create(model="any", prompt="Once")
    assert not episode.calls
    assert rig.controller.pool.open(episode.uuid, episode.key).quarantine_reason


async def test_a_group_samples_one_answer_for_each_episode(rig: Rig) -> None:
    rig.vllm.script.append(told([21, 22], [31]))
    group = await claim_group(rig)
    response = await group.chat(prompt="Once", messages=None)
    assert response.status_code == 200, response.text
    assert response.headers["x-swarm-completion-tokens"] == "2,1"
    assert [choice["message"]["content"] for choice in response.json()["choices"]] == ["t21 t22 ", "t31 "]
    assert rig.vllm.requests[-1][1]["n"] == 2
    assert group.sampled == [[[21, 22]], [[31]]]


@pytest.mark.parametrize("prompt", ["", [], ["a", "b"], [[1], [2]], 3, None, [True], [-1]])
async def test_a_prompt_that_is_none_is_refused_by_name(rig: Rig, episode: Claimed, prompt: Any) -> None:
    for path, body in (("completions", {"prompt": prompt}), ("chat/completions", {"prompt": prompt, "messages": None})):
        response = await rig.client.post(
            f"{episode.base_url}/{path}", json=body, headers={"authorization": f"Bearer {episode.key}"}
        )
        assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt"), path
    assert (await episode.chat(prompt="Once")).json()["error"]["param"] == "prompt"
    assert not rig.vllm.requests
