"""``redact: before_sampling``: placeholders are sampled, kept and trained, and the user gets the values back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse, StreamingResponse

from tests.gateway.conftest import CHAT, gateway_before
from tests.gateway.data.test_erasure import traces
from tests.standins.upstream import Upstream
from tests.standins.vllm import plain_choice, role_chunk, several, streamed, token_chunk, usage_chunk
from tests.swarm.server import conftest as server

pytestmark = pytest.mark.anyio

overrides = server.overrides
rig = server.rig

EMAIL, ANSWER, MASKED = "anna.schmidt@example.org", "I write to {}.", "[EMAIL_1]"
DIALECTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": f"write to {EMAIL}"}]},
    "/v1/completions": {"prompt": f"write to {EMAIL}"},
    "/v1/responses": {"input": f"write to {EMAIL}", "instructions": f"for {EMAIL}"},
    "/v1/messages": {"max_tokens": 9, "messages": [{"role": "user", "content": f"write to {EMAIL}"}]},
}


def said(message: dict[str, Any]) -> Callable[[dict[str, Any]], Any]:
    """Two whole answers that say this, or a stream that cuts the placeholder."""

    def answering(sent: dict[str, Any]) -> Any:
        text = message.get("content") or ""
        calls = message.get("tool_calls") or []
        if not sent.get("stream"):
            choices = [plain_choice([1] * (index + 1), index=index) for index in range(sent.get("n") or 1)]
            for choice in choices:
                choice["message"] |= message
                choice["text"] = text
            return several(*choices)(sent)
        deltas: list[dict[str, Any]] = [{"content": piece} for piece in (text[:15], text[15:]) if piece]
        for index, call in enumerate(calls):
            arguments = call["function"]["arguments"]
            deltas.append({"tool_calls": [{**call, "index": index, "function": {**call["function"], "arguments": ""}}]})
            deltas += [
                {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}
                for piece in (arguments[:12], arguments[12:])
            ]
        chunks = [token_chunk([number + 1], delta=delta) for number, delta in enumerate(deltas)]
        return streamed(role_chunk(), *chunks, token_chunk([9], "stop", delta={}), usage_chunk(len(deltas) + 1))(sent)

    return answering


def text_of(answer: httpx.Response, *, stream: bool) -> str:
    """What a user reads, of a stream its pieces together."""
    if not stream:
        return answer.text
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    pieces: list[str] = []
    for event in events:
        for choice in event.get("choices") or []:
            pieces.append(choice.get("text") or (choice.get("delta") or {}).get("content") or "")
        delta = event.get("delta")
        pieces.append(delta if isinstance(delta, str) else (delta or {}).get("text") or "")
    return "".join(pieces)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("policy", ["best", "first"])
# the stand-in gives raw prompts no text of its own
@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages"])
async def test_the_model_sees_placeholders_and_the_user_the_values(
    rig: server.Rig, tmp_path: Path, policy: str, path: str, stream: bool
) -> None:
    rig.vllm.default = said({"content": ANSWER.format(MASKED)})
    async with gateway_before(
        str(rig.client.base_url), tmp_path, policy=policy, data={"redact": "before_sampling"}
    ) as http:
        answer = await http.post(path, json={"model": "tiny", "stream": stream, **DIALECTS[path]})
        assert answer.status_code == 200, answer.text
        assert ANSWER.format(EMAIL) in text_of(answer, stream=stream), answer.text
        assert answer.headers.get("x-swarm-drop-reason") is None
        sent = json.dumps([body for _, body in rig.vllm.requests])
        assert MASKED in sent and EMAIL not in sent
        await rig.eventually(lambda: not rig.controller.pool.information().running_episodes)
        assert rig.controller.pool.information().completed_episodes == 2
    assert traces(tmp_path, EMAIL.encode()) == set()


async def test_a_session_whose_name_is_private_is_ended_told_and_deleted_by_that_name(
    rig: server.Rig, tmp_path: Path
) -> None:
    rig.vllm.default = said({"content": "Hello."})
    async with gateway_before(str(rig.client.base_url), tmp_path, data={"redact": "before_sampling"}) as http:
        asked = {"model": "tiny", **DIALECTS[CHAT], "metadata": {"session_id": EMAIL}}
        assert (await http.post(CHAT, json=asked)).status_code == 200
        ended = await http.post(f"/v1/sessions/{EMAIL}/end", json={"score": 1})
        assert ended.json() == {"session_id": EMAIL, "ended": True}
        [report] = (await http.get(f"/v1/sessions/{EMAIL}")).json()["on"]
        assert report["ended"] == "endpoint"
        assert traces(tmp_path, EMAIL.encode()) == set()
        await rig.eventually(lambda: rig.controller.pool.information().completed_episodes == 2)
        deleted = (await rig.client.post("/data/delete", params={"session": EMAIL})).json()
        assert deleted["episodes"] == {"waiting": 2}
    assert rig.controller.pool.information().completed_episodes == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", ["json_object", "text"])
async def test_an_answer_that_has_to_be_json_stays_json(
    rig: server.Rig, tmp_path: Path, stream: bool, form: str
) -> None:
    address = '12 "Mill" Lane\nSpringfield'
    data = {"redact": "before_sampling", "patterns": {"address": r"12 .*\n\w+"}}
    rig.vllm.default = said({"content": '{"address": "[ADDRESS_1]"}'})
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": f"Where? {address}"}], "stream": stream}
    async with gateway_before(str(rig.client.base_url), tmp_path, policy="first", data=data) as http:
        answer = await http.post(CHAT, json={"model": "tiny", "response_format": {"type": form}, **asked})
    text = text_of(answer, stream=True) if stream else answer.json()["choices"][0]["message"]["content"]
    if form == "text":
        assert text == f'{{"address": "{address}"}}'
    else:
        assert json.loads(text) == {"address": address}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_gets_its_values(rig: server.Rig, tmp_path: Path, stream: bool) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "mail", "arguments": f'{{"to": "{MASKED}"}}'}}
    rig.vllm.default = said({"content": None, "tool_calls": [call]})
    async with gateway_before(
        str(rig.client.base_url), tmp_path, policy="first", data={"redact": "before_sampling"}
    ) as http:
        answer = await http.post(CHAT, json={"model": "tiny", "stream": stream, **DIALECTS[CHAT]})
        assert answer.status_code == 200 and MASKED not in answer.text, answer.text
        if not stream:
            (asked,) = answer.json()["choices"][0]["message"]["tool_calls"]
            assert json.loads(asked["function"]["arguments"]) == {"to": EMAIL}
        else:
            assert EMAIL in answer.text


async def test_a_conversation_goes_on(rig: server.Rig, tmp_path: Path) -> None:
    rig.vllm.default = said({"content": ANSWER.format(MASKED)})
    async with gateway_before(str(rig.client.base_url), tmp_path, data={"redact": "before_sampling"}) as http:
        talk = [*DIALECTS[CHAT]["messages"]]
        for _ in range(2):
            answer = await http.post(CHAT, json={"model": "tiny", "messages": talk, "user": EMAIL})
            talk += [answer.json()["choices"][0]["message"], {"role": "user", "content": "and bob@example.org?"}]
        sent = [body["messages"] for _, body in rig.vllm.requests]
        assert [message["content"] for message in sent[-1]] == [
            f"write to {MASKED}",
            ANSWER.format(MASKED),
            "and [EMAIL_2]?",
        ]
        sessions = (await http.get("/status")).json()["sessions"]
        assert (sessions["open"], sum(sessions["linked"].values())) == (1, 1)


async def test_what_the_model_makes_up_itself_is_not_trained(rig: server.Rig, tmp_path: Path) -> None:
    rig.vllm.default = said({"content": "I know bob@example.org"})
    async with gateway_before(str(rig.client.base_url), tmp_path, data={"redact": "before_sampling"}) as http:
        answer = await http.post(CHAT, json={"model": "tiny", **DIALECTS[CHAT]})
        assert answer.headers["x-swarm-drop-reason"] == "private_data"


async def test_a_kept_response_has_no_values(rig: server.Rig, tmp_path: Path) -> None:
    rig.vllm.default = said({"content": ANSWER.format(MASKED)})
    async with gateway_before(str(rig.client.base_url), tmp_path, data={"redact": "before_sampling"}) as http:
        answer = await http.post("/v1/responses", json={"model": "tiny", **DIALECTS["/v1/responses"]})
        assert (await http.get(f"/v1/responses/{answer.json()['id']}")).status_code == 404
        harmless = await http.post("/v1/responses", json={"model": "tiny", "input": "hello"})
        assert (await http.get(f"/v1/responses/{harmless.json()['id']}")).status_code == 200


FUNCTION = {"type": "function", "name": "mail", "description": f"Write to {EMAIL}.", "parameters": {}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("redact", "more"),
    [("group", {"metadata": {"customer": EMAIL}}), ("before_sampling", {"tools": [FUNCTION], "tool_choice": "none"})],
)
async def test_a_response_that_repeats_a_private_setting_is_not_kept(
    rig: server.Rig, tmp_path: Path, stream: bool, redact: str, more: dict[str, Any]
) -> None:
    async with gateway_before(str(rig.client.base_url), tmp_path, data={"redact": redact}) as http:
        answer = await http.post("/v1/responses", json={"model": "tiny", "input": "hello", "stream": stream, **more})
        told = answer.json() if not stream else json.loads(answer.text.split("data: ")[-1])["response"]
        assert EMAIL in json.dumps(told)
        assert (await http.get(f"/v1/responses/{told['id']}")).status_code == 404


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_upstream_gets_placeholders_too(rig: server.Rig, tmp_path: Path, path: str, stream: bool) -> None:
    def answering(sent: dict[str, Any]) -> Any:
        if "prompt" not in sent:
            return said({"content": ANSWER.format(MASKED)})(sent)
        text = ANSWER.format(MASKED)
        if not stream:
            return several({"index": 0, "text": text, "finish_reason": "stop"}, completion=1)(sent)
        choices: list[dict[str, Any]] = [{"index": 0, "text": piece} for piece in (text[:15], text[15:])]
        return streamed(*[{"choices": [choice]} for choice in choices])(sent)

    rig.vllm.default = answering
    upstream = {"base_url": f"{rig.vllm_address}/v1" if "://" in rig.vllm_address else f"http://{rig.vllm_address}/v1"}
    nobody: Any = None
    async with gateway_before(nobody, tmp_path, upstream=upstream, data={"redact": "before_sampling"}) as http:
        answer = await http.post(path, json={"model": "tiny", "stream": stream, **DIALECTS[path]})
        assert answer.status_code == 200, answer.text
        assert ANSWER.format(EMAIL) in text_of(answer, stream=stream), answer.text
    sent = json.dumps([body for _, body in rig.vllm.requests])
    assert MASKED in sent and EMAIL not in sent


@pytest.mark.parametrize("is_whole", [False, True])
async def test_an_upstreams_stream_that_broke_off_is_not_taken_for_a_whole_one(
    upstream: Upstream, tmp_path: Path, is_whole: bool
) -> None:
    events = [f'data: {{"choices": [{{"index": 0, "delta": {{"content": "to {MASKED}"}}}}]}}\n\n']
    events += ["data: [DONE]\n\n"] if is_whole else []
    upstream.answers[CHAT] = lambda _: StreamingResponse(iter(events), media_type="text/event-stream")
    nobody: Any = None
    settings: dict[str, Any] = {"upstream": {"base_url": upstream.url}, "data": {"redact": "before_sampling"}}
    async with gateway_before(nobody, tmp_path, **settings) as http:
        body = {"model": "tiny", "stream": True, "messages": [{"role": "user", "content": f"write to {EMAIL}"}]}
        answer = await http.post(CHAT, json=body)
    assert EMAIL in answer.text and ("[DONE]" in answer.text) == is_whole, answer.text


@pytest.mark.parametrize("stream", [False, True])
async def test_of_several_prompts_an_upstream_gets_each_with_its_placeholders(
    rig: server.Rig, tmp_path: Path, stream: bool
) -> None:
    def answering(sent: dict[str, Any]) -> Any:
        choice = {"index": 0, "text": f"so {sent['prompt']}", "finish_reason": "stop"}
        return streamed({"choices": [choice]})(sent) if stream else several(choice, completion=1)(sent)

    rig.vllm.default = answering
    nobody: Any = None
    upstream = {"base_url": f"http://{rig.vllm_address}/v1"}
    async with gateway_before(nobody, tmp_path, upstream=upstream, data={"redact": "before_sampling"}) as http:
        prompts = ["hello", f"write to {EMAIL}"]
        answer = await http.post("/v1/completions", json={"model": "tiny", "stream": stream, "prompt": prompts})
        assert answer.status_code == 200, answer.text
        said = text_of(answer, stream=stream)
        assert "so hello" in said and f"so write to {EMAIL}" in said
        # what no dialect can read cannot be masked either
        unread = await http.post("/v1/completions", json={"model": "tiny", "prompt": "hi", "suffix": EMAIL})
        assert unread.status_code == 400
    sent = [body["prompt"] for _, body in rig.vllm.requests]
    assert sorted(sent) == ["hello", f"write to {MASKED}"]


async def test_an_upstream_is_asked_for_the_prompt_too(upstream: Upstream, tmp_path: Path) -> None:
    said = {"choices": [{"index": 0, "text": f"write to {MASKED}. I do", "finish_reason": "stop"}]}
    upstream.answers["/v1/completions"] = lambda _: JSONResponse(said)
    nobody: Any = None
    settings: dict[str, Any] = {"upstream": {"base_url": upstream.url}, "data": {"redact": "before_sampling"}}
    async with gateway_before(nobody, tmp_path, **settings) as http:
        body = {"model": "tiny", "prompt": f"write to {EMAIL}", "echo": True, "best_of": 1, "logprobs": None}
        answer = await http.post("/v1/completions", json=body)
    assert answer.json()["choices"][0]["text"] == f"write to {EMAIL}. I do"
    assert upstream.got[-1].body == {"model": "tiny", "prompt": f"write to {MASKED}", "echo": True}


async def test_tokens_are_counted_of_placeholders(rig: server.Rig, upstream: Upstream, tmp_path: Path) -> None:
    """By the engine, and by an upstream, which gets pictures as they are."""
    counting = "/v1/messages/count_tokens"
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": f"{EMAIL}="}}
    blocks = [{"type": "text", "text": f"write to {EMAIL}"}, picture]
    body = {"model": "tiny", "system": f"for {EMAIL}", "messages": [{"role": "user", "content": blocks}]}
    upstream.answers[counting] = lambda _: JSONResponse({"input_tokens": 3})
    rig.vllm.default = lambda _: JSONResponse({"count": 5, "tokens": [], "max_model_len": 9})
    for swarm_url, count in ((str(rig.client.base_url), 5), (None, 3)):
        settings: dict[str, Any] = {"swarm_url": swarm_url, "upstream": {"base_url": upstream.url}}
        async with gateway_before(folder=tmp_path, data={"redact": "before_sampling"}, **settings) as http:
            assert (await http.post(counting, json=body)).json() == {"input_tokens": count}
    (_, counted), (asked,) = rig.vllm.requests[-1], upstream.got
    assert EMAIL not in json.dumps(counted["messages"][0]) and MASKED in json.dumps(counted)
    assert asked.body["messages"][0]["content"] == [{"type": "text", "text": f"write to {MASKED}"}, picture]
    assert asked.body["system"] == f"for {MASKED}"
