"""What only an upstream answers: passed on as it came, or a 404 that says why; and how tokens are counted."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from swarm.states import EngineState
from tests import sdks
from tests.gateway.conftest import OpenGateway
from tests.standins.swarm import Swarm
from tests.standins.vllm import listening

pytestmark = pytest.mark.anyio

HI: Any = {"role": "user", "content": "hi"}


class Upstream:
    """Says back what it gets."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, str, bytes]] = []
        self.url = ""
        self.app = Starlette(
            routes=[Route("/v1/{path:path}", self._answer, methods=["GET", "POST", "DELETE"])],
        )

    async def _answer(self, request: Request) -> Response:
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        kind = request.headers.get("content-type", "")
        self.seen.append((request.method, target, kind, await request.body()))
        if request.url.path.endswith("/missing"):
            return JSONResponse({"error": {"message": "no such thing"}}, 404)
        if request.url.path.endswith("count_tokens"):
            return JSONResponse({"input_tokens": 7})
        return Response(b"\x00answer", media_type="application/x-odd")


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    one = Upstream()
    async with listening(one.app) as url:
        one.url = f"{url}/v1"
        yield one


async def test_embeddings_and_the_rest_go_to_the_upstream_as_they_came(
    upstream: Upstream, open_gateway: OpenGateway
) -> None:
    async with open_gateway(upstream={"base_url": upstream.url}) as http:
        raw = b'{ "model":"embedder",  "input": "hi" }'
        answer = await http.post("/v1/embeddings", content=raw, headers={"content-type": "application/json"})
        assert (answer.status_code, answer.content) == (200, b"\x00answer")
        assert answer.headers["content-type"] == "application/x-odd"
        assert answer.headers["x-swarm-trained"] == "false"
        files = {"file": ("a.wav", b"\x00\xff\x01", "audio/wav")}
        sent = http.build_request("POST", "/v1/audio/transcriptions", data={"model": "w"}, files=files)
        body = b"".join([part async for part in sent.stream])  # type: ignore[union-attr]
        await http.post(
            "/v1/audio/transcriptions", content=body, headers={"content-type": sent.headers["content-type"]}
        )
        packed = {"content-type": "application/json", "content-encoding": "gzip"}
        await http.post("/v1/embeddings", content=b"\x1f\x8bpacked", headers=packed)
        await http.get("/v1/files?limit=2")
        missing = await http.delete("/v1/missing")
        assert (missing.status_code, missing.json()) == (404, {"error": {"message": "no such thing"}})
    assert [seen[:2] for seen in upstream.seen] == [
        ("POST", "/v1/embeddings"),
        ("POST", "/v1/audio/transcriptions"),
        ("POST", "/v1/embeddings"),
        ("GET", "/v1/files?limit=2"),
        ("DELETE", "/v1/missing"),
    ]
    assert upstream.seen[0][3] == raw
    assert upstream.seen[1][2:] == (sent.headers["content-type"], body)
    assert upstream.seen[2][3] == b"\x1f\x8bpacked"


async def test_without_an_upstream_the_404_says_so(gateway: httpx.AsyncClient) -> None:
    response = await gateway.post("/v1/embeddings", json={"model": "tiny", "input": "hi"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "route_not_found")
    assert "no upstream" in response.json()["error"]["message"]
    status = (await gateway.get("/status")).json()
    assert status["in_flight"] == 0


async def test_a_body_that_is_too_large_is_refused(upstream: Upstream, open_gateway: OpenGateway) -> None:
    async with open_gateway(upstream={"base_url": upstream.url}, max_body_bytes=1024) as http:
        assert (await http.post("/v1/embeddings", content=b"x" * 1025)).status_code == 413
    assert not upstream.seen


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
    plain = {"base_url": upstream.url}
    async with open_gateway(swarm_url=None, hooks=None, upstream=plain, model_aliases=["m"]) as http:
        response = await http.post(path, json=body)
        streamed = await http.post(path, json=body | {"stream": True})
    assert (response.content, streamed.content) == (b"\x00answer", b"\x00answer")
    assert json.loads(upstream.seen[0][3]) == body
    async with open_gateway(upstream=plain, model_aliases=["m"]) as http:
        assert (await http.post(path, json=body)).status_code == 400


async def test_an_upstream_counts_tokens_where_it_answers_everything(
    upstream: Upstream, open_gateway: OpenGateway
) -> None:
    async with (
        open_gateway(swarm_url=None, hooks=None, upstream={"base_url": upstream.url}, model_aliases=["m"]) as http,
        sdks.anthropic.AsyncAnthropic(base_url=str(http.base_url), api_key="any", max_retries=0) as claude,
    ):
        assert (await claude.messages.count_tokens(model="m", messages=[HI])).input_tokens == 7
    assert upstream.seen[0][:2] == ("POST", "/v1/messages/count_tokens")


async def test_what_the_upstream_keeps_is_asked_for_there(upstream: Upstream, open_gateway: OpenGateway) -> None:
    async with open_gateway(upstream={"base_url": upstream.url}) as http:
        kept = (await http.post("/v1/responses", json={"model": "tiny", "input": "hi"})).json()
        assert (await http.get(f"/v1/responses/{kept['id']}")).json() == kept
        assert not upstream.seen
        theirs = await http.get("/v1/responses/resp_theirs?include=x")
        assert (theirs.status_code, theirs.content) == (200, b"\x00answer")
        assert (await http.delete(f"/v1/responses/{kept['id']}")).json()["deleted"] is True
        await http.delete(f"/v1/responses/{kept['id']}")
    assert [seen[:2] for seen in upstream.seen] == [
        ("GET", "/v1/responses/resp_theirs?include=x"),
        ("DELETE", f"/v1/responses/{kept['id']}"),
    ]


async def test_without_an_upstream_a_response_that_is_not_kept_is_a_404(gateway: httpx.AsyncClient) -> None:
    for method in ("GET", "DELETE"):
        response = await gateway.request(method, "/v1/responses/resp_none")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "response_not_found")


async def test_v1_twice_in_an_address_is_told(gateway: httpx.AsyncClient) -> None:
    response = await gateway.post("/v1/v1/messages", json={})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "route_not_found")
    assert "contains /v1 twice" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize("model", [[], {}, 7, None])
async def test_a_model_that_is_no_name_is_the_upstreams_to_refuse(
    upstream: Upstream, open_gateway: OpenGateway, path: str, model: Any
) -> None:
    async with open_gateway(swarm_url=None, hooks=None, upstream={"base_url": upstream.url}) as http:
        response = await http.post(path, json={"model": model, "odd": [[1]]})
    assert response.status_code == 200
    assert json.loads(upstream.seen[0][3]) == {"model": model, "odd": [[1]]}


async def test_a_list_of_prompts_goes_to_an_upstream_whole(upstream: Upstream, open_gateway: OpenGateway) -> None:
    body = {"model": "m", "prompt": ["a", "b"], "stream": False}
    async with open_gateway(
        swarm_url=None, hooks=None, upstream={"base_url": upstream.url}, model_aliases=["m"]
    ) as http:
        assert (await http.post("/v1/completions", json=body)).content == b"\x00answer"
    assert [json.loads(seen[3]) for seen in upstream.seen] == [body]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_fallback_that_answers_nonsense_to_prompts_is_a_502(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway, streamed: bool
) -> None:
    swarm.state = EngineState.OFFLINE
    body = {"model": "tiny", "prompt": ["a", "b"], "stream": streamed}
    async with open_gateway(upstream={"base_url": upstream.url}, offline_wait_seconds=0.0) as http:
        response = await http.post("/v1/completions", json=body)
    code = "stream_cut" if streamed else "malformed_answer"
    assert (response.status_code, response.json()["error"]["code"]) == (502, code)
