"""When the swarm cannot serve: wait, then the fallback upstream, then a 503 that says when to come back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from adapters.dialects import MessagesDialect
from adapters.dialects.response_items import sealed
from adapters.dialects.sse import encode_named
from gateway.api.responses import ResponsesEndpoint
from gateway.types import Relayed
from swarm.states import EngineState
from tests.gateway.conftest import BODY, CHAT, OpenGateway, ask
from tests.standins.swarm import Swarm, as_one, completion, error, once, said, streamed
from tests.standins.upstream import Upstream
from tests.standins.vllm import listening

pytestmark = pytest.mark.anyio

NOWHERE = "http://127.0.0.1:9"
OUTCOME = "def on_session_end(session, context):\n    return [1.0] * len(session.turns)\n"
AWAY: dict[str, Any] = {"swarm_url": NOWHERE, "offline_wait_seconds": 0}


def engine_itself(swarm: Swarm) -> None:
    """Let the engine answer without an episode, at the swarm server's own address."""

    async def answer(request: Request) -> Response:
        if "x-swarm-samples" not in request.headers:
            return streamed("from the engine") if (await request.json()).get("stream") else said("from the engine")
        return as_one([said("from the engine")] * int(request.headers["x-swarm-samples"]))

    swarm.app.router.routes.append(Route(CHAT, answer, methods=["POST"]))


def away_behind_a_proxy(swarm: Swarm, path: str, status: int, times: int | None = None) -> list[Request]:
    """Let a proxy answer the next ``times`` requests at ``path``, or all, with its word that nobody is there; these
    requests."""
    asked: list[Request] = []

    async def answer(request: Request) -> Response:
        asked.append(request)
        if len(asked) == times:
            swarm.app.router.routes.remove(proxy)
        return HTMLResponse("<html>nobody is here</html>", status)

    swarm.app.router.routes.insert(0, proxy := Route(path, answer, methods=["POST"]))
    return asked


@pytest.mark.parametrize("swarm_url", [NOWHERE, None])
async def test_without_a_fallback_it_is_a_503_with_retry_after(
    swarm: Swarm, open_gateway: OpenGateway, swarm_url: str | None
) -> None:
    swarm.state = EngineState.OFFLINE
    async with open_gateway(swarm_url=swarm_url or swarm.url, offline_wait_seconds=0.1) as http:
        response = await ask(http)
        error = response.json()["error"]
        assert (response.status_code, error["type"]) == (503, "service_unavailable_error")
        assert error["code"] == ("server_unreachable" if swarm_url else "engine_offline")
        assert int(response.headers["retry-after"]) >= 1
        assert response.headers["x-should-retry"] == "true"
        assert (await http.get("/status")).json()["errors"] == {error["code"]: 1}


@pytest.mark.parametrize("status", [502, 503, 504])
async def test_a_server_that_is_away_behind_a_proxy_is_waited_for_as_any_other(
    swarm: Swarm, open_gateway: OpenGateway, status: int
) -> None:
    """As in a restart."""
    # a call is tried three times
    away_behind_a_proxy(swarm, "/claim_group", status, 6)
    async with open_gateway() as http:
        assert (await ask(http)).headers["x-swarm-trained"] == "true"
        away_behind_a_proxy(swarm, "/claim_group", status)
    async with open_gateway(offline_wait_seconds=0.1) as http:
        response = await ask(http)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "server_unreachable")
    assert "html" not in response.text and f"HTTP {status}" in response.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [502, 503])
async def test_what_trains_nothing_waits_for_a_server_behind_a_proxy_too(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway, status: int, stream: bool
) -> None:
    """The proxy's word may be that of a restart; and where it lasts, the fallback answers as soon as for any other."""
    engine_itself(swarm)
    asked = away_behind_a_proxy(swarm, CHAT, status, 3)
    untrained = {"x-swarm-train": "false"}
    async with open_gateway() as http:
        response = await ask(http, untrained, stream=stream)
        assert response.status_code == 200 and "engine" in response.text and len(asked) == 3
    away_behind_a_proxy(swarm, CHAT, status)
    async with open_gateway(offline_wait_seconds=0.1, upstream={"base_url": upstream.url}) as http:
        response = await ask(http, untrained, stream=stream)
        assert (response.status_code, response.headers["x-swarm-drop-reason"]) == (200, "server_unreachable")


async def test_the_best_of_untrained_answers_waits_no_longer_for_a_server_that_is_down(
    upstream: Upstream, open_gateway: OpenGateway
) -> None:
    swarm = Swarm()
    engine_itself(swarm)
    untrained = {"x-swarm-train": "false", "x-swarm-policy": "best"}
    async with AsyncExitStack() as running:
        url = await running.enter_async_context(listening(swarm.app))
        settings = {"swarm_url": url, "upstream": {"base_url": upstream.url}}
        async with open_gateway(**settings, offline_wait_seconds=0.1, claim_wait_seconds=5) as http:
            assert "engine" in (await ask(http, untrained)).text
            await running.aclose()
            assert (await ask(http, untrained)).headers["x-swarm-drop-reason"] == "server_unreachable"


async def test_a_sync_longer_than_the_bound_is_a_503(swarm: Swarm, open_gateway: OpenGateway) -> None:
    swarm.state = EngineState.WEIGHT_SYNCING
    async with open_gateway(claim_wait_seconds=0.1) as http:
        response = await ask(http)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_syncing")


async def test_the_fallback_answers(upstream: Upstream, open_gateway: OpenGateway) -> None:
    fallback = {"base_url": f"{upstream.url}/", "api_key": "other-key", "model": "other"}
    async with open_gateway(**AWAY, upstream=fallback) as http:
        response = await ask(http, odd=[1.5, None, "ü"])
        assert response.json() == completion("from the upstream")
        assert response.headers["x-swarm-trained"] == "false"
        assert response.headers["x-swarm-drop-reason"] == "server_unreachable"
        [got] = upstream.got
        assert got.body == BODY | {"odd": [1.5, None, "ü"], "model": "other"}
        assert got.headers["authorization"] == "Bearer other-key"
        assert (await http.get("/status")).json()["fallbacks"] == {"server_unreachable": 1}


@pytest.mark.parametrize("serves", [False, True])
async def test_a_fallback_without_the_address_answers_nothing(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway, serves: bool
) -> None:
    swarm.state = EngineState.WEIGHT_SYNCING
    if serves:
        engine_itself(swarm)
    async with open_gateway(upstream={"base_url": upstream.url}, claim_wait_seconds=0.1) as http:
        response = await http.post("/v1/completions", json={"model": "tiny", "prompt": "hi"})
        [got] = upstream.got
        assert got.target == "/v1/completions"
        if serves:
            assert response.json()["choices"][0]["text"] == "from the engine"
        else:
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (503, "engine_syncing")
            assert error["message"].endswith("; the upstream has no /v1/completions")
        assert (await http.get("/status")).json()["fallbacks"] == ({"engine_syncing": 1} if serves else {})


@pytest.mark.parametrize("typed", [{"type": "item_reference"}, {}], ids=["typed", "untyped"])
async def test_the_fallback_gets_the_kept_items_that_are_referred_to(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway, typed: dict[str, str]
) -> None:
    upstream.answers["/v1/responses"] = lambda body: said("from the upstream")
    async with open_gateway(upstream={"base_url": upstream.url}, claim_wait_seconds=0.1) as http:
        kept = (await http.post("/v1/responses", json={"model": "tiny", "input": "hi"})).json()["output"][0]
        await swarm.set_state(EngineState.OFFLINE)
        items = [{**typed, "id": kept["id"]}, {"role": "user", "content": "and?"}]
        await http.post("/v1/responses", json={"model": "tiny", "input": items})
    assert upstream.got[-1].body["input"] == [kept, items[1]]


async def test_the_fallback_gets_nothing_that_is_sealed_here(upstream: Upstream, open_gateway: OpenGateway) -> None:
    """OpenAI refuses what others encrypted; an upstream that stands in for nobody gave out such items itself."""
    thought = {"type": "reasoning", "summary": [], "encrypted_content": sealed("Well")}
    summary = {"type": "compaction", "encrypted_content": sealed("They said hi.")}
    theirs = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAA"}
    asked: dict[str, Any] = {
        "model": "tiny",
        "input": [summary, thought, theirs, {"role": "user", "content": "and?"}],
        "store": False,
    }
    for swarm in (AWAY, {"swarm_url": None}):
        async with open_gateway(**swarm, upstream={"base_url": upstream.url}) as http:
            await http.post("/v1/responses", json=asked)
    first, second = [got.body for got in upstream.got if got.target == "/v1/responses"]
    said, *more = first["input"]
    assert (said["role"], said["content"].partition("\n\n")[2]) == ("user", "They said hi.")
    assert (first, second) == ({**asked, "input": [said, *asked["input"][2:]]}, asked)
    assert more == asked["input"][2:]


async def test_the_fallback_gets_no_thinking_of_ours(upstream: Upstream, open_gateway: OpenGateway) -> None:
    """Anthropic refuses a conversation with thinking that it did not sign."""
    ours = MessagesDialect().answer({}, completion("so", reasoning="hm"))["content"]
    theirs = {"type": "thinking", "thinking": "hm", "signature": "EqoB"}
    thought, text = ours[0], {"type": "text", "text": "so"}
    assert (thought["type"], ours[1:]) == ("thinking", [text])
    ask = {"role": "user", "content": "go on"}

    def messages(*contents: list[dict[str, Any]]) -> list[dict[str, Any]]:
        turns = [turn for content in contents for turn in (ask, {"role": "assistant", "content": content})]
        return [turn for turn in [*turns, ask] if turn["content"]]

    asked = {"model": "tiny", "max_tokens": 8, "messages": messages(ours, [theirs, text], [thought])}
    for swarm in (AWAY, {"swarm_url": None}):
        async with open_gateway(**swarm, upstream={"base_url": upstream.url}) as http:
            await http.post("/v1/messages", json=asked)
    first, second = [got.body for got in upstream.got if got.target == "/v1/messages"]
    assert (first, second) == ({**asked, "messages": messages([text], [theirs, text], [])}, asked)


async def test_what_the_fallback_does_not_know_of_a_request_is_its_answer(
    upstream: Upstream, open_gateway: OpenGateway
) -> None:
    """Anthropic's 404 of a file: the upstream has the dialect, as it showed before."""
    gone = {"type": "error", "error": {"type": "not_found_error", "message": "File not found: file_1"}}
    async with open_gateway(**AWAY, upstream={"base_url": upstream.url}) as http:
        statuses: list[int] = []
        for answer in (JSONResponse({"type": "message"}), JSONResponse(gone, 404)):
            upstream.answers["/v1/messages"] = lambda _, answer=answer: answer
            response = await http.post("/v1/messages", json={**BODY, "max_tokens": 8})
            statuses.append(response.status_code)
    assert (statuses, response.json()) == ([200, 404], gone)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_goes_on_from_the_response_of_a_fallback(
    upstream: Upstream, open_gateway: OpenGateway, stream: bool
) -> None:
    """By whoever answers then, and though the fallback answers again."""
    message = {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "so"}],
    }
    theirs = {"id": "resp_theirs", "object": "response", "status": "completed", "output": [message]}
    events = encode_named([{"type": "response.created"}, {"type": "response.completed", "response": theirs}])
    upstream.answers["/v1/responses"] = lambda body: (
        Response(events, media_type="text/event-stream") if body.get("stream") else JSONResponse(theirs)
    )
    async with open_gateway(**AWAY, upstream={"base_url": upstream.url}) as http:
        asked = {"model": "tiny", "input": "hi", "stream": stream}
        answer = await http.post("/v1/responses", json=asked)
        assert answer.content == events if stream else answer.json() == theirs
        more = {"model": "tiny", "input": "and?", "previous_response_id": "resp_theirs"}
        answer = await http.post("/v1/responses", json=more)
        assert answer.status_code == 200, answer.text
        assert (await http.get("/v1/responses/resp_theirs")).json() == theirs
        referring = [{"role": "user", "content": "hi"}, {"type": "item_reference", "id": "msg_1"}]
        answer = await http.post("/v1/responses", json={"model": "tiny", "input": referring})
        assert answer.status_code == 200, answer.text
        assert upstream.got[-1].body["input"][1] == message
        await http.delete("/v1/responses/resp_theirs")
        await http.post("/v1/responses", json={**asked, "store": False})
        assert (await http.post("/v1/responses", json=more)).status_code == 400
    hi, so, more = upstream.got[1].body["input"]
    assert (hi["content"], so, more["content"]) == ("hi", message, "and?")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("id_fields", [{}, {"id": None}, {"id": ["resp"]}])
async def test_a_response_of_a_fallback_without_an_id_is_passed_on(
    upstream: Upstream, open_gateway: OpenGateway, stream: bool, id_fields: dict[str, Any]
) -> None:
    theirs = {**id_fields, "object": "response", "status": "completed", "output": []}
    events = encode_named([{"type": "response.completed", "response": theirs}])
    upstream.answers["/v1/responses"] = lambda _: (
        Response(events, media_type="text/event-stream") if stream else JSONResponse(theirs)
    )
    async with open_gateway(**AWAY, upstream={"base_url": upstream.url}) as http:
        answer = await http.post("/v1/responses", json={"model": "tiny", "input": "hi", "stream": stream})
    assert answer.status_code == 200 and (answer.content == events if stream else answer.json() == theirs)


async def test_the_answer_of_a_fallback_is_closed_if_its_caller_leaves_before_it_is_kept() -> None:
    """Else it kept its place on the route for good."""
    closed, looked = asyncio.Event(), asyncio.Event()

    async def close() -> None:
        closed.set()

    class Pipeline:
        async def answer(self, _: Any) -> Relayed:
            return Relayed(200, {}, b"{}", close)

        async def is_plain(self, *_: Any) -> bool:
            looked.set()
            await asyncio.Event().wait()
            return False

    gateway, incoming = cast("Any", SimpleNamespace(pipeline=Pipeline())), cast("Any", Mock(raw=b"{}"))
    answering = asyncio.create_task(ResponsesEndpoint().answer(gateway, incoming, {}))
    await looked.wait()
    answering.cancel()
    await asyncio.wait({answering})
    assert closed.is_set()


@pytest.mark.parametrize("state", [EngineState.BOOTING, EngineState.OFFLINE])
async def test_who_has_a_fallback_does_not_wait_for_an_engine_that_is_away(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway, state: EngineState
) -> None:
    swarm.state = state
    async with open_gateway(offline_wait_seconds=0, upstream={"base_url": upstream.url}) as http:
        for _ in range(2):
            response = await ask(http)
            assert response.json() == completion("from the upstream")
            assert response.headers["x-swarm-drop-reason"] == str(state).lower().replace(".", "_")
        assert not swarm.claimed
        swarm.state = EngineState.ROLLING
        async with asyncio.timeout(60):
            while response.headers["x-swarm-trained"] != "true":
                response = await ask(http)


async def test_without_a_fallback_an_engine_that_boots_is_waited_for(swarm: Swarm, open_gateway: OpenGateway) -> None:
    swarm.state = EngineState.BOOTING
    async with open_gateway(offline_wait_seconds=0) as http:
        asking = asyncio.create_task(ask(http))
        await swarm.until(lambda: swarm.claims)
        await swarm.set_state(EngineState.ROLLING)
        assert (await asking).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_the_fallbacks_own_errors_pass_through(
    upstream: Upstream, open_gateway: OpenGateway, stream: bool
) -> None:
    upstream.answers[CHAT] = lambda body: error(429, "fallback is full", retry_after="7")
    async with open_gateway(**AWAY, upstream={"base_url": upstream.url}) as http:
        response = await ask(http, stream=stream)
    assert (response.status_code, response.json()["error"]["message"]) == (429, "fallback is full")
    assert response.headers["retry-after"] == "7"


async def test_an_error_of_the_fallback_after_headers_is_an_event(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway
) -> None:
    swarm.answer = once(go := asyncio.Event(), lambda *_: error(500, "boom"))
    upstream.answers[CHAT] = lambda body: error(429, "fallback is full")
    async with (
        open_gateway(keepalive_seconds=0.01, upstream={"base_url": upstream.url}) as http,
        http.stream("POST", CHAT, json=BODY | {"stream": True}) as response,
    ):
        lines = response.aiter_lines()
        assert (response.status_code, await anext(lines)) == (200, ": keep-alive")
        go.set()
        [event] = [line async for line in lines if line.startswith("data: ")]
    assert json.loads(event.removeprefix("data: "))["error"]["message"] == "fallback is full"


@pytest.mark.parametrize(("status", "answered"), [(500, 200), (400, 400)])
async def test_failed_samples_go_to_the_fallback_and_requests_at_fault_do_not(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway, status: int, answered: int
) -> None:
    swarm.answer = lambda *_: error(status, "boom")
    async with open_gateway(upstream={"base_url": upstream.url}) as http:
        response = await ask(http)
    assert response.status_code == answered
    if answered == 200:
        assert response.json() == completion("from the upstream")
        assert response.headers["x-swarm-drop-reason"] == "engine_failed"
        assert not swarm.open_episodes
    else:
        assert not upstream.got


async def test_a_name_of_a_session_that_is_too_long_is_refused_also_where_nothing_is_trained(
    upstream: Upstream, open_gateway: OpenGateway
) -> None:
    async with open_gateway(**AWAY, upstream={"base_url": upstream.url}) as http:
        response = await ask(http, headers={"x-swarm-train": "false", "x-swarm-session": "s" * 257})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "x-swarm-session")


async def test_an_unreachable_fallback_is_a_503(open_gateway: OpenGateway) -> None:
    async with open_gateway(**AWAY, upstream={"base_url": f"{NOWHERE}/v1"}) as http:
        response = await ask(http)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "upstream_unreachable")
    message = response.json()["error"]["message"]
    assert message == "the upstream 127.0.0.1:9 cannot be reached: cannot connect to 127.0.0.1:9: Connection refused"
    assert response.headers["x-should-retry"] == "true"


@pytest.mark.parametrize("with_upstream", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_engine_answers_without_training_where_nothing_else_does(
    swarm: Swarm, open_gateway: OpenGateway, with_upstream: bool, stream: bool
) -> None:
    engine_itself(swarm)
    swarm.state = EngineState.WEIGHT_SYNCING
    upstream = {"base_url": f"{NOWHERE}/v1"} if with_upstream else None
    async with open_gateway(claim_wait_seconds=0.05, upstream=upstream) as http:
        # enough to open the upstream's breaker
        for _ in range(8 if with_upstream else 1):
            response = await ask(http, stream=stream)
            assert response.status_code == 200 and "engine" in response.text.partition("swarm")[0]
            assert response.headers["x-swarm-trained"] == "false"
            assert response.headers["x-swarm-drop-reason"] == "engine_syncing"
        assert list((await http.get("/status")).json()["fallbacks"]) == ["engine_syncing"]


@pytest.mark.parametrize("code", [401, 422])
async def test_a_swarm_server_that_refuses_the_gateway_is_not_the_users_fault(
    swarm: Swarm, open_gateway: OpenGateway, code: int
) -> None:
    refuse = Route("/claim_group", lambda _: error(code, "count is above the slots"), methods=["POST"])
    swarm.app.router.routes.insert(0, refuse)
    async with open_gateway() as http:
        response = await ask(http)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "swarm_refused")
    assert "count is above the slots" in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_session_does_not_idle_while_a_fallback_answers(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway, stream: bool
) -> None:
    go = asyncio.Event()

    async def slow() -> Response:
        await go.wait()
        return said("at last")

    async def events() -> AsyncIterator[bytes]:
        yield b"data: {}\n\n"
        await go.wait()

    def answer(body: dict[str, Any]) -> Any:
        if "think" not in body["messages"][-1]["content"]:
            return said("at once")
        return StreamingResponse(events(), media_type="text/event-stream") if stream else slow()

    upstream.answers[CHAT] = answer
    settings = {"session_end": OUTCOME, "session_idle_seconds": 1, "offline_wait_seconds": 0.1}
    mine, other = ({"x-swarm-session": name} for name in ("mine", "other"))
    async with open_gateway(**settings, upstream={"base_url": upstream.url}) as http, asyncio.timeout(20):

        async def ended(name: str) -> str:
            [on] = (await http.get(f"/v1/sessions/{name}")).json()["on"]
            return on["ended"]

        # the one that is to go on comes last: it is asked again before it can idle
        for session in (other, mine):
            assert (await ask(http, session)).status_code == 200
        swarm.state = EngineState.OFFLINE
        thinking = {**BODY, "messages": [{"role": "user", "content": "think"}], "stream": stream}
        asking = asyncio.create_task(http.post(CHAT, json=thinking, headers=mine))
        await upstream.arrived.wait()
        assert (await ask(http, other)).headers["x-swarm-trained"] == "false"
        while await ended("other") != "idle":
            pass
        assert await ended("mine") == ""
        go.set()
        assert (await asking).status_code == 200
        while await ended("mine") != "idle":
            pass


async def test_a_session_idles_from_the_answer_of_the_fallback_on(
    swarm: Swarm, upstream: Upstream, open_gateway: OpenGateway
) -> None:
    settings: dict[str, Any] = {
        "session_end": OUTCOME,
        "session_idle_seconds": 1,
        "offline_wait_seconds": 0.1,
        "upstream": {"base_url": upstream.url, "model": "other"},
    }
    named = {"x-swarm-session": "s"}
    async with open_gateway(**settings) as http:

        async def ended() -> str:
            [on] = (await http.get("/v1/sessions/s")).json()["on"]
            return on["ended"]

        assert (await ask(http, named)).status_code == 200
        swarm.state = EngineState.OFFLINE
        assert (await ask(http, named)).headers["x-swarm-trained"] == "false"
        async with asyncio.timeout(20):
            while await ended() != "idle":
                pass
