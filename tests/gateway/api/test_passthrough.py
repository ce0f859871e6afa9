"""What only an upstream answers: passed on as it came, or a 404 that says why; and how tokens are counted."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response, StreamingResponse

from gateway.api.others import _model
from swarm.states import EngineState
from tests.gateway.conftest import Http, OpenGateway, gateway_before
from tests.standins.swarm import Swarm
from tests.standins.upstream import Upstream
from tests.standins.vllm import ENGINE_MODEL
from tests.swarm.server import conftest as server

pytestmark = pytest.mark.anyio

overrides = server.overrides
rig = server.rig

HI: Any = {"role": "user", "content": "hi"}
ODD = Response(b"\x00answer", media_type="application/x-odd")


@pytest.fixture(autouse=True)
def odd_answers(upstream: Upstream) -> None:
    upstream.answers.clear()
    upstream.default = ODD


def alone(upstream: Upstream) -> dict[str, Any]:
    """A gateway before nothing but the upstream."""
    return {"swarm_url": None, "hooks": None, "upstream": {"base_url": upstream.url}, "model_aliases": ["m"]}


async def test_embeddings_and_the_rest_go_to_the_upstream_as_they_came(
    upstream: Upstream, open_gateway: OpenGateway
) -> None:
    upstream.answers["/v1/missing"] = lambda _: JSONResponse({"error": {"message": "no such thing"}}, 404)
    files = {"file": ("a.wav", b"\x00\xff\x01", "audio/wav")}
    async with open_gateway(upstream={"base_url": upstream.url, "api_key": "theirs"}) as http:
        raw = b'{ "model":"embedder",  "input": "hi" }'
        given = {"content-type": "application/json", "authorization": "Bearer ours", "cookie": "a=b"}
        answer = await http.post("/v1/embeddings", content=raw, headers=given)
        assert (answer.status_code, answer.content) == (200, b"\x00answer")
        assert answer.headers["content-type"] == "application/x-odd"
        assert answer.headers["x-swarm-trained"] == "false"
        sent = http.build_request("POST", "/v1/audio/transcriptions", data={"model": "w"}, files=files)
        body = await sent.aread()
        await http.send(sent)
        packed = {"content-type": "application/json", "content-encoding": "gzip"}
        await http.post("/v1/embeddings", content=b"\x1f\x8bpacked", headers=packed)
        await http.get("/v1/files?limit=2")
        missing = await http.post("/v1/missing", json={})
        assert (missing.status_code, missing.json()) == (404, {"error": {"message": "no such thing"}})
    assert [seen[:2] for seen in upstream.got] == [
        ("POST", "/v1/embeddings"),
        ("POST", "/v1/audio/transcriptions"),
        ("POST", "/v1/embeddings"),
        ("GET", "/v1/files?limit=2"),
        ("POST", "/v1/missing"),
    ]
    embeddings, audio, compressed, *_ = upstream.got
    assert embeddings.raw == raw and "cookie" not in embeddings.headers
    assert embeddings.headers["authorization"] == "Bearer theirs"
    assert (audio.headers["content-type"], audio.raw) == (sent.headers["content-type"], body)
    assert (compressed.raw, compressed.headers["content-encoding"]) == (b"\x1f\x8bpacked", "gzip")


async def test_who_wants_a_websocket_through_a_proxy_is_told_at_once_to_use_http(
    upstream: Upstream, open_gateway: OpenGateway
) -> None:
    """As Codex through nginx, which takes `Upgrade` out."""
    async with open_gateway(**alone(upstream)) as http:
        answer = await http.get("/v1/responses", headers={"sec-websocket-version": "13"})
    assert (answer.status_code, answer.json()["error"]["code"], upstream.got) == (426, "no_websockets", [])


async def test_a_form_leads_to_the_route_of_the_model_that_it_names(
    upstream: Upstream, open_gateway: OpenGateway, tmp_path: Path
) -> None:
    def named(name: str) -> dict[str, Any]:
        return {"name": name, "models": [name], "swarm_url": None, "upstream": {"base_url": f"{upstream.url}/{name}"}}

    routes = [named("one"), named("two")]
    async with open_gateway(swarm_url=None, hooks=None, routes=routes) as http:
        files = {"file": ("a.wav", b"\x00\xff\r\n\r\n", "audio/wav")}
        for data in ({"model": "two"}, {"language": "en", "model": "one"}):
            answer = await http.post("/v1/audio/transcriptions", data=data, files=files)
            assert answer.status_code == 200, answer.text
    assert [seen.target for seen in upstream.got] == [f"/v1/{name}/audio/transcriptions" for name in ("two", "one")]


async def test_a_compressed_body_leads_to_the_route_of_the_model_that_it_names(
    upstream: Upstream, open_gateway: OpenGateway
) -> None:
    def named(name: str) -> dict[str, Any]:
        there = {"base_url": f"{upstream.url}/{name}", "model": "theirs"}
        return {"name": name, "models": [name], "swarm_url": None, "upstream": there}

    routes = [named("one"), named("two")]
    packed = {"content-type": "application/json", "content-encoding": "gzip"}
    async with open_gateway(swarm_url=None, hooks=None, routes=routes) as http:
        for path, model in (("embeddings", "two"), ("responses/input_tokens", "one")):
            content = gzip.compress(json.dumps({"model": model}).encode())
            answer = await http.post(f"/v1/{path}", content=content, headers=packed)
            assert answer.status_code == 200, answer.text
    assert [(seen.target, json.loads(seen.raw)["model"]) for seen in upstream.got] == [
        ("/v1/two/embeddings", "two"),
        ("/v1/one/responses/input_tokens", "theirs"),
    ]


@pytest.mark.parametrize(
    "kind", ["application/json", "Application/JSON; charset=utf-8", "Multipart/Form-Data; boundary=x"]
)
async def test_the_type_of_a_body_may_be_spelt_in_any_case(kind: str) -> None:
    form = b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\nm\r\n--x--\r\n'
    assert _model({"content-type": kind}, form if "x" in kind else b'{"model": "m"}') == "m"


async def test_a_form_whose_every_line_could_begin_a_part_is_read_at_once() -> None:
    headers = {"content-type": "multipart/form-data; boundary=x"}
    began = time.thread_time()
    assert _model(headers, b"form-data; name=model\r\n" * 50_000) is None
    assert time.thread_time() - began < 10, "other requests wait meanwhile"


@pytest.mark.parametrize(
    "path",
    [
        "/v1/./chat/completions",
        "/v1/%2e/chat/completions",
        "/v1/chat/completions%3Fa=b",
        "/v1/chat/completions%23a",
        "/v1/chat%252Fcompletions",
        "/v1//chat/completions",
        "/v1/chat//completions/",
        "/v1/v1/chat/completions",
    ],
)
async def test_no_spelling_of_its_path_takes_a_chat_past_the_gateway(
    upstream: Upstream, open_gateway: OpenGateway, path: str
) -> None:
    """Past it, an upstream would sample any model's answer, unmasked, untrained and beyond what a key opens."""
    upstream.default = JSONResponse({"detail": "Not Found"}, 404)
    upstream.answers["/v1/chat/completions"] = lambda _: ODD
    body = json.dumps({"model": "hidden", "messages": [HI]}).encode()
    base_url = upstream.url.removesuffix("/v1") if path.startswith("/v1/v1") else upstream.url
    async with open_gateway(upstream={"base_url": base_url}) as http:
        reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
        # by hand: clients make another path of it themselves
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        answer = await reader.read()
        writer.close()
    assert int(answer.split()[1]) in (307, 404), answer
    assert not any(seen.target.partition("?")[0] == "/v1/chat/completions" for seen in upstream.got)


async def test_without_an_upstream_the_404_says_so(gateway: Http) -> None:
    for method, path, code, words in (
        ("POST", "/v1/embeddings", "route_not_found", "no upstream"),
        ("POST", "/v1/v1/messages", "route_not_found", "contains /v1 twice"),
        ("GET", "/v1/responses/resp_none", "response_not_found", ""),
        ("DELETE", "/v1/responses/resp_none", "response_not_found", ""),
    ):
        response = await gateway.request(method, path, json={"model": "tiny", "input": "hi"})
        assert (response.status_code, response.json()["error"]["code"]) == (404, code)
        assert words in response.json()["error"]["message"]
    assert (await gateway.get("/status")).json()["in_flight"] == 0


@pytest.mark.parametrize("keys", [[], ["secret"]])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/messages/batches"),
        ("GET", "/v1/messages/batches/b1/results"),
        ("GET", "/v1/files"),
        ("GET", "/v1/files/f1/content"),
    ],
)
async def test_anthropics_sdk_reads_errors_in_its_own_shape(
    open_gateway: OpenGateway, method: str, path: str, keys: list[str]
) -> None:
    async with open_gateway(api_keys=keys) as http:
        answer = await http.request(method, path, headers={"anthropic-version": "2023-06-01"})
        assert answer.status_code == (401 if keys else 404)
        error = "authentication_error" if keys else "not_found_error"
        assert (answer.json()["type"], answer.json()["error"]["type"]) == ("error", error)
        other = await http.request(method, path.replace("/messages", ""))
        assert other.status_code == answer.status_code and "type" not in other.json()
    assert keys or answer.headers["request-id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"model": "m", "messages": [HI], "audio": {"voice": "alloy"}}),
        ("/v1/responses", {"model": "m", "input": "hi", "background": True}),
        ("/v1/messages", {"model": "m", "messages": [HI], "max_tokens": 9, "container": "c"}),
        ("/v1/completions", {"model": "m", "prompt": "a", "suffix": "z", "echo": True}),
    ],
)
async def test_what_only_we_cannot_carry_is_no_fault_where_an_upstream_answers_everything(
    upstream: Upstream, open_gateway: OpenGateway, path: str, body: dict[str, Any]
) -> None:
    async with open_gateway(**alone(upstream)) as http:
        for stream in (False, True):
            assert (await http.post(path, json=body | {"stream": stream})).content == b"\x00answer"
            assert upstream.got[-1].body == body | {"stream": stream}
    async with open_gateway(upstream={"base_url": upstream.url}, model_aliases=["m"]) as http:
        assert (await http.post(path, json=body)).status_code == 400


async def test_an_upstream_that_answers_everything_gets_everything_whole(
    upstream: Upstream, open_gateway: OpenGateway
) -> None:
    """Prompts in a list, tokens to count, and whatever is given for a model; and the query, such as Azure's and that of
    Anthropic's SDKs."""
    odd = [{"model": model, "odd": [[1]]} for model in ([], {}, 7, None)]
    asked = [
        ("/v1/completions", {"model": "m", "prompt": ["a", "b"], "stream": False}),
        ("/v1/messages/count_tokens", {"model": "m", "messages": [HI]}),
        *(("/v1/chat/completions", body) for body in odd),
        *(("/v1/messages", body) for body in odd),
    ]
    query = "api-version=preview&beta=true"
    async with open_gateway(**alone(upstream)) as http:
        for path, body in asked:
            assert (await http.post(f"{path}?{query}", json=body)).content == b"\x00answer"
    assert [(seen.target, seen.body) for seen in upstream.got] == [(f"{path}?{query}", body) for path, body in asked]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [HI], "functions": [{"name": "f"}]}),
        ("/v1/responses", {"input": "hi", "background": True}),
        ("/v1/messages", {"messages": [HI], "max_tokens": 9, "container": "c"}),
        ("/v1/completions", {"prompt": "a", "suffix": "z", "echo": True}),
        ("/v1/messages/count_tokens", {"messages": [HI]}),
    ],
)
async def test_the_upstreams_name_of_its_model_is_in_all_that_a_model_answers(
    upstream: Upstream, open_gateway: OpenGateway, path: str, body: dict[str, Any]
) -> None:
    """Embeddings are of another model."""
    settings = alone(upstream) | {"upstream": {"base_url": upstream.url, "model": "big"}}
    async with open_gateway(**settings) as http:
        assert (await http.post(path, json={"model": "m", **body})).content == b"\x00answer"
        await http.post("/v1/embeddings", json={"model": "m", "input": "hi"})
    assert [seen.body for seen in upstream.got] == [{"model": "big", **body}, {"model": "m", "input": "hi"}]


async def test_what_the_upstream_keeps_is_asked_for_there(upstream: Upstream, open_gateway: OpenGateway) -> None:
    async with open_gateway(upstream={"base_url": upstream.url}) as http:
        kept = (await http.post("/v1/responses", json={"model": "tiny", "input": "hi"})).json()
        assert (await http.get(f"/v1/responses/{kept['id']}")).json() == kept
        assert not upstream.got
        theirs = await http.get("/v1/responses/resp_theirs?include=x")
        assert (theirs.status_code, theirs.content) == (200, b"\x00answer")
        assert (await http.delete(f"/v1/responses/{kept['id']}")).json()["deleted"] is True
        await http.delete(f"/v1/responses/{kept['id']}")
    assert [seen[:2] for seen in upstream.got] == [
        ("GET", "/v1/responses/resp_theirs?include=x"),
        ("DELETE", f"/v1/responses/{kept['id']}"),
    ]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("nonsense", ["\0answer", '{"choices": [5]}'])
async def test_a_fallback_that_answers_nonsense_to_prompts_is_a_502(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway, streamed: bool, nonsense: str
) -> None:
    swarm.state = EngineState.OFFLINE
    upstream.answers["/v1/completions"] = lambda _: Response(nonsense)
    body = {"model": "tiny", "prompt": ["a", "b"], "stream": streamed}
    async with open_gateway(upstream={"base_url": upstream.url}, offline_wait_seconds=0.0) as http:
        response = await http.post("/v1/completions", json=body)
    code = "stream_cut" if streamed else "malformed_answer"
    assert (response.status_code, response.json()["error"]["code"]) == (502, code)


async def test_usage_that_an_upstream_counts_with_each_chunk_is_added_once_for_each_prompt(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway
) -> None:
    swarm.state = EngineState.OFFLINE

    async def body() -> AsyncIterator[bytes]:
        for done in (1, 2, None):
            choices = [] if done is None else [{"index": 0, "text": "a", "finish_reason": "stop" if done > 1 else None}]
            usage = {"prompt_tokens": 3, "completion_tokens": done or 2, "total_tokens": 3 + (done or 2)}
            yield b"data: " + json.dumps({"id": "c", "choices": choices, "usage": usage}).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"

    upstream.answers["/v1/completions"] = lambda _: StreamingResponse(body(), media_type="text/event-stream")
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"model": "tiny", "prompt": ["a", "b"], "stream": True, "stream_options": options}
    async with open_gateway(upstream={"base_url": upstream.url}, offline_wait_seconds=0.0) as http:
        answer = await http.post("/v1/completions", json=asked)
    last = json.loads(answer.text.split("data: ")[-2])
    assert last["usage"] == {"prompt_tokens": 6, "completion_tokens": 4, "total_tokens": 10}


async def test_the_engine_itself_says_what_tokens_a_text_has(rig: server.Rig, tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []

    def answer(body: dict[str, Any]) -> JSONResponse:
        asked.append(body)
        if body.get("prompt") == "":
            return JSONResponse({"error": {"message": "no text", "type": "BadRequestError", "code": 400}}, 400)
        return JSONResponse(
            {"tokens": [1, 2], "count": 2, "max_model_len": 100} if "tokens" not in body else {"prompt": "ab"}
        )

    rig.vllm.default = answer
    async with gateway_before(str(rig.client.base_url), tmp_path, model_aliases=["m"]) as http:
        counted = await http.post("/tokenize", json={"model": "m", "prompt": "ab", "add_special_tokens": False})
        assert counted.json() == {"tokens": [1, 2], "count": 2, "max_model_len": 100}
        assert (await http.post("/detokenize", json={"tokens": [1, 2]})).json() == {"prompt": "ab"}
        refused = await http.post("/tokenize", json={"prompt": ""})
        assert (refused.status_code, refused.json()["error"]["message"]) == (400, "no text")
        assert (await http.post("/tokenize", json={"model": "unheard"})).status_code == 404
    assert asked[0] == {"model": ENGINE_MODEL, "prompt": "ab", "add_special_tokens": False}


async def test_where_there_is_no_engine_tokens_are_not_told(upstream: Upstream, open_gateway: OpenGateway) -> None:
    async with open_gateway(**alone(upstream)) as http:
        answer = await http.post("/tokenize", json={"prompt": "ab"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "route_not_found")
