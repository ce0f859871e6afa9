"""One request to whatever may answer at an address: a status, or a message that says what to do."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from gateway.stats import GatewayStatus
from gateway.tui import targets
from gateway.tui.targets import Kind, Reason, StatusClient, Trouble, make_targets
from swarm.status import ServerStatus
from tests.gateway.conftest import OpenGateway
from tests.standins.swarm import Swarm
from tests.standins.vllm import listening
from tests.swarm.server import conftest as server

pytestmark = pytest.mark.anyio

overrides = server.overrides
rig = server.rig


async def ask(kind: Kind, url: str, secret: str = "") -> BaseModel | Trouble:
    [target] = make_targets([url], secret, [], None) if kind is Kind.SWARM else make_targets([], None, [url], secret)
    model: Any = ServerStatus if kind is Kind.SWARM else GatewayStatus
    asking = StatusClient(target)
    try:
        return await asking.get(model)
    finally:
        await asking.close()


async def trouble(kind: Kind, url: str, secret: str = "") -> Trouble:
    answer = await ask(kind, url, secret)
    assert isinstance(answer, Trouble), answer
    assert answer.message.isprintable()
    return answer


def answering(response: Response) -> Starlette:
    async def status(request: Request) -> Response:
        return response

    return Starlette(routes=[Route("/status", status)])


async def test_nobody(nobody: str) -> None:
    for kind, words in ((Kind.SWARM, "`swarm-gateway swarm start`"), (Kind.GATEWAY, "`swarm-gateway serve`")):
        told = await trouble(kind, nobody)
        assert told.reason is Reason.AWAY and words in told.message and kind.option in told.message


async def test_one_in_the_place_of_the_other(rig: server.Rig, open_gateway: OpenGateway) -> None:
    told = await trouble(Kind.GATEWAY, str(rig.client.base_url))
    assert told.reason is Reason.NONSENSE and "is no gateway" in told.message and "check --gateway-url" in told.message
    async with open_gateway() as http:
        told = await trouble(Kind.SWARM, str(http.base_url))
        assert (
            told.reason is Reason.NONSENSE
            and "is no swarm server" in told.message
            and "check --swarm-url" in told.message
        )


@pytest.mark.parametrize(
    ("response", "reason", "words"),
    [
        (HTMLResponse("<h1>It works!</h1>"), Reason.NONSENSE, "not a JSON object"),
        (PlainTextResponse("[" * 100_000), Reason.NONSENSE, "check --swarm-url"),
        (JSONResponse([1, 2]), Reason.NONSENSE, "not a JSON object"),
        (JSONResponse({"engine": "rolling"}), Reason.NONSENSE, "1 wrong fields"),
        (PlainTextResponse("gone \x1b[2J", 404), Reason.NONSENSE, "HTTP 404: gone"),
        (Response(b"\xff\xfe", 200), Reason.NONSENSE, "not a JSON object"),
        (PlainTextResponse("boom", 500), Reason.FAILING, "HTTP 500: boom"),
        (JSONResponse({"error": {"message": "shutting down"}}, 503), Reason.FAILING, "HTTP 503: shutting down"),
        (JSONResponse({"error": {"message": "not you"}}, 403), Reason.REFUSED, "(not you): give --token"),
    ],
)
async def test_what_is_no_status(response: Response, reason: Reason, words: str) -> None:
    async with listening(answering(response)) as url:
        told = await trouble(Kind.SWARM, url)
    assert told.reason is reason and words in told.message


async def test_what_a_newer_server_adds_is_left_out() -> None:
    told = {"engine": {"engine_status": "ENGINE.ROLLING", "mood": "good"}, "weather": []}
    async with listening(answering(JSONResponse(told))) as url:
        assert isinstance(await ask(Kind.SWARM, url), ServerStatus)


@pytest.mark.parametrize("overrides", [{"token": "secret-of-the-server"}])
async def test_the_token_of_a_swarm_server(rig: server.Rig, overrides: dict[str, str]) -> None:
    url = str(rig.client.base_url)
    told = await trouble(Kind.SWARM, url)
    assert told.reason is Reason.REFUSED and "asks for a secret, and none was given" in told.message
    # without the folder it would be a token of runs/default below the working directory
    assert "swarm tokens create monitor --scope read --run-dir FOLDER" in told.message
    told = await trouble(Kind.SWARM, url, "wrong-one")
    assert "refuses the secret that it was given" in told.message and "wrong-one" not in told.message
    assert isinstance(await ask(Kind.SWARM, url, "secret-of-the-server"), ServerStatus)


async def test_the_key_of_a_gateway(open_gateway: OpenGateway) -> None:
    async with open_gateway(api_keys=["key-of-the-gateway"]) as http:
        told = await trouble(Kind.GATEWAY, str(http.base_url), "wrong-one")
        assert told.reason is Reason.REFUSED and "--api-key or SWARM_GATEWAY_KEY" in told.message
        assert isinstance(await ask(Kind.GATEWAY, str(http.base_url), "key-of-the-gateway"), GatewayStatus)


async def test_one_that_never_answers(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "DEADLINE", 0.2)
    swarm.silent = True
    told = await trouble(Kind.SWARM, swarm.url)
    assert told.reason is Reason.SILENT and "does not answer within" in told.message
    swarm.silent = False
    async with swarm.changed:
        swarm.changed.notify_all()


async def test_one_that_hangs_up_is_asked_once_more_and_then_away() -> None:
    calls = 0

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal calls
        calls += 1
        await reader.readline()
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        told = await trouble(Kind.SWARM, f"http://127.0.0.1:{port}")
    assert (told.reason, calls) == (Reason.AWAY, 2)


async def test_a_gateway_reports_every_field_that_is_read(open_gateway: OpenGateway) -> None:
    async with open_gateway() as http:
        raw = (await http.get("/status")).json()
    status = GatewayStatus.model_validate(raw)
    engine = {"engine", "engine_failure", "model", "policy_version"}
    route, swarm = raw["routes"]["default"], raw["swarms"][0]
    for model, part in (
        (status, raw),
        (status.groups, raw["groups"]),
        (status.tokens, raw["tokens"]),
        (status.accounted, raw["accounted"]),
        (status.routes["default"], route),
        (status.routes["default"].load, route["load"]),
        (status.swarms[0], swarm),
    ):
        assert set(type(model).model_fields) - engine <= set(part)
