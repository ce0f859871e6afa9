"""Addresses and answers: host rewriting, tolerance of newer servers, and the error each refusal becomes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from swarm.client import SwarmClient, wire
from swarm.errors import (
    AuthenticationError,
    ConfigError,
    ConflictError,
    NotFoundError,
    PayloadTooLargeError,
    RequestError,
    SwarmGatewayError,
    UnavailableError,
    UpstreamError,
)
from swarm.http.client import Answer
from swarm.job import TrainJob
from swarm.protocol import ClaimEpisodeResponse, ClaimGroupResponse
from swarm.status import EngineStatus
from swarm.types import WorkflowOutput
from tests.swarm.client.scripted import ScriptedServer

STEP = {"step": 1, "batch_id": "b", "metrics": {}, "seconds": 1.0}


def reply(body: Any, status: int = 200, **headers: str) -> Answer:
    return Answer(
        status,
        {name.replace("_", "-"): value for name, value in headers.items()},
        body if isinstance(body, bytes) else json.dumps(body).encode(),
    )


@pytest.mark.parametrize(
    ("given", "status_url"),
    [
        ("http://127.0.0.1:10086", "http://127.0.0.1:10086/status"),
        ("http://127.0.0.1:10086/", "http://127.0.0.1:10086/status"),
        ("swarm.example:10086", "http://swarm.example:10086/status"),
        ("https://example.com/swarm/", "https://example.com/swarm/status"),
        ("http://[::1]:10086", "http://[::1]:10086/status"),
    ],
)
def test_server_addresses(given: str, status_url: str) -> None:
    assert wire.parse_server_url(given) + "/status" == status_url


@pytest.mark.parametrize("given", ["", "ftp://host", "http://", "http://host:notaport", "zmq://127.0.0.1:1"])
def test_wrong_addresses_are_told(given: str) -> None:
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:10086"):
        wire.parse_server_url(given)


@pytest.mark.parametrize("given", ["http://127.0.0.1:8000/v1/", "localhost/episodes/e/v1"])
def test_the_address_of_an_openai_api_is_no_servers(given: str) -> None:
    with pytest.raises(ConfigError, match=r"ends with /v1, where models are asked: .* http://127\.0\.0\.1:10086$"):
        wire.parse_server_url(given)


@pytest.mark.parametrize(
    "address",
    ["http://x:SECRET@h:1", "x:SECRET@h:1", "http://x:SECRET@h/?to=http://o", "http://x:://SECRET@h", "SECRET@"],
)
def test_an_address_that_may_be_told_has_no_token(address: str) -> None:
    assert "SECRET" not in wire.without_token(address)


def test_a_host_may_be_called_v1() -> None:
    assert wire.parse_server_url("v1:80") == "http://v1:80"


def test_episodes_are_reached_where_the_server_was() -> None:
    one = {"episode_uuid": "e", "openai_base_url": "http://10.0.0.5:9999/episodes/e/v1", "openai_api_key": "k"}
    url = wire.parse_server_url("https://gate.example/swarm")
    expected = wire.EpisodeEndpoint(episode_uuid="e", base_url="https://gate.example/swarm/episodes/e/v1", api_key="k")
    assert wire.episodes_of(ClaimEpisodeResponse(success=True, client_uuid="c", **one), url) == [expected]
    group = ClaimGroupResponse.model_validate({"success": True, "client_uuid": "c", "episodes": [one, one]})
    assert wire.episodes_of(group, url) == [expected, expected]


def test_fields_of_a_newer_server_are_ignored() -> None:
    answer = wire.read_answer(wire.ENGINE_STATUS, reply({"engine_status": "ENGINE.ROLLING", "mood": "good"}))
    assert answer == EngineStatus.model_validate({"engine_status": "ENGINE.ROLLING"})
    job = {"model": "m", "charm": 0.5}
    told = {"engine": {"engine_status": "ENGINE.ROLLING", "mood": "good"}, "job": job, "steps": [STEP | {"odd": {}}]}
    status = wire.read_answer(wire.wait_status_call(None, 0.0), reply(told | {"weather": []}))
    assert status.job == TrainJob(model="m")
    assert [step.step for step in status.steps] == [1]


def test_a_wrong_field_beside_those_of_a_newer_server_is_told() -> None:
    told = {"engine": {"engine_status": "ENGINE.ROLLING", "mood": "good"}, "engine_pid": "x"}
    with pytest.raises(UpstreamError, match="the server's answer has 1 wrong fields"):
        wire.read_answer(wire.wait_status_call(None, 0.0), reply(told))


@pytest.mark.parametrize("body", [b"<html>", [], {"engine_status": "ENGINE.DREAMING"}, {}, b"\xff"])
def test_an_answer_that_is_none_is_told(body: Any) -> None:
    with pytest.raises(UpstreamError, match="is that a swarm server"):
        wire.read_answer(wire.ENGINE_STATUS, reply(body))


@pytest.mark.parametrize("body", [b"404 page not found", {"error": {"message": "no", "code": "route_not_found"}}])
def test_an_address_that_a_server_does_not_have_is_told_from_an_episode_that_it_does_not_know(body: Any) -> None:
    with pytest.raises(NotFoundError, match="have different addresses"):
        wire.read_answer(wire.ENGINE_STATUS, reply(body, status=404))
    with pytest.raises(NotFoundError) as unknown:
        wire.read_answer(wire.ENGINE_STATUS, reply({"error": {"message": "no", "code": "unknown_episode"}}, status=404))
    assert str(unknown.value) == "/get_engine_status: no"


def test_a_redirect_names_where_it_leads() -> None:
    """nginx answers http:// so where it serves https:// alone: `is that a swarm server` helped nobody."""
    moved = Answer(308, {"location": "https://trainer/status"}, b"<html>")
    with pytest.raises(UpstreamError, match=r"/get_engine_status: HTTP 308 leads to https://trainer/status"):
        wire.read_answer(wire.ENGINE_STATUS, moved)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, RequestError),
        (401, AuthenticationError),
        (403, AuthenticationError),
        (404, NotFoundError),
        (409, ConflictError),
        (413, PayloadTooLargeError),
        (422, RequestError),
        (500, UpstreamError),
        (502, UpstreamError),
        (503, UnavailableError),
    ],
)
def test_statuses_become_errors(status: int, kind: type[SwarmGatewayError]) -> None:
    error = wire.error_of(wire.STOP_ENGINE, reply({"error": {"message": "no", "code": "c", "param": "p"}}, status))
    assert type(error) is kind
    assert "/stop_engine: no" in error.message
    assert error.code == "c"


@pytest.mark.parametrize("body", [b"<html>Bad Gateway</html>", {"message": "no healthy upstream"}])
@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_proxys_word_for_a_server_that_is_away_is_told_as_such(status: int, body: Any) -> None:
    error = wire.error_of(wire.STOP_ENGINE, reply(body, status))
    assert type(error) is UnavailableError and error.code == "server_unreachable"
    said = f"HTTP {status} and a page, as of a proxy" if isinstance(body, bytes) else "no healthy upstream"
    assert error.message.startswith("/stop_engine: ") and said in error.message


@pytest.mark.parametrize("result", [1.0, {"reward": 1.0}])
def test_what_is_no_result_of_an_episode_is_refused_with_what_is_one(result: Any) -> None:
    with pytest.raises(RequestError, match=rf"WorkflowOutput\(reward=...\), not a {type(result).__name__}"):
        wire.with_code(result, "")


@pytest.mark.parametrize("value", [object(), b"\xff", "half of \ud83d"])
def test_metadata_that_cannot_be_json_is_refused_by_name(value: Any) -> None:
    with pytest.raises(RequestError, match="metadata of the workflow output cannot be JSON"):
        wire.end_key("t", {"e1": WorkflowOutput(reward=1.0, metadata={"seen": {"value": value}})})


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"success": False, "error": "not now"}, "not now"),
        ({"detail": "from another framework"}, "from another framework"),
        (b"plain text", "plain text"),
        (b"", "HTTP 400"),
        ([1], "[1]"),
    ],
)
def test_any_error_body_is_quoted(body: Any, said: str) -> None:
    assert said in wire.error_of(wire.STOP_ENGINE, reply(body, 400)).message


def test_what_a_token_may_not_is_not_blamed_on_its_absence() -> None:
    body = {"error": {"message": "code sync is off", "code": "code_sync_disabled"}}
    assert "SWARM_TOKEN" not in wire.error_of(wire.STOP_ENGINE, reply(body, 403)).message


@pytest.mark.parametrize(("given", "sent"), [("swt_abc\n", "Bearer swt_abc"), (" t ", "Bearer t"), ("", None)])
def test_a_token_from_a_file_may_end_its_line(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, given: str, sent: str | None
) -> None:
    server.script("/get_engine_status", {"engine_status": "ENGINE.ROLLING"})
    monkeypatch.setenv("SWARM_TOKEN", given)
    with SwarmClient(server.url) as client:
        client.get_engine_status()
    assert server.requests[0].headers.get("authorization") == sent


@pytest.mark.parametrize("token", ["schlüssel", "a\nb", "a\x00b"])
def test_a_token_that_no_header_takes_is_refused_at_once(token: str) -> None:
    with pytest.raises(ConfigError, match="SWARM_TOKEN") as caught:
        SwarmClient("http://x", token)
    assert token not in caught.value.message
