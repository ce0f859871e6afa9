"""One call for a whole group over a real socket: choices by episode, aborts, disagreements, departures."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from swarm.errors import UnavailableError
from swarm.server.engine.requests import EpisodeRequests
from tests.standins.vllm import (
    PROMPT,
    completion_chunk,
    logprob,
    of,
    plain,
    plain_choice,
    role_chunk,
    several,
    streamed,
    token_chunk,
    usage_chunk,
)
from tests.swarm.server.conftest import Rig
from tests.swarm.server.dataplane.group import ClaimedGroup, claim_group, read

pytestmark = pytest.mark.anyio

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


async def stream(group: ClaimedGroup, **body: Any) -> list[Any]:
    response = await group.rig.client.send(group.request(stream=True, **body), stream=True)
    assert response.status_code == 200, await response.aread()
    return await read(response)


def texts(events: list[Any]) -> list[str]:
    """What each choice says."""
    said: dict[int, str] = {}
    for event in events:
        for choice in event.get("choices", ()) if event != "[DONE]" else ():
            said[choice["index"]] = said.get(choice["index"], "") + (choice["delta"].get("content") or "")
    return [said[index] for index in sorted(said)]


# ---------------------------------------------------------------------- plain


@pytest.mark.parametrize("asked", [{}, {"n": 2}, {"n": None}])
async def test_one_call_samples_an_answer_for_each_episode(rig: Rig, asked: dict[str, Any]) -> None:
    # in whatever order: the index says whose it is
    rig.vllm.script.append(several(plain_choice([7, 8, 9], "length", 1), plain_choice([5, 6], "stop", 0)))
    group = await claim_group(rig)
    response = await group.chat(**asked)
    assert response.status_code == 200, response.text
    assert response.headers["x-swarm-completion-tokens"] == "2,3"
    answer = response.json()
    assert {c["index"]: c["message"]["content"] for c in answer["choices"]} == {0: "t5 t6", 1: "t7 t8 t9"}
    assert all("token_ids" not in c and c["logprobs"] is None for c in answer["choices"])
    assert (answer["model"], answer["usage"]["completion_tokens"]) == ("tiny", 5)
    [(path, sent)] = rig.vllm.requests
    assert (path, sent["n"], sent["temperature"]) == ("/v1/chat/completions", 2, 0.9)
    assert group.sampled == [[[5, 6]], [[7, 8, 9]]]
    (call,) = group.members[1].calls
    assert (call.prompt_ids, call.logprobs, call.finish_reason) == (PROMPT, [logprob(t) for t in (7, 8, 9)], "length")
    assert (await group.end_all())["error"] is None
    assert rig.controller.pool.information().completed_episodes == 2


async def test_a_call_may_be_of_some_of_the_episodes(rig: Rig) -> None:
    rig.vllm.script.append(several(plain_choice([5], "stop", 0), plain_choice([6, 7], "stop", 1)))
    group = await claim_group(rig, count=3)
    # in the order of the header
    request = group.request()
    request.headers["x-swarm-places"] = "2,0"
    response = await rig.client.send(request)
    assert (response.status_code, response.headers["x-swarm-completion-tokens"]) == (200, "1,2")
    assert rig.vllm.requests[0][1]["n"] == 2
    assert group.sampled == [[[6, 7]], [], [[5]]]


async def test_another_number_of_answers_and_places_that_make_no_sense_are_refused(rig: Rig) -> None:
    group = await claim_group(rig)
    for n in (1, 3, "3", 2.5):
        response = await group.chat(n=n)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "n")
    for places in ("", "x", "0,0", "2", "-1", "1,", "0;1", "99999999999"):
        request = group.request()
        request.headers["x-swarm-places"] = places
        response = await rig.client.send(request)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "x-swarm-places"), places
    assert rig.vllm.requests == []


async def test_the_key_of_a_group_opens_nothing_else(rig: Rig) -> None:
    group, other = await claim_group(rig), await claim_group(rig)
    group.key, other.key = other.key, group.key
    assert (await group.chat()).status_code == 401
    group.key = group.members[0].key
    assert (await group.chat()).status_code == 401
    headers = {"authorization": f"Bearer {group.members[0].key}"}
    assert (await rig.client.get(f"{group.base_url}/models", headers=headers)).status_code == 401
    headers = {"authorization": f"Bearer {other.key}"}
    assert (await rig.client.get(f"{group.base_url}/models", headers=headers)).status_code == 200
    assert rig.vllm.requests == []


async def test_an_abort_of_any_choice_repeats_the_whole_call(rig: Rig) -> None:
    rig.vllm.script.extend(
        [
            several(plain_choice([1], "stop", 0), plain_choice([2], "abort", 1)),
            several(plain_choice([1], "stop", 0)),
            several(plain_choice([3], "stop", 0), plain_choice([4], "stop", 1)),
        ]
    )
    group = await claim_group(rig)
    assert (await group.chat()).status_code == 200
    assert group.sampled == [[[3]], [[4]]]
    assert len(rig.vllm.requests) == 3


@pytest.mark.parametrize(
    ("first", "completion", "reasons"),
    [
        ({"token_ids": [5]}, None, ["1 token ids, 2 log-probabilities", ""]),
        ({"token_ids": None}, None, ["0 token ids, 2 log-probabilities", ""]),
        ({"token_ids": [5, "6"]}, None, ["not a sequence of numbers", ""]),
        ({"logprobs": {"content": [{"logprob": -9999.0}, {"logprob": -1.0}]}}, None, ["no log-probability", ""]),
        ({}, 6, ["5 tokens in all choices but 6 by usage"] * 2),
        ({"token_ids": [5]}, 9, ["1 token ids", "but 9 by usage"]),
        ({}, 5, ["", ""]),
    ],
)
async def test_a_disagreement_concerns_the_choice_that_has_it_and_of_the_sum_all(
    rig: Rig, first: dict[str, Any], completion: int | None, reasons: list[str]
) -> None:
    choices = plain_choice([5, 6], index=0, **first), plain_choice([7, 8, 9], index=1)
    rig.vllm.script.append(several(*choices, completion=completion))
    group = await claim_group(rig)
    assert (await group.chat()).json()["choices"][0]["message"]["content"] == "t5 t6"
    for why, reason, calls in zip(group.quarantined, reasons, group.sampled, strict=True):
        assert reason in why and bool(why) == bool(reason) != bool(calls)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_picture_is_answered_and_its_group_never_trained(rig: Rig, stream: bool) -> None:
    plainly = several(plain_choice([5], index=0), plain_choice([6], index=1))
    ends = of(0, token_chunk([5], "stop")), of(1, token_chunk([6], "stop"))
    rig.vllm.script.append(streamed(role_chunk(), of(1, role_chunk()), *ends, usage_chunk(2)) if stream else plainly)
    group = await claim_group(rig)
    messages = [{"role": "user", "content": [{"type": "text", "text": "what is this?"}, PICTURE]}]
    response = await group.chat(messages=messages, stream=stream)
    assert response.status_code == 200 and "t5" in response.text
    assert rig.vllm.requests[0][1]["messages"] == messages
    assert group.sampled == [[], []]
    assert all("(image_url)" in why for why in group.quarantined)


async def test_an_answer_about_a_picture_is_not_continued_from_token_ids_alone(rig: Rig) -> None:
    ends = of(0, token_chunk([5], "abort")), of(1, token_chunk([6], "stop"))
    rig.vllm.script.append(streamed(role_chunk(), of(1, role_chunk()), of(0, token_chunk([4])), *ends, usage_chunk(3)))
    group = await claim_group(rig)
    events = await stream(group, messages=[{"role": "user", "content": [PICTURE]}])
    assert "cannot be continued exactly" in str(events[-1])
    assert len(rig.vllm.requests) == 1


async def test_a_member_that_ends_takes_the_groups_call_with_it(rig: Rig) -> None:
    rig.vllm.default = rig.vllm.hang()
    group = await claim_group(rig)
    call = asyncio.create_task(group.chat())
    await rig.eventually(lambda: bool(rig.vllm.requests))
    member = group.members[1]
    await rig.post("/abort_episode", client_uuid="me", episode_uuid=member.uuid)
    response: httpx.Response = await asyncio.wait_for(call, 10)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (409, "episode_aborted")
    assert member.uuid in error["message"] and "group" in error["message"]
    await asyncio.wait_for(rig.vllm.cancelled.wait(), 10)
    assert (await group.chat()).status_code == 401
    rig.vllm.default = plain([1])
    assert (await group.members[0].chat(n=1)).status_code == 200


# ------------------------------------------------------------------- streamed


async def test_a_stream_carries_all_choices_and_records_them_before_their_ends(rig: Rig) -> None:
    hold = asyncio.Event()
    rig.vllm.script.append(
        streamed(
            role_chunk(),
            of(1, role_chunk()),
            of(0, token_chunk([5], "stop")),
            of(1, token_chunk([6])),
            of(1, token_chunk([7], "length")),
            usage_chunk(3),
            hold.wait,
        )
    )
    group = await claim_group(rig)
    response = await rig.client.send(group.request(stream=True), stream=True)
    received = b""
    async with asyncio.timeout(10):
        parts = response.aiter_bytes()
        while b"t6" not in received:
            received += await anext(parts)
        assert b'"stop"' not in received and group.sampled == [[], []]
        hold.set()
        while b'"stop"' not in received:
            received += await anext(parts)
        assert group.sampled == [[[5]], [[6, 7]]]
        async for part in parts:
            received += part
    events = [json.loads(line[6:]) for line in received.decode().splitlines() if line.startswith("data: {")]
    assert texts(events) == ["t5 ", "t6 t7 "]
    finishes = {c["index"]: c["finish_reason"] for e in events for c in e["choices"]}
    assert finishes == {0: "stop", 1: "length"}
    assert rig.vllm.requests[0][1]["n"] == 2


@pytest.mark.parametrize(
    "aborted",
    [
        streamed(role_chunk(), of(1, role_chunk()), usage_chunk(0)),
        streamed(role_chunk(), of(1, token_chunk([9], "abort")), of(0, token_chunk([9], "abort")), usage_chunk(2)),
        streamed(role_chunk(), of(1, token_chunk([9], "stop")), of(0, token_chunk([], "abort")), usage_chunk(1)),
        streamed(role_chunk(), done=False),
    ],
)
async def test_a_cut_before_anything_was_delivered_repeats_the_call(rig: Rig, aborted: Any) -> None:
    whole = streamed(
        role_chunk(), of(1, role_chunk()), token_chunk([5], "stop"), of(1, token_chunk([6], "stop")), usage_chunk(2)
    )
    rig.vllm.script.extend([aborted, whole])
    group = await claim_group(rig)
    events = await stream(group)
    assert texts(events) == ["t5 ", "t6 "]
    assert group.sampled == [[[5]], [[6]]]


async def test_the_choices_that_were_cut_are_continued_each_from_its_own_tokens(rig: Rig) -> None:
    meeting = asyncio.Barrier(2)

    def continued(body: dict[str, Any]) -> Any:
        done = body["prompt"][len(PROMPT) :]
        chunks = completion_chunk([done[-1] + 10], "stop", body["prompt"])
        return streamed(meeting.wait, chunks, usage_chunk(1, len(body["prompt"])))(body)

    rig.vllm.script.append(
        streamed(
            role_chunk(),
            of(1, token_chunk([6])),
            of(2, token_chunk([4], "stop")),
            of(0, token_chunk([5, 5])),
            of(0, token_chunk([5], "abort")),
            of(1, token_chunk([], "abort")),
            usage_chunk(5),
        )
    )
    rig.vllm.default = continued
    group = await claim_group(rig, 3)
    async with asyncio.timeout(10):
        events = await stream(group, max_tokens=50, stream_options={"include_usage": True})
    assert texts(events) == ["t5 t5 t5 t15 ", "t6 t16 ", "t4 "]
    assert "abort" not in json.dumps(events)
    assert events[-1] == "[DONE]"
    assert events[-2]["usage"] == {"prompt_tokens": 3, "completion_tokens": 7, "total_tokens": 10}
    assert {path for path, _ in rig.vllm.requests[1:]} == {"/v1/completions"}
    assert sorted(body["max_tokens"] for _, body in rig.vllm.requests[1:]) == [47, 49]
    assert group.sampled == [[[5, 5, 5, 15]], [[6, 16]], [[4]]]
    assert not any(group.quarantined)


@pytest.mark.parametrize(
    ("ends", "sampled", "quarantined"),
    [
        # held against what came before the cut
        ([usage_chunk(7)], [[], []], ["7 by usage"] * 2),
        # without it, only what was continued can be trained
        ([], [[[5, 7]], []], ["", "vLLM sent no usage"]),
    ],
)
async def test_the_usage_before_a_cut_counts(
    rig: Rig, ends: list[Any], sampled: list[Any], quarantined: list[str]
) -> None:
    rig.vllm.script += [
        streamed(role_chunk(), token_chunk([5]), of(1, token_chunk([6], "stop")), *ends, done=bool(ends)),
        streamed(completion_chunk([7], "stop", [*PROMPT, 5]), usage_chunk(1, 4)),
    ]
    group = await claim_group(rig)
    assert texts(await stream(group)) == ["t5 t7 ", "t6 "]
    assert group.sampled == sampled
    assert all(
        said in why and bool(said) == bool(why) for said, why in zip(quarantined, group.quarantined, strict=True)
    )


async def test_what_cannot_be_continued_is_quarantined_alone(rig: Rig) -> None:
    call = {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{"}}]}
    rig.vllm.script.append(
        streamed(
            role_chunk(),
            of(0, token_chunk([5], delta=call)),
            of(1, token_chunk([6], "stop")),
            of(0, token_chunk([], "abort")),
            usage_chunk(2),
        )
    )
    group = await claim_group(rig)
    events = await stream(group)
    assert events[-1]["error"]["code"] == "stream_cut" and "[DONE]" not in events
    assert texts(events[:-1])[1] == "t6 "
    assert ["could not be continued" in why for why in group.quarantined] == [True, False]
    assert group.sampled == [[], [[6]]]


# -------------------------------------------------------------------- leaving


async def test_an_answer_that_the_disk_does_not_take_is_not_given_and_not_trained(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(self: EpisodeRequests) -> None:
        raise UnavailableError("the disk is full", code="journal_unavailable")

    group = await claim_group(rig)
    with monkeypatch.context() as patch:
        patch.setattr(EpisodeRequests, "synced", full)
        response = await group.chat()
        assert (response.status_code, response.json()["error"]["code"]) == (503, "journal_unavailable")
    assert all("could not be delivered" in why for why in group.quarantined)


@pytest.mark.parametrize("streaming", [False, True])
async def test_the_end_of_an_answer_waits_for_the_disk(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, streaming: bool
) -> None:
    written, waiting = asyncio.Event(), asyncio.Event()

    async def slow(self: EpisodeRequests) -> None:
        waiting.set()
        await written.wait()

    ends = [token_chunk([5], "stop"), of(1, token_chunk([6], "stop"))]
    rig.vllm.script.append(streamed(role_chunk(), *ends, usage_chunk(2)) if streaming else plain([5]))
    group = await claim_group(rig)
    monkeypatch.setattr(EpisodeRequests, "synced", slow)
    call = asyncio.create_task(stream(group) if streaming else group.chat())
    async with asyncio.timeout(10):
        await waiting.wait()
        assert [len(calls) for calls in group.sampled] == [0, 0], "an end in this moment would be one without it"
        assert not call.done()
        written.set()
        await call
    assert [len(calls) for calls in group.sampled] == [1, 1]
