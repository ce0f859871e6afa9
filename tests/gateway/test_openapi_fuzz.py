"""schemathesis against a live gateway, from the gateway's own document: no failure of ours, no hang, answers that
conform, and afterwards nothing that is held for anybody.

Bodies that fit their schema and bodies that do not, with every header that a caller may set; every second case is about
an answer, a session or a model that there is. Once before a swarm server whose engine is scripted, and once before
nothing but an upstream.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import requests
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.app import ANY_OTHER, create_app
from gateway.config.gateway import GatewayConfig
from swarm.server.app import create_app as create_swarm
from swarm.server.config import ServerConfig
from swarm.server.engine.controller import Controller
from tests.gateway.conftest import write_hooks
from tests.gateway.resilience.rig import until_async
from tests.openapi import SECONDS, Caller, operations_of, routes_of
from tests.standins.vllm import (
    PROMPT,
    ScriptedVllm,
    completion_chunk,
    of,
    plain,
    role_chunk,
    streamed,
    token_chunk,
    told,
    usage_chunk,
)
from tests.standins.vllm import listening as serving
from tests.swarm.server.conftest import JOB, ready

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

MODEL = JOB.model_name
EXAMPLES = 20
#: What vLLM samples at most in one call here.
_MOST_CHOICES = 8


SAID: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
#: what the dialects need: the document allows them any object
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": SAID,
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": SAID | {"model": MODEL, "max_tokens": 8},
    "/v1/messages/count_tokens": SAID | {"model": MODEL},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1, 2]},
}
#: headers that the dialects read
HEADERS = st.fixed_dictionaries(
    {},
    optional={
        "x-swarm-policy": st.from_regex(r"^(first|best(;quorum=[1-9]|;deadline=[1-9](\.[0-9])?)?)$", fullmatch=True),
        "x-swarm-train": st.sampled_from(["true", "false"]),
        "x-swarm-when-batch-waits": st.sampled_from(["best", "single"]),
        "x-swarm-session": st.from_regex(r"[!-~]{1,20}", fullmatch=True),
        "idempotency-key": st.from_regex(r"[!-~]{1,20}", fullmatch=True),
    },
)


def engine(body: dict[str, Any]) -> Any:
    """vLLM, for chats, raw prompts and counting: for counting alone nothing is asked of how to answer."""
    if {"n", "return_token_ids", "max_tokens"}.isdisjoint(body):
        return JSONResponse({"count": 3, "max_model_len": 4096, "tokens": PROMPT})
    choices = body.get("n") or 1
    if choices > _MOST_CHOICES:
        return JSONResponse({"error": {"message": "n is too large", "type": "BadRequestError", "code": 400}}, 400)
    if body.get("stream") and "prompt" in body:
        first = completion_chunk([21], prompt=PROMPT)
        parts = [of(index, one) for index in range(choices) for one in (first, completion_chunk([22], "stop"))]
        return streamed(*parts, usage_chunk(2 * choices))(body)
    if body.get("stream"):
        parts = [of(index, one) for index in range(choices) for one in (role_chunk(), token_chunk([1, 2], "stop"))]
        return streamed(*parts, usage_chunk(2 * choices))(body)
    if "prompt" in body:
        return told(*([[21, 22]] * choices))(body)
    return plain([1, 2])(body)


class GatewayCaller(Caller):
    """Half of its cases are about something that there is."""

    #: whether anything was asked to come back
    put_off = False

    def prepare(self, case: Any) -> None:
        if next(self.turn):
            self.name_what_is_there(case)

    def sent(self, case: Any) -> requests.Response:
        answer = super().sent(case)
        # the engine is there all the time: one that is asked to come back is on a machine that is too slow
        assert answer.status_code != 503 or "retry-after" in answer.headers, f"{case.as_curl_command()}: {answer.text}"
        self.put_off |= answer.status_code in (429, 503)
        if "event-stream" in answer.headers.get("content-type", ""):
            assert "internal error" not in answer.text, f"{case.as_curl_command()}: {answer.text}"
        return answer

    def name_what_is_there(self, case: Any) -> None:
        """Let the case be about an answer that was given, a session that goes on, or a model that is served, or let it
        have a good body with whatever was drawn beside it."""
        if isinstance(case.body, dict):
            case.body |= GOOD.get(case.path, {})
        if case.path in ("/v1/feedback", "/v1/sessions/{id}/end"):
            given = self.made("/v1/chat/completions", SAID, {"x-swarm-session": "known"})
            if isinstance(case.body, dict) and "completion_id" in case.body:
                case.body["completion_id"] = given
        real = {"id": "known", "name": MODEL}
        if "response_id" in case.path_parameters:
            real["response_id"] = self.made("/v1/responses", {"input": "hi"}, {})
        case.path_parameters = {name: real[name] for name in case.path_parameters}

    def made(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> str:
        return str(self.asked("POST", path, body, headers).json().get("id"))

    def asked(self, method: str, path: str, body: dict[str, Any] | None, headers: dict[str, str]) -> requests.Response:
        """The answer once nobody is asked to come back."""
        deadline = time.monotonic() + SECONDS
        while True:
            answer = self.session.request(method, f"{self.url}{path}", json=body, headers=headers, timeout=SECONDS)
            if answer.status_code not in (429, 503) or time.monotonic() > deadline:
                return answer
            time.sleep(0.1)

    def good(self, method: str, path: str) -> int:
        """The status of a request to this route that nothing is wrong with."""
        known = {"x-swarm-session": "known"}
        names = {"id": "known", "name": MODEL}
        body = GOOD.get(path)
        if path in ("/v1/feedback", "/v1/sessions/{id}/end"):
            given = self.made("/v1/chat/completions", SAID, known)
            body = {"completion_id": given, "score": 1.0} if path == "/v1/feedback" else None
        if "{response_id}" in path:
            names["response_id"] = self.made("/v1/responses", {"input": "hi"}, {})
        return self.asked(method, path.format(**names), body, {}).status_code


def forwarded(path: str) -> bool:
    """Whether it is a command for the swarm server: fuzzed there, and some would stop the engine behind this test."""
    return path.startswith("/admin/") and path != "/admin/reload"


def not_fuzzed(route: Route) -> bool:
    return not route.include_in_schema or route.path == ANY_OTHER or forwarded(route.path)


def fuzz(url: str) -> dict[str, set[int]]:
    """Ask every route; the statuses that each answered."""
    with contextlib.closing(GatewayCaller(url)) as caller:
        for operation in operations_of(url):
            if not forwarded(operation.path):
                caller.ask(operation, EXAMPLES, HEADERS if operation.path in GOOD else st.just({}))
        for label, seen in caller.statuses.items():
            status = caller.good(*label.split(" "))
            assert status == 200 or 200 not in seen, f"{label}: {status}"
            # on a machine that is too slow the few examples that fit may all have been put off; and whether feedback is
            # drawn that says something of an answer, and nothing that contradicts it, is a matter of chance
            if caller.put_off or label == "POST /v1/feedback":
                seen.add(status)
    return caller.statuses


async def rested(url: str) -> dict[str, Any]:
    """The status of the gateway once it has nothing to do for any request any more."""
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=SECONDS) as http:

        async def nothing_is_held() -> bool:
            status = (await http.get("/status")).json()
            loads = [route["load"] for route in status["routes"].values()]
            held = [load[what] for load in loads for what in ("running", "waiting")]
            return not (status["in_flight"] or status["background"] or any(held))

        await until_async(nothing_is_held, SECONDS, "the gateway still holds something")
        return (await http.get("/status")).json()


async def test_before_a_swarm_server(tmp_path: Path) -> None:
    vllm = ScriptedVllm()
    vllm.default = engine
    swarm = create_swarm(ServerConfig(run_dir=tmp_path / "run"))
    hooks = str(write_hooks(tmp_path / "hooks"))
    async with (
        serving(vllm.app) as vllm_url,
        serving(swarm) as swarm_url,
        httpx.AsyncClient(base_url=swarm_url, trust_env=False, timeout=SECONDS) as server,
    ):
        # answered once the lifespan has begun
        await server.get("/health")
        controller: Controller = swarm.state.controller
        # no batch is ever full
        controller.sync_job(JOB.model_copy(update={"batch_size": 200_000}))
        controller.boot()
        controller.rollout_ready(ready(vllm_url.removeprefix("http://")))
        app = create_app(GatewayConfig(swarm_url=swarm_url, hooks=hooks))
        async with serving(app) as url:
            statuses = await asyncio.to_thread(fuzz, url)
            trained = (await rested(url))["groups"]["trained"]
        status = (await server.get("/status?steps=0")).json()
    assert (status["pool"]["running_episodes"], status["waiting_claims"]) == (0, 0)
    assert status["pool"]["completed_episodes"] == trained * JOB.num_repeat > 0
    assert set(statuses) == routes_of(app, not_fuzzed)
    # it was not all refused at the door; there is no file to read again
    assert {label for label, seen in statuses.items() if 200 not in seen} == {"POST /admin/reload"}


async def test_before_an_upstream() -> None:
    async def answer(request: Request) -> Response:
        return JSONResponse({"id": "some", "path": request.url.path, "length": len(await request.body())})

    upstream = Starlette(routes=[Route("/v1/{path:path}", answer, methods=["GET", "POST", "DELETE"])])
    async with serving(upstream) as address:
        config = GatewayConfig(swarm_url=None, upstream={"base_url": f"{address}/v1"}, model_aliases=[MODEL])
        app = create_app(config)
        async with serving(app) as url:
            statuses = await asyncio.to_thread(fuzz, url)
            await rested(url)
    assert set(statuses) == routes_of(app, not_fuzzed)
    # what an upstream answers is no group: nothing is to be said of it, and no session begins
    ours = {"POST /admin/reload", "POST /v1/feedback", "GET /v1/sessions/{id}", "POST /v1/sessions/{id}/end"}
    # only an engine of its own is asked for tokens
    ours |= {"POST /tokenize", "POST /detokenize"}
    assert {label for label, seen in statuses.items() if 200 not in seen} == ours
