"""Servers that mean harm, or have lost their mind: the monitor goes on, tells no secret and commands no terminal."""

from __future__ import annotations

import json
import types
from collections import Counter
from collections.abc import Iterator
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.stats import GatewayStatus
from gateway.tui import gateway_view
from gateway.tui.app import MonitorApp
from gateway.tui.targets import make_targets
from swarm.evidence.pairs import GateRules
from swarm.status import ServerStatus
from tests.gateway.tui.conftest import watching
from tests.standins.vllm import listening

pytestmark = pytest.mark.anyio

ESCAPE = "\x1b]0;x\x1b\\"
SECRET = "sk-very-secret-key"
ROLLING = {"engine": {"engine_status": "ENGINE.ROLLING"}}
GATEWAY = {"requests": 1, "groups": {"trained": 0, "dropped": {}, "uninformative": 0}, "routes": {}}


def saying(body: str, status: int = 200) -> Starlette:
    async def answer(request: Request) -> Response:
        return Response(body, status, media_type="application/json")

    return Starlette(routes=[Route("/status", answer)])


def sample(kind: Any) -> Any:
    """A JSON value of the type ``kind`` that fills every field and every collection below it."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return arguments[0]
    if origin in (Union, types.UnionType):
        return sample(next(one for one in arguments if one is not types.NoneType))
    if origin is Annotated:
        return sample(arguments[0])
    if origin in (list, tuple):
        return [sample(argument) for argument in arguments if argument is not Ellipsis]
    if origin is dict:
        return {"name": sample(arguments[1])}
    if origin is Counter:
        return {"name": 1}
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        fields = kind.model_fields.items()
        # a default is within the field's bounds
        return {
            name: field.default if type(field.default) is float else sample(field.annotation) for name, field in fields
        }
    if isinstance(kind, type) and issubclass(kind, Enum):
        return next(iter(kind)).value
    return {bool: True, int: 1, float: 0.5}.get(kind, "word")


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to all strings in ``value``."""
    if isinstance(value, str):
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in items:
        yield from places(one, (*path, key))


def keys_too(value: Any) -> Any:
    """``value`` with the keys that :func:`sample` chose in place of names turned into escapes."""
    if isinstance(value, list):
        return [keys_too(one) for one in value]
    if isinstance(value, dict):
        return {ESCAPE if key == "name" else key: keys_too(one) for key, one in value.items()}
    return value


def hostile(model: type[BaseModel], whole: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """``whole`` with an escape in every string that the model takes one in, and in how many."""
    whole = keys_too(whole)
    count = 0
    for *before, last in list(places(whole)):
        at: Any = whole
        for key in before:
            at = at[key]
        kept, at[last] = at[last], ESCAPE
        try:
            model.model_validate(whole)
            count += 1
        except ValidationError:
            at[last] = kept
    model.model_validate(whole)
    return whole, count


async def test_no_field_of_a_status_reaches_the_terminal_as_a_command() -> None:
    told = sample(ServerStatus) | {"job": {"model": "word"}, "resolved_config": None}
    # numbers within bounds
    told["stages"][0]["rules"]["gate"] = GateRules().model_dump(mode="json")
    swarm, in_swarm = hostile(ServerStatus, told)
    gateway, in_gateway = hostile(GatewayStatus, sample(GatewayStatus))
    assert in_swarm > 10 and in_gateway > 10
    assert gateway["engine"] == gateway["control"] == ESCAPE
    async with (
        listening(saying(json.dumps(swarm))) as one,
        listening(saying(json.dumps(gateway))) as other,
        watching([one], [other], size=(200, 60)) as screen,
    ):
        texts = [await screen.shows("2 of 2 servers answer", "1 in flight")]
        for page, keys in (("2", "setcdl"), ("3", "gwfl")):
            await screen.press(page)
            texts.append(await screen.shows({"2": "policy version 1", "3": "● engine"}[page]))
            for key in keys:
                await screen.press(key)
                await screen.pilot.pause()
                texts.append(screen.text)
        assert all("\x1b" not in text and "\x07" not in text for text in texts)
        assert any("\N{REPLACEMENT CHARACTER}]0;x" in text for text in texts[2:])


async def test_what_a_question_raises_is_its_servers_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    def view(status: GatewayStatus, per_second: float) -> None:
        raise ZeroDivisionError("nobody thought of this")

    monkeypatch.setattr(gateway_view, "view", view)
    async with (
        listening(saying(json.dumps(GATEWAY))) as url,
        listening(saying(json.dumps(ROLLING))) as other,
        watching([other], [url]) as screen,
    ):
        await screen.shows("1 of 2 servers answer", "● ROLLING", "! nonsense", "ZeroDivisionError: nobody thought of")


async def test_a_defect_is_told_without_the_values_of_variables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def show(self: MonitorApp) -> None:
        held = f"Bearer {SECRET}"
        raise LookupError(f"a defect of ours, {len(held)}")

    monkeypatch.setattr(MonitorApp, "show", show)
    async with listening(saying(json.dumps(ROLLING))) as url:
        app = MonitorApp(make_targets([url], SECRET, [], None), interval=0.2)
        await app.run_async(headless=True)
    told = "".join(capsys.readouterr())
    assert app.return_code == 1 and "a defect of ours" in told and SECRET not in told


async def test_numbers_that_cannot_be_shown_are_trouble() -> None:
    body = json.dumps(GATEWAY)[:-1] + ', "requests": 1' + "0" * 400 + "}"
    async with listening(saying(body)) as url, watching([], [url]) as screen:
        await screen.shows("! NONSENSE", "OverflowError")
        await screen.says("check --gateway-url")
        assert screen.app.pollers[0].status is None


async def test_moments_that_no_clock_has() -> None:
    moments = ["0001-01-01T00:00:00", "0001-01-02T00:00:00+14:00", "9999-12-31T23:59:59-14:00"]
    gateway = GATEWAY | {"swarms": [{"url": "http://x", "down_since": moment} for moment in moments]}
    log = [{"timestamp": 1e300, "message": "from the end of time"}]
    step = {"step": 1, "batch_id": "b", "metrics": {"swarm/reward_mean": 1.5e308}, "seconds": 1e308}
    steps = [step, step | {"step": 2, "batch_id": "c", "metrics": {"swarm/reward_mean": -1.5e308}}]
    swarm = json.dumps(ROLLING | {"log": log, "steps": steps, "waiting_claims": 1})[:-1]
    swarm += ', "engine_seconds": 1e999, "longest_wait_seconds": 1e999}'
    async with (
        listening(saying(json.dumps(gateway))) as one,
        listening(saying(swarm)) as other,
        watching([other], [one]) as screen,
    ):
        await screen.press("2")
        await screen.shows("● ROLLING for - ", "the longest for -", "--:--:-- [log] from the end of time")
        await screen.press("3", "w")
        await screen.shows(*(f"! {moment[:8]}" for moment in moments))
