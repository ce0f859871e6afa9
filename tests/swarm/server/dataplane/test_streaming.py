"""Streamed calls over a real socket: chunks as they come, exact continuation over an abort, cancellation."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import pytest

from swarm.tokens import ABORTED
from tests.standins.vllm import (
    PROMPT,
    chat_chunk,
    completion_chunk,
    entries,
    logprob,
    of,
    plain,
    role_chunk,
    status,
    streamed,
    token_chunk,
    usage_chunk,
)
from tests.swarm.server.conftest import JOB, Claimed, Rig, ready

pytestmark = pytest.mark.anyio


async def read(episode: Claimed, **body: Any) -> list[Any]:
    """All events of a streamed call; ``[DONE]`` as a string."""
    response = await episode.rig.client.send(episode.request(stream=True, **body), stream=True)
    assert response.status_code == 200, await response.aread()
    assert response.headers["content-type"].startswith("text/event-stream")
    events: list[Any] = []
    buffer = b"".join([data async for data in response.aiter_bytes()]).decode()
    for block in buffer.split("\n\n"):
        if block:
            data = block.removeprefix("data: ")
            events.append(data if data == "[DONE]" else json.loads(data))
    await response.aclose()
    return events


def text(events: list[Any]) -> str:
    return "".join(c["delta"].get("content") or "" for e in events if e != "[DONE]" for c in e["choices"])


async def test_stream_is_passed_through_and_recorded(rig: Rig) -> None:
    rig.vllm.script.append(streamed(role_chunk(), token_chunk([5]), token_chunk([6], "stop"), usage_chunk(2)))
    episode = await rig.claim()
    events = await read(episode)
    assert events[-1] == "[DONE]"
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert text(events) == "t5 t6 "
    chunks = events[:-1]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, None, "stop"]
    assert {c["model"] for c in chunks} == {"tiny"}
    assert all("prompt_token_ids" not in c and "usage" not in c for c in chunks)
    assert all("token_ids" not in c["choices"][0] and c["choices"][0]["logprobs"] is None for c in chunks)
    (call,) = episode.calls
    assert (call.prompt_ids, call.response_ids, call.logprobs) == (PROMPT, [5, 6], [logprob(5), logprob(6)])
    assert rig.vllm.requests[0][1]["stream_options"] == {"include_usage": True}


async def test_no_proxy_is_to_hold_a_stream_back(rig: Rig) -> None:
    """As the proxy that speaks TLS for the server."""
    rig.vllm.script.append(streamed(role_chunk(), token_chunk([5], "stop"), usage_chunk(1)))
    response = await rig.client.send((await rig.claim()).request(stream=True))
    assert (response.headers["x-accel-buffering"], response.headers["cache-control"]) == ("no", "no-cache")


@pytest.mark.parametrize("with_usage", [False, True])
async def test_usage_with_each_chunk_is_asked_for_as_vllm_heeds_it(rig: Rig, with_usage: bool) -> None:
    rig.vllm.script.append(streamed(role_chunk(), token_chunk([5], "stop"), usage_chunk(1)))
    options = {"include_usage": with_usage, "continuous_usage_stats": True}
    await read(await rig.claim(), stream_options=options)
    asked = options if with_usage else {"include_usage": True}
    assert rig.vllm.requests[0][1]["stream_options"] == asked


@pytest.mark.parametrize("with_usage", [False, True])
async def test_the_engines_fingerprint_is_in_the_last_chunk(rig: Rig, with_usage: bool) -> None:
    # as vLLM sends it where usage is asked for, as it always is here
    last = usage_chunk(1) | {"system_fingerprint": "vllm-1"}
    rig.vllm.script.append(streamed(role_chunk(), token_chunk([5], "stop"), last))
    episode = await rig.claim()
    options = {"stream_options": {"include_usage": True}} if with_usage else {}
    *chunks, _ = await read(episode, **options)
    assert chunks[-1]["system_fingerprint"] == "vllm-1" and bool(chunks[-1].get("usage")) == with_usage
    [end] = [chunk for chunk in chunks if chunk["choices"] and chunk["choices"][0]["finish_reason"]]
    assert end["system_fingerprint"] == "vllm-1"


async def test_asked_for_fields_are_delivered(rig: Rig) -> None:
    rig.vllm.script.append(streamed(role_chunk(), token_chunk([5], "stop"), usage_chunk(1)))
    events = await read(await rig.claim(), logprobs=True, return_token_ids=True, stream_options={"include_usage": True})
    assert events[0]["prompt_token_ids"] == PROMPT
    assert events[1]["choices"][0]["token_ids"] == [5]
    assert events[1]["choices"][0]["logprobs"]["content"][0]["logprob"] == logprob(5)
    assert events[2]["choices"] == []
    assert events[2]["usage"] == {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}


async def test_line_separators_inside_json_do_not_cut_events(rig: Rig) -> None:
    odd = token_chunk([5], delta={"content": "a\u2028b\x85c"})
    rig.vllm.script.append(streamed(role_chunk(), odd, token_chunk([6], "stop"), usage_chunk(2)))
    assert text(await read(await rig.claim())) == "a\u2028b\x85ct6 "


async def test_chunks_come_as_they_are_sampled(rig: Rig) -> None:
    go_on = asyncio.Event()
    rig.vllm.script.append(
        streamed(role_chunk(), token_chunk([5]), go_on.wait, token_chunk([6], "stop"), usage_chunk(2))
    )
    episode = await rig.claim()
    async with asyncio.timeout(10):
        response = await rig.client.send(episode.request(stream=True), stream=True)
        received = b""
        parts = response.aiter_bytes()
        while b"t5" not in received:
            received += await anext(parts)
        assert response.headers["x-swarm-policy-version"] == "0"
        go_on.set()
        async for part in parts:
            received += part
    assert received.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    "aborted",
    [
        # before its first token, vLLM 0.28 sends the role, no finish reason and a usage of 0
        streamed(role_chunk(), usage_chunk(0)),
        streamed(role_chunk(), token_chunk([9, 9], "abort"), usage_chunk(2)),
        streamed(role_chunk(), done=False),
        streamed(chat_chunk(None, error={"message": "internal", "code": 500})),
        status(503, {"error": {"message": "sleeping"}}),
    ],
)
async def test_a_cut_before_anything_was_delivered_repeats_the_call(rig: Rig, aborted: Any) -> None:
    whole = streamed(role_chunk(), token_chunk([5], "stop"), usage_chunk(1))
    rig.vllm.script.extend([aborted, whole])
    episode = await rig.claim()
    events = await read(episode)
    assert text(events) == "t5 "
    assert sum("role" in e["choices"][0]["delta"] for e in events[:-1]) == 1
    assert [call.response_ids for call in episode.calls] == [[5]]


async def test_a_cut_stream_continues_exactly_from_its_tokens(rig: Rig) -> None:
    rig.vllm.script.extend(
        [
            streamed(role_chunk(), token_chunk([5]), token_chunk([6], "abort"), usage_chunk(2)),
            streamed(completion_chunk([], "abort", [*PROMPT, 5, 6]), usage_chunk(0, 5)),
            streamed(completion_chunk([7], None, [*PROMPT, 5, 6]), completion_chunk([8], "stop"), usage_chunk(2, 5)),
        ]
    )
    episode = await rig.claim()
    rig_sync = rig.controller
    events = await read(
        episode, max_tokens=50, stop=["END"], logprobs=True, top_logprobs=1, stream_options={"include_usage": True}
    )
    assert text(events) == "t5 t6 t7 t8 "
    assert [e["choices"][0]["finish_reason"] for e in events[:-2]][-1] == "stop"
    assert "abort" not in json.dumps(events)
    assert {e["id"] for e in events[:-1]} == {"chatcmpl-s"}
    assert {e["object"] for e in events[:-1]} == {"chat.completion.chunk"}
    assert events[-2]["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    sampled = [x for e in events[:-2] for c in e["choices"] for x in (c["logprobs"] or {"content": []})["content"]]
    assert [x["token"] for x in sampled] == ["t5", "t6", "t7", "t8"]
    assert sampled[-1]["top_logprobs"][0]["logprob"] == logprob(8)
    path, body = rig.vllm.requests[2]
    assert path == "/v1/completions"
    assert body["prompt"] == [*PROMPT, 5, 6]
    assert (body["max_tokens"], body["stop"], body["temperature"], body["logprobs"]) == (48, ["END"], 0.9, 1)
    (call,) = episode.calls
    assert (call.prompt_ids, call.response_ids) == (PROMPT, [5, 6, 7, 8])
    assert call.logprobs == [logprob(t) for t in (5, 6, 7, 8)]
    assert rig_sync.pool.information().quarantined_episodes == 0


async def test_versions_span_a_continuation(rig: Rig) -> None:
    async def new_weights() -> None:
        rig.controller.rollout_ready(ready(rig.vllm_address, version=3))

    rig.vllm.script.extend(
        [
            streamed(role_chunk(), token_chunk([5]), token_chunk([], "abort")),
            streamed(new_weights, completion_chunk([7], "stop", [*PROMPT, 5]), usage_chunk(1, 4)),
        ]
    )
    episode = await rig.claim()
    assert text(await read(episode)) == "t5 t7 "
    (call,) = episode.calls
    assert (call.min_policy_version, call.max_policy_version) == (0, 3)


@pytest.mark.parametrize(("prompt", "left"), [(PROMPT, 99), ([7] * 3070, 29)])
async def test_a_continuation_without_a_length_is_bounded_by_response_and_context(
    rig: Rig, prompt: list[int], left: int
) -> None:
    opening = role_chunk() | {"prompt_token_ids": prompt}
    usage = usage_chunk(1, len(prompt) + 1)
    rig.vllm.script.extend(
        [
            streamed(opening, token_chunk([5]), token_chunk([], "abort")),
            streamed(completion_chunk([7], "stop", [*prompt, 5]), usage),
        ]
    )
    episode = await rig.claim()
    assert text(await read(episode)) == "t5 t7 "
    assert "max_tokens" not in rig.vllm.requests[0][1]
    assert rig.vllm.requests[1][1]["max_tokens"] == left


async def test_a_continuation_may_fill_the_context_that_vllm_has(rig: Rig) -> None:
    """A job may give vLLM a longer one than its prompts and answers need, as AgentJet's jobs do."""
    rig.controller.offline("stopped by a test")
    rig.controller.sync_job(JOB.model_copy(update={"overrides": {"actor_rollout_ref.rollout.max_model_len": 4000}}))
    rig.controller.boot()
    rig.controller.rollout_ready(ready(rig.vllm_address))
    prompt = [7] * (JOB.max_prompt_length + JOB.max_response_length)
    opening = role_chunk() | {"prompt_token_ids": prompt}
    rig.vllm.script.extend(
        [
            streamed(opening, token_chunk([5]), token_chunk([], "abort")),
            streamed(completion_chunk([7], "stop", [*prompt, 5]), usage_chunk(1, len(prompt) + 1)),
        ]
    )
    assert text(await read(await rig.claim())) == "t5 t7 "
    assert rig.vllm.requests[1][1]["max_tokens"] == JOB.max_response_length - 1


async def test_a_cut_at_the_length_limit_is_finished(rig: Rig) -> None:
    rig.vllm.script.append(streamed(role_chunk(), token_chunk([5]), token_chunk([6], "abort")))
    episode = await rig.claim()
    events = await read(episode, max_tokens=2, stream_options={"include_usage": True})
    assert events[-3]["choices"][0]["finish_reason"] == "length"
    assert events[-2]["usage"]["completion_tokens"] == 2
    assert [call.response_ids for call in episode.calls] == [[5, 6]]


async def test_a_continuation_after_another_prompt_is_quarantined(rig: Rig) -> None:
    rig.vllm.script.extend(
        [
            streamed(role_chunk(), token_chunk([5]), token_chunk([], "abort")),
            streamed(completion_chunk([7], "stop", [*PROMPT, 4]), usage_chunk(1, 4)),
        ]
    )
    episode = await rig.claim()
    await read(episode)
    assert "another prompt" in (await episode.end())["error"]


TOOLS = [{"type": "function", "function": {"name": "f"}}]
TOOL_DELTA = {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{"}}]}


@pytest.mark.parametrize(
    ("body", "delta"),
    [
        ({}, TOOL_DELTA),
        ({}, {"reasoning": "hm"}),
        ({"tools": TOOLS}, {"content": "t5 "}),
        ({"response_format": {"type": "json_object"}}, {"content": "{"}),
    ],
)
async def test_what_cannot_be_continued_ends_with_an_error_and_is_not_trained(
    rig: Rig, body: dict[str, Any], delta: dict[str, Any]
) -> None:
    rig.vllm.script.append(streamed(role_chunk(), token_chunk([5], delta=delta), token_chunk([], "abort")))
    episode = await rig.claim()
    events = await read(episode, **body)
    assert events[-1]["error"]["code"] == "stream_cut"
    assert "[DONE]" not in events
    assert "quarantined" in (await episode.end())["error"]
    assert len(rig.vllm.requests) == 1


async def test_a_tool_call_that_is_cut_half_way_is_not_taken_for_a_whole_one(rig: Rig) -> None:
    # vLLM calls an abort so once a tool call has begun
    cut = token_chunk([6], "tool_calls", TOOL_DELTA)
    cut["choices"][0]["stop_reason"] = ABORTED
    rig.vllm.script.append(streamed(role_chunk(), token_chunk([5], delta=TOOL_DELTA), cut, usage_chunk(2)))
    episode = await rig.claim()
    assert (await read(episode, tools=TOOLS))[-1]["error"]["code"] == "stream_cut"
    assert "quarantined" in (await episode.end())["error"]


async def test_a_plain_answer_whose_tool_call_is_cut_half_way_is_sampled_again(rig: Rig) -> None:
    rig.vllm.script += [plain([5], "tool_calls", stop_reason=ABORTED), plain([7], "tool_calls")]
    episode = await rig.claim()
    choice = (await episode.chat(tools=TOOLS)).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", None)
    assert [call.response_ids for call in episode.calls] == [[7]]


async def test_text_held_back_by_a_parser_is_not_continued_as_text(rig: Rig) -> None:
    held = token_chunk([6], delta={})
    rig.vllm.script.append(streamed(role_chunk(), token_chunk([5]), held, token_chunk([], "abort")))
    assert (await read(await rig.claim()))[-1]["error"]["code"] == "stream_cut"


@pytest.mark.parametrize(
    "cut",
    [
        # vLLM has sampled 6, whose text may be the beginning of a stop text, and dies
        [streamed(role_chunk(), token_chunk([5]), token_chunk([6], delta={"content": ""}), done=False)],
        [
            streamed(role_chunk(), token_chunk([5]), token_chunk([], "abort"), usage_chunk(1)),
            streamed(completion_chunk([6], None, [*PROMPT, 5]), done=False),
        ],
        # the text of a stop has begun: who goes on after it would not know the rest for one
        [streamed(role_chunk(), token_chunk([5]), token_chunk([6], "abort", {"content": "so E"}), usage_chunk(2))],
    ],
)
async def test_what_a_stop_text_holds_back_is_not_lost_without_a_word(rig: Rig, cut: list[Any]) -> None:
    rig.vllm.script.extend(cut)
    rig.vllm.default = streamed(completion_chunk([7], "stop"), usage_chunk(1, len(PROMPT) + 2))
    episode = await rig.claim()
    assert (await read(episode, stop=["END"]))[-1]["error"]["code"] == "stream_cut"
    assert len(rig.vllm.requests) == len(cut)
    assert "quarantined" in (await episode.end())["error"]


async def test_a_stream_with_stop_texts_that_nobody_records_goes_on(rig: Rig) -> None:
    # its text is held back, so that log-probabilities alone say where a character ends
    cut = chat_chunk({"delta": {"content": "so far"}, "token_ids": [5], "logprobs": entries([5], ["so far"])})
    rig.vllm.script.append(streamed(role_chunk(), cut, token_chunk([], "abort"), usage_chunk(1)))
    rig.vllm.default = streamed(completion_chunk([7], "stop"), usage_chunk(1, len(PROMPT) + 1))
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True, "stop": ["END"]}
    answer = await rig.client.post("/v1/chat/completions", json=body)
    assert rig.vllm.requests[0][1]["logprobs"] is True
    assert '"finish_reason":"stop"' in answer.text and "error" not in answer.text, answer.text
    assert '"logprobs":{' not in answer.text, "nobody asked for them"


async def test_a_stop_text_of_any_length_holds_nobody_up_at_an_abort(rig: Rig) -> None:
    rig.vllm.script.append(streamed(role_chunk(), token_chunk([5]), token_chunk([], "abort"), usage_chunk(1)))
    rig.vllm.default = streamed(completion_chunk([7], "stop"), usage_chunk(1, len(PROMPT) + 1))
    episode = await rig.claim()
    began = time.thread_time()
    assert text(await read(episode, stop=["END" * 100_000])) == "t5 t7 "
    # it takes a hundredth of that, and took several times as long, in which no other call was served
    assert time.thread_time() - began < 2.0


async def test_half_a_character_is_not_continued(rig: Rig) -> None:
    """vLLM has no text for the tokens of half a character, and gives that of the whole prompt with the other half to
    who samples on after it."""
    half = chat_chunk({"delta": {"content": ""}, "token_ids": [6], "logprobs": entries([6], [""])})
    rig.vllm.script.append(streamed(role_chunk(), token_chunk([5]), half, token_chunk([], "abort"), usage_chunk(2)))
    rig.vllm.default = streamed(completion_chunk([7], "stop"), usage_chunk(1, len(PROMPT) + 2))
    episode = await rig.claim()
    assert (await read(episode))[-1]["error"]["code"] == "stream_cut"
    assert "quarantined" in (await episode.end())["error"]
    # where nobody asks for log-probabilities, by the text alone
    half["choices"][0]["logprobs"] = None
    rig.vllm.script.append(streamed(role_chunk(), token_chunk([5]), half, token_chunk([], "abort"), usage_chunk(2)))
    assert (await read(await rig.claim(episode_type="eval")))[-1]["error"]["code"] == "stream_cut"
    assert len(rig.vllm.requests) == 2


async def test_half_a_character_is_seen_where_tokens_are_named_by_their_ids(rig: Rig) -> None:
    def named(token: int, text: str) -> Any:
        listed = entries([token], [f"token_id:{token}"])
        return chat_chunk({"delta": {"content": text}, "token_ids": [token], "logprobs": listed})

    ask = {"logprobs": True, "return_tokens_as_token_ids": True, "cache_salt": "s"}
    rig.vllm.default = streamed(completion_chunk([7], "stop"), usage_chunk(1, len(PROMPT) + 2))
    for text, last in (("", "stream_cut"), ("so", "[DONE]")):
        rig.vllm.script.append(streamed(role_chunk(), named(5, "t5 "), named(6, text), token_chunk([], "abort")))
        *_, end = await read(await rig.claim(), **ask)
        assert last in (end, end["error"]["code"] if isinstance(end, dict) else "")
    path, body = rig.vllm.requests[-1]
    assert path == "/v1/completions" and {name: body.get(name) for name in ask if name != "logprobs"} == {
        "return_tokens_as_token_ids": True,
        "cache_salt": "s",
    }


async def test_tokens_without_a_text_are_of_the_answer_once_that_has_begun(rig: Rig) -> None:
    """As half a character is; before it they may be of reasoning that is hidden."""
    pieces = [({"reasoning": "t5"}, 5), ({}, 6), ({"content": "t7"}, 7), ({"content": ""}, 8), ({"content": "t9"}, 9)]
    said = [token_chunk([token], delta=delta) for delta, token in pieces]
    rig.vllm.default = streamed(role_chunk(), *said, token_chunk([10], "stop", delta={}), usage_chunk(6))
    asked = {"logprobs": True, "return_token_ids": True, "include_reasoning": False}
    *chunks, _ = await read(await rig.claim(), **asked)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [token for choice in choices for token in choice.get("token_ids") or ()] == [7, 8, 9, 10]
    assert [choice["logprobs"] is not None for choice in choices[-4:]] == [True] * 4
    assert "t5" not in str(choices)


async def test_refusal_before_the_first_chunk_has_its_status(rig: Rig) -> None:
    payload = {"error": {"message": "too long", "type": "BadRequestError", "param": None, "code": 400}}
    for step in (status(400, payload), streamed(payload)):
        rig.vllm.script.append(step)
        response = await rig.client.send((await rig.claim()).request(stream=True))
        assert (response.status_code, response.json()) == (400, payload)
        assert response.headers["x-should-retry"] == "false"
        assert response.headers["x-request-id"]


async def test_an_episode_that_ends_cuts_its_stream_with_an_error(rig: Rig) -> None:
    rig.vllm.script.append(rig.vllm.hang(role_chunk(), token_chunk([5])))
    episode = await rig.claim()
    response: httpx.Response = await rig.client.send(episode.request(stream=True), stream=True)
    received = b""
    async with asyncio.timeout(10):
        async for part in response.aiter_bytes():
            received += part
            if b"t5" in part:
                await rig.post("/abort_episode", client_uuid="me", episode_uuid=episode.uuid)
        await rig.vllm.cancelled.wait()
    assert b'"episode_aborted"' in received
    assert b"[DONE]" not in received


async def test_several_answers_of_an_eval_episode(rig: Rig) -> None:
    rig.vllm.script.append(
        streamed(
            role_chunk(),
            of(1, role_chunk()),
            of(0, token_chunk([5], "stop")),
            of(1, token_chunk([6])),
            of(1, token_chunk([7], "length")),
            usage_chunk(3),
        )
    )
    events = await read(await rig.claim(episode_type="eval"), n=2)
    finishes = {e["choices"][0]["index"]: e["choices"][0]["finish_reason"] for e in events[:-1]}
    assert finishes == {0: "stop", 1: "length"}
    assert text(events) == "t6 t5 t7 "
