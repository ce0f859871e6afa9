"""Traces: one from the user's span to the episode's end, and to the gateway's own spans where tracing is on."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from gateway.app import create_app
from gateway.config.gateway import GatewayConfig
from gateway.sessions.sessions import plain_id
from swarm.errors import ConfigError
from tests.gateway.conftest import OpenGateway, ask
from tests.gateway.observability.conftest import Exported
from tests.standins.swarm import Swarm

pytestmark = pytest.mark.anyio

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


def origin(swarm: Swarm) -> list[dict[str, Any]]:
    return [end["workflow_output"]["notes"] for group in swarm.ends for end in group["ends"]]


async def test_without_tracing_the_users_trace_goes_to_the_episode(swarm: Swarm, open_gateway: OpenGateway) -> None:
    async with open_gateway() as http:
        await ask(http, {"traceparent": TRACEPARENT, "x-request-id": "mine"})
    assert len(origin(swarm)) == 4
    assert all(one["traceparent"] == TRACEPARENT and one["request_id"] == "mine" for one in origin(swarm))
    assert swarm.traceparents == [TRACEPARENT]


async def test_session_route_and_what_was_delivered_go_to_the_episode(swarm: Swarm, open_gateway: OpenGateway) -> None:
    async with open_gateway() as http:
        await ask(http, {"x-swarm-session": "chat-1"})
        nameless = (await ask(http)).json()["id"]
    assert [one["session"] for one in origin(swarm)] == ["chat-1"] * 4 + [plain_id(nameless)] * 4
    assert {one["route"] for one in origin(swarm)} == {"default"}
    assert [one["delivered"] for one in origin(swarm)].count(True) == 2


@pytest.mark.parametrize("given", ["nonsense", f"00-{'0' * 32}-{PARENT}-01", f"ff-{TRACE}-{PARENT}-01", "é"])
async def test_what_is_no_trace_goes_nowhere(swarm: Swarm, open_gateway: OpenGateway, given: str) -> None:
    async with open_gateway() as http:
        answer = await ask(http, {"traceparent": given.encode("latin-1")})
    assert answer.status_code == 200
    assert all(one["traceparent"] == "" for one in origin(swarm)) and swarm.traceparents == [""]


async def test_the_spans_of_a_request_are_one_trace(
    swarm: Swarm, open_gateway: OpenGateway, exported: Exported
) -> None:
    async with open_gateway(tracing={}) as http:
        answer = await ask(http, {"traceparent": TRACEPARENT})
    spans = exported.spans
    assert exported.trace_ids == {TRACE}
    (root,) = exported.named("POST request")
    assert root.parent is not None and f"{root.parent.span_id:016x}" == PARENT
    assert root.attributes == {
        "http.response.status_code": 200,
        "gateway.request_id": answer.headers["x-request-id"],
        "gateway.route": "default",
        "gateway.policy": "best",
        "gateway.outcome": "ok",
    }
    assert {"queue", "claim", "sample", "hook", "submit"} <= {span.name for span in spans}
    # what the swarm server and its journal get continues ours
    ids = {f"{span.get_span_context().span_id:016x}" for span in spans}
    (sent,) = swarm.traceparents
    for given in (sent, *(one["traceparent"] for one in origin(swarm))):
        assert given.split("-")[1] == TRACE and given.split("-")[2] in ids


async def test_a_request_without_a_trace_begins_one(
    swarm: Swarm, open_gateway: OpenGateway, exported: Exported
) -> None:
    async with open_gateway(tracing={}) as http:
        for _ in range(2):
            await ask(http)
    roots = exported.named("POST request")
    assert len({span.get_span_context().trace_id for span in roots}) == 2
    assert all(span.parent is None for span in roots)
    assert len({one["traceparent"].split("-")[1] for one in origin(swarm)}) == 2


async def test_a_live_stream_is_traced_to_its_end(
    open_gateway: OpenGateway, exported: Exported, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_gateway(tracing={}, policy="first") as http:
        answer = await ask(http, stream=True)
    assert answer.text.endswith("data: [DONE]\n\n")
    (root,) = exported.named("POST request")
    samples = [span for span in exported.spans if span.name.startswith("sample ")]
    # what streams, and one call for the others
    assert len(samples) == 2 and {one.context.trace_id for one in samples} == {root.context.trace_id}
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


async def test_none_are_taken_where_none_are_wanted(
    swarm: Swarm, open_gateway: OpenGateway, exported: Exported
) -> None:
    async with open_gateway(tracing={"sampled": 0}) as http:
        await ask(http)
        await ask(http, {"traceparent": TRACEPARENT})
    ours, theirs = swarm.traceparents
    sampled = [int(one.split("-")[3], 16) & 1 for one in (ours, theirs)]
    assert sampled == [0, 1] and theirs.split("-")[1] == TRACE
    assert {one["traceparent"] for one in origin(swarm)[:4]} == {ours}
    # the second one's trace is being taken elsewhere
    assert exported.trace_ids == {TRACE}


async def test_a_collector_that_is_gone_harms_nobody(
    open_gateway: OpenGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.observability.tracing._EXPORT_SECONDS", 0.1)
    async with open_gateway(tracing={"endpoint": "http://127.0.0.1:9"}) as http:
        assert (await ask(http)).status_code == 200


def test_without_the_packages_it_is_an_error_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    config = GatewayConfig.model_validate(
        {"swarm_url": None, "upstream": {"base_url": "http://127.0.0.1:9/v1"}, "tracing": {}}
    )
    with pytest.raises(ConfigError, match=r"pip install '\.\[otel\]' in a clone"):
        create_app(config)
