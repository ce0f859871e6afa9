"""The episode endpoint over a real socket, with a scripted vLLM behind it: plain calls."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response

from tests.standins.vllm import (
    ENGINE_MODEL,
    PROMPT,
    logprob,
    plain,
    role_chunk,
    status,
    streamed,
    token_chunk,
    usage_chunk,
)
from tests.standins.vllm_rules import VllmRules
from tests.swarm.server.conftest import JOB, Rig, ready

pytestmark = pytest.mark.anyio


async def test_plain_call_is_answered_and_recorded(rig: Rig) -> None:
    rig.vllm.script.append(plain([5, 6]))
    episode = await rig.claim()
    response = await episode.chat(model="tiny", temperature=0.1, top_k=3, seed=7, unknown_field={"a": 1})
    assert response.status_code == 200
    assert response.headers["x-swarm-policy-version"] == "0"
    assert response.headers["x-request-id"]
    answer = response.json()
    assert answer["model"] == "tiny"
    assert answer["choices"][0]["message"]["content"] == "t5 t6"
    assert answer["choices"][0]["logprobs"] is None
    assert "prompt_token_ids" not in answer
    assert "token_ids" not in answer["choices"][0]
    (call,) = episode.calls
    assert (call.prompt_ids, call.response_ids, call.logprobs) == (PROMPT, [5, 6], [logprob(5), logprob(6)])
    assert call.finish_reason == "stop"
    path, sent = rig.vllm.requests[0]
    assert path == "/v1/chat/completions"
    assert sent["model"] == ENGINE_MODEL
    assert sent["unknown_field"] == {"a": 1}
    assert (sent["temperature"], sent["top_p"], sent["top_k"]) == (0.9, 1.0, -1)
    assert sent["return_token_ids"] is sent["logprobs"] is True
    assert sent["top_logprobs"] == 0
    assert "seed" not in sent


async def test_eval_episode_keeps_the_callers_sampling_and_is_not_recorded(rig: Rig) -> None:
    episode = await rig.claim(episode_type="eval")
    assert (await episode.chat(temperature=0.1, top_k=3, seed=7, n=1)).status_code == 200
    sent = rig.vllm.requests[0][1]
    assert (sent["temperature"], sent["top_k"], sent["seed"]) == (0.1, 3, 7)
    assert episode.calls == []


def limited(body: dict[str, Any]) -> Response:
    """As vLLM: a prompt beyond the context, or that leaves less room than was asked for, is refused."""
    context = JOB.max_prompt_length + JOB.max_response_length
    prompt = [7] * int(body["messages"][-1]["content"])
    if len(prompt) + (body.get("max_completion_tokens") or body.get("max_tokens") or 1) > context:
        return JSONResponse({"error": {"message": "context too long", "code": 400}}, status_code=400)
    reply = plain([1, 2], prompt=prompt)(body)
    assert isinstance(reply, Response)
    return reply


@pytest.mark.parametrize("kind", ["train", "eval"])
async def test_a_prompt_may_be_as_long_as_the_context(rig: Rig, kind: str) -> None:
    rig.vllm.default = limited
    episode = await rig.claim(episode_type=kind)
    for room, asked, status_code in (
        (40, {}, 200),
        (40, {"max_tokens": 40}, 200),
        (40, {"max_completion_tokens": 30, "max_tokens": 90}, 200),
        (40, {"max_tokens": 41}, 400),
        (40, {"max_tokens": JOB.max_response_length + 1}, 200),
        (40, {"max_tokens": None}, 200),
        (0, {}, 400),
    ):
        length = JOB.max_prompt_length + JOB.max_response_length - room
        response = await episode.chat(messages=[{"role": "user", "content": str(length)}], **asked)
        assert response.status_code == status_code, (room, asked, response.text)


async def test_what_bends_the_policy_is_taken_out_of_train_episodes_only(rig: Rig) -> None:
    rig.vllm.rules = VllmRules(reasoning_parser=True)
    bent = {
        "logit_bias": {"5": 10},
        "bad_words": ["no"],
        "allowed_token_ids": [5],
        "min_tokens": 4,
        "seed": 1,
        "thinking_token_budget": 3,
    }
    grammar = {"structured_outputs": {"choice": ["a", "b"]}}
    for kind, there in (("train", grammar), ("eval", bent | grammar)):
        episode = await rig.claim(episode_type=kind)
        assert (await episode.chat(**bent, **grammar)).status_code == 200
        sent = rig.vllm.requests[-1][1]
        assert {key: sent[key] for key in (*bent, *grammar) if key in sent} == there


async def test_reasoning_that_is_hidden_is_not_told_by_its_tokens_either(rig: Rig) -> None:
    """As by vLLM; the episode is recorded with all of them."""
    said = {"role": "assistant", "content": "t6", "reasoning": "t5"}
    rig.vllm.default = plain([5, 6], message=said)
    for ask, shown in (({}, True), ({"include_reasoning": False}, False)):
        episode = await rig.claim()
        answer = (await episode.chat(logprobs=True, return_token_ids=True, **ask)).json()
        (choice,) = answer["choices"]
        assert choice["message"]["content"] == "t6"
        assert ["t5" in str(choice), "token_ids" in choice, choice["logprobs"] is not None] == [shown] * 3
        assert answer["prompt_token_ids"] == PROMPT
        assert [call.response_ids for call in episode.calls] == [[5, 6]]


async def test_without_reasoning_there_is_none_to_hide(rig: Rig) -> None:
    rig.vllm.default = plain([5, 6])
    episode = await rig.claim()
    asked = {"logprobs": True, "return_token_ids": True, "include_reasoning": False}
    (choice,) = (await episode.chat(**asked)).json()["choices"]
    assert choice["token_ids"] == [5, 6] and choice["logprobs"] is not None


async def test_log_probabilities_are_given_to_who_asks_by_a_number(rig: Rig) -> None:
    """As by vLLM, which reads 1 as true."""
    for asked in (True, 1, 0):
        (choice,) = (await (await rig.claim()).chat(logprobs=asked)).json()["choices"]
        assert (choice["logprobs"] is not None) == bool(asked)


async def test_abort_is_repeated_and_never_delivered(rig: Rig) -> None:
    rig.vllm.script.extend([plain([1], "abort"), plain([], "abort"), plain([7, 8])])
    episode = await rig.claim()
    answer = (await episode.chat()).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert [call.response_ids for call in episode.calls] == [[7, 8]]
    assert len(rig.vllm.requests) == 3


async def test_server_errors_and_broken_connections_are_repeated(rig: Rig) -> None:
    class Breaks(Response):
        async def __call__(self, *_: Any) -> None:
            return None

    rig.vllm.script.extend([status(500, {"error": {"message": "boom"}}), lambda body: Breaks()])
    episode = await rig.claim()
    assert (await episode.chat()).status_code == 200
    assert len(rig.vllm.requests) == 3


@pytest.mark.parametrize("overrides", [{"call_attempts": 2}])
async def test_repeated_failure_ends_in_one_clear_error(rig: Rig) -> None:
    rig.vllm.default = status(503, {"error": {"message": "no room"}})
    episode = await rig.claim()
    response = await episode.chat()
    assert response.status_code == 502
    assert "no room" in response.json()["error"]["message"]
    assert response.headers["x-should-retry"] == "false"
    assert episode.calls == []


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": [5]},
        {"token_ids": None},
        {"logprobs": None},
        {"logprobs": {"content": [{"token": "a", "logprob": -9999.0}, {"token": "b", "logprob": -1.0}]}},
        {"prompt_token_ids": [1]},
        {"prompt_token_ids": None},
        {"usage": {"prompt_tokens": 3, "completion_tokens": 5}},
    ],
)
async def test_disagreeing_tokens_quarantine_the_episode_but_reach_the_caller(
    rig: Rig, changes: dict[str, Any]
) -> None:
    rig.vllm.script.append(plain([5, 6], **changes))
    episode = await rig.claim()
    response = await episode.chat()
    assert response.json()["choices"][0]["message"]["content"] == "t5 t6"
    ended = await episode.end()
    assert ended["success"]
    assert "quarantined" in ended["error"]
    assert rig.controller.pool.information().quarantined_episodes == 1


#: parts of a message that are not text
PARTS = [
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
    {"image_url": "data:image/png;base64,AA=="},
    {"type": "text", "text": "", "uuid": "known", "image_url": None},
    {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}},
    {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AA=="}},
    {"type": "prompt_embeds", "data": "AA=="},
]


async def test_what_is_not_text_is_answered_counted_and_never_trained(rig: Rig) -> None:
    for count, part in enumerate(PARTS, start=1):
        messages = [
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": None, "tool_calls": []},
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "seen"}, part]},
        ]
        episode = await rig.claim()
        response = await episode.chat(messages=messages)
        assert response.status_code == 200 and rig.vllm.requests[-1][1]["messages"] == messages
        assert (await episode.chat()).status_code == 200
        ended = await episode.end()
        assert ended["success"] and "quarantined: the conversation holds a part that is not text" in ended["error"]
        assert rig.controller.pool.information().quarantined_episodes == count
    quarantined = (await rig.client.get("/status")).json()["quarantined"]
    assert all("only text is trained" in reason for reason in quarantined)
    assert sum(quarantined.values()) == len(PARTS)
    metrics = (await rig.client.get("/metrics")).text
    assert "swarm_quarantined_episodes_total{" in metrics and "only text is trained" in metrics


async def test_wrong_key_dead_key_and_foreign_key(rig: Rig) -> None:
    episode, other = await rig.claim(), await rig.claim()
    response = await rig.client.post(f"{episode.base_url}/chat/completions", json={})
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    episode.key, other.key = other.key, episode.key
    assert (await episode.chat()).status_code == 401
    episode.key, other.key = other.key, episode.key
    await episode.end()
    assert (await episode.chat()).json()["error"]["code"] == "episode_ended"
    episode.key = other.key
    assert (await episode.chat()).status_code == 401, "only whoever had its key is told that it was there"
    headers = {"x-api-key": other.key}
    assert (await rig.client.get(f"{other.base_url}/models", headers=headers)).json()["data"][0]["id"] == "tiny"
    assert (await rig.client.get(f"{other.base_url}/models")).status_code == 401


async def test_bad_requests_reach_no_vllm(rig: Rig) -> None:
    train, evaluation = await rig.claim(), await rig.claim(episode_type="eval")
    for episode, body in (
        (train, {"messages": []}),
        (train, {"messages": "hello"}),
        (train, {"n": 2}),
        *((train, {"stream": stream}) for stream in ("perhaps", 2, [], {})),
        # more answers than vLLM would give are refused before they take memory
        *((evaluation, {"n": n}) for n in (-1, 16_385, 10**12, 1.5)),
    ):
        response = await episode.chat(**body)
        assert (response.status_code, [response.json()["error"]["param"]]) == (400, list(body)), body
    assert rig.vllm.requests == []


async def test_a_tool_call_that_the_model_wrote_as_no_json_is_taken_back(rig: Rig) -> None:
    """vLLM refuses arguments that are not JSON, and templates ask for their items: they reach it as an object."""
    episode = await rig.claim()
    written = ('{"city": "Ro', "[1]", "3", "NaN", '{"city": "Oslo"}')
    calls = [
        {"id": str(k), "type": "function", "function": {"name": "f", "arguments": text}}
        for k, text in enumerate(written)
    ]
    said = {"role": "assistant", "content": None, "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "what?"} for call in calls]
    answer = await episode.chat(messages=[{"role": "user", "content": "hi"}, said, *results])
    assert answer.status_code == 200, answer.text
    [(_, body)] = rig.vllm.requests
    sent = [one["function"]["arguments"] for one in body["messages"][1]["tool_calls"]]
    assert [json.loads(one) for one in sent] == [
        *({"INVALID_JSON": text} for text in written[:-1]),
        {"city": "Oslo"},
    ]


@pytest.mark.parametrize("as_stream", [False, True])
async def test_what_vllm_would_refuse_without_need_is_left_out_and_told(rig: Rig, as_stream: bool) -> None:
    episode = await rig.claim()
    file = {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBE"}}
    if as_stream:
        rig.vllm.script.append(streamed(role_chunk(), token_chunk([5], "stop"), usage_chunk(1)))
    answer = await episode.chat(
        messages=[{"role": "user", "content": None}, {"role": "user", "content": [file], "odd": 1}],
        tools=[{"type": "custom", "custom": {"name": "x"}}],
        tool_choice="auto",
        stream=as_stream,
        chat_template_kwargs={"enable_thinking": False},
    )
    assert answer.status_code == 200, answer.text
    told = answer.headers["x-swarm-left-out"].split("; ")
    assert [note.partition(":")[0] for note in told] == ["messages.1.content.0", "tools.0"]
    [(_, body)] = rig.vllm.requests
    assert body["messages"] == [
        {"role": "user", "content": ""},
        {
            "role": "user",
            "content": [{"type": "text", "text": "[A file 'a.pdf' was here; this model cannot read it.]"}],
            "odd": 1,
        },
    ]
    assert "tools" not in body and "tool_choice" not in body
    assert body["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize("as_stream", [False, True])
async def test_what_a_call_of_an_episode_does_not_heed_is_told(rig: Rig, as_stream: bool) -> None:
    if as_stream:
        rig.vllm.script.append(streamed(role_chunk(), token_chunk([5], "stop"), usage_chunk(1)))
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": as_stream, "max_tokens": 101, "temperature": 0.5}
    episode = await rig.claim()
    answer = await rig.client.post(
        f"{episode.base_url}/messages", json=body, headers={"authorization": f"Bearer {episode.key}"}
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-swarm-left-out"] == (
        "max_tokens: answers end at 100 tokens, raise job.max_response_length for longer ones; "
        "temperature: trained answers are sampled at 0.9 (job.sampling is trainer)"
    )


async def test_what_vllm_would_refuse_of_the_sampling_is_refused_where_it_is_overridden(rig: Rig) -> None:
    refused = await (await rig.claim()).chat(top_p=0)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "top_p")
    assert rig.vllm.requests == []


async def test_what_is_too_long_of_a_chat_are_its_messages(rig: Rig) -> None:
    """Though some send every field that they know, the empty ones as null."""
    said = "The decoder prompt (length 120) is longer than the maximum model length of 100. Make sure that ..."
    rig.vllm.script.append(lambda _: JSONResponse({"error": {"message": said, "code": 400}}, status_code=400))
    refused = (await (await rig.claim()).chat(prompt=None, input=None)).json()["error"]
    assert (refused["code"], refused["param"]) == ("context_length_exceeded", "messages")


async def test_parallel_calls_of_one_episode_run_in_parallel(rig: Rig) -> None:
    both = asyncio.Barrier(2)

    async def meet(body: dict[str, Any]) -> Response:
        await both.wait()
        reply = plain([1])(body)
        assert isinstance(reply, JSONResponse)
        return reply

    rig.vllm.default = meet
    episode = await rig.claim()
    async with asyncio.timeout(10):
        first, second = await asyncio.gather(episode.chat(), episode.chat())
    assert first.status_code == second.status_code == 200
    assert len(episode.calls) == 2


async def test_policy_versions_span_the_call(rig: Rig) -> None:
    async def sync_meanwhile(body: dict[str, Any]) -> Response:
        rig.controller.rollout_ready(ready(rig.vllm_address, version=4))
        reply = plain([1])(body)
        assert isinstance(reply, Response)
        return reply

    rig.vllm.script.append(sync_meanwhile)
    episode = await rig.claim()
    assert (await episode.chat()).headers["x-swarm-policy-version"] == "4"
    (call,) = episode.calls
    assert (call.min_policy_version, call.max_policy_version) == (0, 4)


@pytest.mark.parametrize("overrides", [{"call_timeout": 0.2}])
async def test_a_call_has_a_deadline(rig: Rig) -> None:
    rig.vllm.script.append(rig.vllm.hang())
    response = await (await rig.claim()).chat()
    assert (response.status_code, response.json()["error"]["code"]) == (504, "upstream_timeout")
    await asyncio.wait_for(rig.vllm.cancelled.wait(), 10)
