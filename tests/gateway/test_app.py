"""Routes beside the chat, and every kind of bad input: a clear OpenAI-shaped answer, no episode claimed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from starlette.routing import Route

from gateway.api.routes import ANY_OTHER
from gateway.app import create_app
from gateway.config.gateway import GatewayConfig
from swarm.errors import ConfigError
from swarm.states import EngineState
from tests import sdks
from tests.gateway.conftest import OpenGateway, write_hooks
from tests.standins.swarm import Swarm
from tests.swarm.http.references import references

pytestmark = pytest.mark.anyio

BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("content", "status", "code", "param"),
    [
        (b"{", 400, "malformed_json", None),
        (b"", 400, "malformed_json", None),
        (b"[]", 400, "malformed_json", None),
        (b"\xff\xfe", 400, "malformed_json", None),
        (b"[" * 100_000, 400, "malformed_json", None),
        (b'{"model": "tiny"}', 400, "invalid_request", "messages"),
        (b'{"messages": ' + b"[" * 600 + b"]" * 600 + b"}", 400, "nested_too_deeply", None),
        (b'{"messages": []}', 400, "invalid_request", "messages"),
        (b'{"messages": [{"role": "user", "content": NaN}]}', 400, "malformed_json", None),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, "malformed_json", None),
        (b'{"model": "other", "messages": [{"role": "user"}]}', 404, "model_not_found", "model"),
    ],
)
async def test_bad_input(
    swarm: Swarm, gateway: httpx.AsyncClient, content: bytes, status: int, code: str, param: str | None
) -> None:
    response = await gateway.post(CHAT, content=content, headers=JSON)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (status, code, param)
    assert error["message"] and response.headers["x-should-retry"] == "false" and response.headers["x-request-id"]
    assert not swarm.claims


@pytest.mark.parametrize("declared", [True, False])
async def test_an_oversized_body_is_413(swarm: Swarm, open_gateway: OpenGateway, declared: bool) -> None:
    content = b'{"messages": "' + b"x" * 5000 + b'"}'

    async def in_parts() -> Any:
        yield content

    async with open_gateway(max_body_bytes=2048) as http:
        response = await http.post(CHAT, content=content if declared else in_parts(), headers=JSON)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "payload_too_large")
    assert "2048" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "path", [CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/v1/feedback"]
)
async def test_a_compressed_body_is_refused_in_words(swarm: Swarm, gateway: httpx.AsyncClient, path: str) -> None:
    headers = {**JSON, "content-encoding": "gzip"}
    response = await gateway.post(path, content=gzip.compress(json.dumps(BODY).encode()), headers=headers)
    assert (response.status_code, response.headers["x-should-retry"]) == (415, "false")
    assert response.json()["error"]["message"] == "content-encoding: gzip is not supported; send the body uncompressed"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [("GET", "/nowhere", 404, "route_not_found"), ("GET", CHAT, 405, "method_not_allowed")],
)
async def test_wrong_routes(gateway: httpx.AsyncClient, method: str, path: str, status: int, code: str) -> None:
    response = await gateway.request(method, path)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)


@pytest.mark.parametrize(
    ("method", "path", "hinted"),
    [
        ("POST", "/chat/completions", True),
        ("GET", "/models/tiny", True),
        ("POST", "/v1/v1/chat/completions", False),
        ("GET", "/nowhere", False),
    ],
)
async def test_a_base_url_without_v1_is_told(gateway: httpx.AsyncClient, method: str, path: str, hinted: bool) -> None:
    response = await gateway.request(method, path)
    assert response.status_code == 404
    assert ("base_url must end with /v1" in response.json()["error"]["message"]) is hinted


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "rebound.example"}, 421),
        ({"origin": "https://foreign.example"}, 403),
        ({"origin": "http://localhost:3000"}, 200),
    ],
)
async def test_web_pages_of_other_hosts_need_a_key(
    swarm: Swarm, open_gateway: OpenGateway, headers: dict[str, str], status: int
) -> None:
    async with open_gateway() as http:
        assert (await http.post(CHAT, json=BODY, headers=headers)).status_code == status
    async with open_gateway(api_keys=["secret"]) as http:
        keyed = {**headers, "authorization": "Bearer secret"}
        assert (await http.post(CHAT, json=BODY, headers=keyed)).status_code == 200


async def test_models(swarm: Swarm, gateway: httpx.AsyncClient) -> None:
    listed = (await gateway.get("/v1/models")).json()
    assert (listed["object"], [card["id"] for card in listed["data"]]) == ("list", ["tiny"])
    card = (await gateway.get("/v1/models/tiny")).json()
    assert card == listed["data"][0]
    assert (card["object"], card["max_model_len"]) == ("model", swarm.job.max_model_len)
    missing = await gateway.get("/v1/models/org/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    assert "`tiny`" in missing.json()["error"]["message"]


async def test_the_sdks_read_the_list_of_models(swarm: Swarm, open_gateway: OpenGateway) -> None:
    async with open_gateway(model_aliases=["alias"]) as http:
        url = str(http.base_url).rstrip("/")
        async with sdks.openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k") as sdk:
            assert [model.id async for model in sdk.models.list()] == ["tiny", "alias"]
            assert (await sdk.models.retrieve("alias")).id == "alias"
        async with sdks.anthropic.AsyncAnthropic(base_url=url, api_key="k") as claude:
            page = await claude.models.list()
            assert (page.has_more, page.first_id, page.last_id) == (False, "tiny", "alias")
            assert [(model.id, model.type, model.display_name, model.created_at.year) for model in page.data] == [
                ("tiny", "model", "tiny", 1970),
                ("alias", "model", "alias", 1970),
            ]
            assert (await claude.models.retrieve("alias")).display_name == "alias"


async def test_an_alias_is_the_model(swarm: Swarm, open_gateway: OpenGateway) -> None:
    async with open_gateway(model_aliases=["gpt-4o-mini", "tiny"]) as http:
        listed = (await http.get("/v1/models")).json()["data"]
        assert [(card["id"], card["root"]) for card in listed] == [("tiny", "tiny"), ("gpt-4o-mini", "tiny")]
        assert (await http.get("/v1/models/gpt-4o-mini")).json() == listed[1]
        response = await http.post(CHAT, json={**BODY, "model": "gpt-4o-mini"})
        assert (response.status_code, response.json()["model"]) == (200, "tiny")
        assert swarm.bodies == [BODY]
        unknown = await http.post(CHAT, json={**BODY, "model": "gpt-5"})
    assert unknown.status_code == 404
    assert "add `gpt-5` to the gateway's model_aliases" in unknown.json()["error"]["message"]


async def test_every_route_is_documented(tmp_path: Path, swarm: Swarm, gateway: httpx.AsyncClient) -> None:
    document = (await gateway.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    assert {reference.rpartition("/")[2] for reference in references(document)} <= schemas.keys()
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    app = create_app(GatewayConfig(hooks=str(write_hooks(tmp_path / "hooks"))))
    served = {
        (method.lower(), route.path_format)
        for route in app.routes
        if isinstance(route, Route) and route.path != ANY_OTHER
        for method in (route.methods or set()) - {"HEAD"}
    }
    paths = document["paths"]
    assert {(method, path) for path, methods in paths.items() for method in methods} == served
    assert "security" not in paths["/health"]["get"]
    assert paths["/v1/chat/completions"]["post"]["security"] == [{"key": []}, {}]
    assert paths["/v1/feedback"]["post"]["requestBody"]["required"]
    assert not paths["/v1/sessions/{id}/end"]["post"]["requestBody"]["required"]


async def test_health_tells_the_engine_state(swarm: Swarm, gateway: httpx.AsyncClient) -> None:
    await swarm.set_state(EngineState.WEIGHT_SYNCING)
    response = await gateway.get("/health")
    assert (response.status_code, response.json()["engine"]) == (200, "ENGINE.WEIGHT_SYNCING")
    assert response.json()["policy_version"] == 7


async def test_health_is_alive_without_a_swarm_server(swarm: Swarm, open_gateway: OpenGateway) -> None:
    async with open_gateway(swarm_url="http://127.0.0.1:9") as http:
        response = await http.get("/health")
        assert (response.status_code, response.json()["engine"]) == (200, "unreachable")
        assert (await http.get("/v1/models")).status_code == 503


async def test_health_does_not_wait_for_a_swarm_server_that_hangs(swarm: Swarm, gateway: httpx.AsyncClient) -> None:
    swarm.silent = True
    for path in ("/health", "/status"):
        response = await gateway.get(path, timeout=3)
        assert (response.status_code, response.json()["engine"]) == (200, "unreachable")
    swarm.silent = False
    await swarm.set_state(EngineState.ROLLING)
    assert (await gateway.get("/health")).json()["engine"] == "ENGINE.ROLLING"


async def test_keys(swarm: Swarm, open_gateway: OpenGateway) -> None:
    async with open_gateway(api_keys=["secret"]) as http:
        wrong: list[dict[str, str | bytes]] = [
            {},
            {"authorization": "Bearer wrong"},
            {"x-api-key": "wrong"},
            {"x-api-key": b"\xff\xc3\xa4"},
        ]
        for headers in wrong:
            refused = await http.post(CHAT, json=BODY, headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
            assert refused.headers["x-request-id"]
        assert (await http.get("/status")).status_code == 401
        assert (await http.get("/health")).status_code == 200
        assert not swarm.claims
        for headers in ({"authorization": "Bearer secret"}, {"x-api-key": "secret"}):
            assert (await http.post(CHAT, json=BODY, headers=headers)).status_code == 200


def test_a_hook_file_with_a_syntax_error_stops_the_start(tmp_path: Any) -> None:
    hooks = write_hooks(tmp_path / "hooks", reward="def on_compute_relative_reward(:\n")
    with pytest.raises(ConfigError, match=r"on_compute_relative_reward\.py.*line 1"):
        create_app(GatewayConfig(hooks=str(hooks)))
