"""Routes beside the chat, and every kind of bad input: a clear OpenAI-shaped answer, no episode claimed."""

from __future__ import annotations

import gzip
import json
import socket
import zlib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.routing import Route

import gateway as gateway_package
from gateway.app import ANY_OTHER, create_app, serve
from gateway.config.gateway import GatewayConfig
from swarm.errors import ConfigError
from swarm.states import EngineState
from tests.gateway.conftest import BODY, CHAT, Http, OpenGateway, ask, write_hooks
from tests.standins.swarm import Swarm
from tests.standins.upstream import Upstream
from tests.swarm.http.references import references

pytestmark = pytest.mark.anyio

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
    swarm: Swarm, gateway: Http, content: bytes, status: int, code: str, param: str | None
) -> None:
    response = await gateway.post(CHAT, content=content, headers=JSON)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (status, code, param)
    assert error["message"] and response.headers["x-should-retry"] == "false" and response.headers["x-request-id"]
    assert not swarm.claims


def test_a_gateway_on_all_addresses_tells_one_that_can_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(app: Starlette, sock: socket.socket, **rest: object) -> None:
        sock.close()

    for name, done in {"run_app": closed, "allow_connections": lambda: None, "spare_collections": lambda: None}.items():
        monkeypatch.setattr(f"gateway.app.{name}", done)
    told: list[str] = []
    upstream = {"base_url": "http://127.0.0.1:9/v1"}
    config = {"host": "0.0.0.0", "port": 0, "api_keys": ["k"], "swarm_url": None, "upstream": upstream}
    serve(GatewayConfig.model_validate(config), told.append)
    # `up` gives it to people, and its other commands ask it
    assert told[0].startswith("http://127.0.0.1:")


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
    ("path", "more"),
    [
        (CHAT, {}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"max_tokens": 9}),
    ],
)
async def test_a_compressed_body_is_read(open_gateway: OpenGateway, path: str, more: dict[str, Any]) -> None:
    body = {name: value for name, value in {**BODY, **more}.items() if name != "messages" or "hi" not in more.values()}
    plain = json.dumps(body).encode()
    async with open_gateway(max_body_bytes=2048) as http:
        for encoding, packed in (("gzip", gzip.compress(plain)), ("deflate", zlib.compress(plain))):
            answer = await http.post(path, content=packed, headers={**JSON, "content-encoding": encoding})
            assert answer.status_code == 200, answer.text
        for encoding, content, status in (
            ("gzip", gzip.compress(b" " * 100_000), 413),
            ("gzip", plain, 400),
            ("gzip", gzip.compress(plain)[:-9], 400),
            ("gzip", gzip.compress(plain) * 2, 400),
            ("zstd", plain, 415),
        ):
            answer = await http.post(path, content=content, headers={**JSON, "content-encoding": encoding})
            assert (answer.status_code, answer.headers["x-should-retry"]) == (status, "false"), answer.text


async def test_an_upstream_reads_what_the_gateway_has_decoded(upstream: Upstream, open_gateway: OpenGateway) -> None:
    alone = {"swarm_url": None, "hooks": None, "upstream": {"base_url": upstream.url}}
    headers = {**JSON, "content-encoding": "gzip"}
    async with open_gateway(**alone) as http:
        for body in (BODY, BODY | {"audio": {"voice": "alloy"}}):
            await http.post(CHAT, content=gzip.compress(json.dumps(body).encode()), headers=headers)
            assert upstream.got[-1].body == body and "content-encoding" not in upstream.got[-1].headers


async def test_what_is_told_of_an_answer_may_be_compressed(gateway: Http) -> None:
    body = gzip.compress(json.dumps({"completion_id": (await ask(gateway)).json()["id"], "label": "good"}).encode())
    response = await gateway.post("/v1/feedback", content=body, headers={**JSON, "content-encoding": "gzip"})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("method", "path", "code", "hinted"),
    [
        ("GET", CHAT, "method_not_allowed", False),
        ("GET", "/tokenize", "method_not_allowed", False),
        ("GET", "/nowhere", "route_not_found", False),
        # as applications ask whether there is anything at their base_url; a redirect would name scheme and host
        ("GET", "/v1", "route_not_found", False),
        ("GET", "/v1/", "route_not_found", False),
        ("POST", "/v1/v1/chat/completions", "route_not_found", False),
        ("POST", "/chat/completions", "route_not_found", True),
        ("GET", "/models/tiny", "route_not_found", True),
    ],
)
async def test_wrong_routes(gateway: Http, method: str, path: str, code: str, hinted: bool) -> None:
    response = await gateway.request(method, path)
    assert response.status_code == (405 if code == "method_not_allowed" else 404)
    assert response.json()["error"]["code"] == code
    # its whole address a gateway does not know: a balancer may speak TLS, and take a prefix off
    assert response.json()["error"]["message"].endswith("base_url must end with /v1") is hinted
    assert response.headers.get("allow") == ("POST" if code == "method_not_allowed" else None)


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
        assert (await ask(http, headers)).status_code == status
    async with open_gateway(api_keys=["secret"]) as http:
        keyed = {**headers, "authorization": "Bearer secret"}
        assert (await ask(http, keyed)).status_code == 200


async def test_a_container_without_a_key_is_told_what_to_do(gateway: Http) -> None:
    refused = await gateway.get("/v1/models", headers={"host": "host.docker.internal:8000"})
    assert refused.status_code == 421
    for words in ("host.docker.internal", "api_keys", "host: 0.0.0.0", "--network host"):
        assert words in refused.json()["error"]["message"]


PAGE = {"origin": "https://app.example"}
PREFLIGHT = {
    **PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,x-stainless-lang",
}


@pytest.mark.parametrize("keys", [[], ["secret"]])
async def test_a_page_that_is_named_uses_the_gateway(open_gateway: OpenGateway, keys: list[str]) -> None:
    # browsers say it in lower case
    async with open_gateway(cors_origins=["https://App.example"], api_keys=keys) as http:
        asked = await http.options(CHAT, headers=PREFLIGHT)
        assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, PAGE["origin"])
        assert "x-stainless-lang" in asked.headers["access-control-allow-headers"]
        answer = await ask(http, PAGE | {"authorization": "Bearer secret"})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE["origin"])
        assert answer.headers["access-control-expose-headers"] == "*" and answer.headers["x-request-id"]
        other = {"origin": "https://other.example"}
        refused = await http.options(CHAT, headers=PREFLIGHT | other)
        assert refused.status_code == 400 and "access-control-allow-origin" not in refused.headers
        answer = await ask(http, other | {"authorization": "Bearer secret"})
        assert answer.status_code == (200 if keys else 403)
        assert "access-control-allow-origin" not in answer.headers
        if keys:
            wrong = await ask(http, PAGE)
            # the page's script reads why
            assert (wrong.status_code, wrong.headers["access-control-allow-origin"]) == (401, PAGE["origin"])


@pytest.mark.parametrize(("keys", "origin"), [([], "http://localhost:3000"), (["secret"], "https://app.example")])
async def test_without_the_setting_a_preflight_is_told_of_it(
    open_gateway: OpenGateway, keys: list[str], origin: str
) -> None:
    """It never has a key."""
    asked = {"origin": origin, "access-control-request-method": "POST"}
    async with open_gateway(api_keys=keys) as http:
        for path in (CHAT, "/v1/embeddings", "/admin/reload", "/status"):
            answer = await http.options(path, headers=asked)
            assert answer.status_code == 405 and "cors_origins" in answer.json()["error"]["message"]
            assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("origin", ["*", "app.example", "https://app.example/", "https://a/b"])
async def test_an_origin_that_cannot_be_is_refused(open_gateway: OpenGateway, origin: str) -> None:
    with pytest.raises(ValidationError, match="cors_origins"):
        async with open_gateway(cors_origins=[origin]):
            pass


async def test_any_page_may_use_a_gateway_with_keys(open_gateway: OpenGateway) -> None:
    async with open_gateway(cors_origins=["*"], api_keys=["secret"]) as http:
        answer = await ask(http, PAGE | {"authorization": "Bearer secret"})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")


async def test_probes_as_of_vllm(open_gateway: OpenGateway) -> None:
    async with open_gateway(api_keys=["secret"]) as http:
        for method in ("GET", "POST"):
            pong = await http.request(method, "/ping")
            assert (pong.status_code, pong.content) == (200, b"")
        assert (await http.get("/version")).status_code == 401
        told = await http.get("/version", headers={"authorization": "Bearer secret"})
        assert told.json() == {"version": gateway_package.__version__}


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
async def test_a_slash_at_the_end_leads_to_the_path(gateway: Http, path: str) -> None:
    body = BODY | {"max_tokens": 9}
    moved = await gateway.post(f"{path}/?beta=true", json=body)
    # without scheme and host: where a balancer speaks TLS, the gateway knows neither
    assert moved.status_code == 307 and moved.headers["location"] == f"{path}?beta=true"
    assert (await gateway.post(f"{path}/", json=body, follow_redirects=True)).status_code == 200
    assert (await gateway.get("/v1/models/")).json() == (await gateway.get("/v1/models")).json()
    assert (await gateway.post("/v1/nowhere/", json=body)).status_code == 404


async def test_models(swarm: Swarm, gateway: Http) -> None:
    listed = (await gateway.get("/v1/models")).json()
    assert (listed["object"], [card["id"] for card in listed["data"]]) == ("list", ["tiny"])
    card = (await gateway.get("/v1/models/tiny")).json()
    assert card == listed["data"][0]
    assert (card["object"], card["max_model_len"]) == ("model", swarm.job.max_model_len)
    missing = await gateway.get("/v1/models/org/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    assert "`tiny`" in missing.json()["error"]["message"]


async def test_an_alias_is_the_model(swarm: Swarm, open_gateway: OpenGateway) -> None:
    async with open_gateway(model_aliases=["gpt-4o-mini", "tiny"]) as http:
        listed = (await http.get("/v1/models")).json()["data"]
        assert [(card["id"], card["root"]) for card in listed] == [("tiny", "tiny"), ("gpt-4o-mini", "tiny")]
        assert (await http.get("/v1/models/gpt-4o-mini")).json() == listed[1]
        response = await ask(http, model="gpt-4o-mini")
        assert (response.status_code, response.json()["model"]) == (200, "tiny")
        assert swarm.bodies == [BODY]
        unknown = await ask(http, model="gpt-5")
    assert unknown.status_code == 404
    assert "add `gpt-5` to the gateway's model_aliases" in unknown.json()["error"]["message"]


async def test_every_route_is_documented(tmp_path: Path, swarm: Swarm, gateway: Http) -> None:
    document = (await gateway.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    assert {reference.rpartition("/")[2] for reference in references(document)} <= schemas.keys()
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    app = create_app(GatewayConfig(hooks=str(write_hooks(tmp_path / "hooks"))))
    served = {
        (method.lower(), route.path_format)
        for route in app.routes
        # the swarm server's own paths below /admin are second names
        if isinstance(route, Route) and route.path != ANY_OTHER and route.include_in_schema
        for method in (route.methods or set()) - {"HEAD"}
    }
    paths = document["paths"]
    assert {(method, path) for path, methods in paths.items() for method in methods} == served
    summaries = {path: told.get("summary", "") for path, methods in paths.items() for told in methods.values()}
    # an address stands beside it already, and `` is no Markdown
    assert [path for path, summary in summaries.items() if not summary or "``" in summary] == []
    assert "security" not in paths["/health"]["get"]
    assert paths["/v1/chat/completions"]["post"]["security"] == [{"key": []}, {}]
    assert paths["/v1/feedback"]["post"]["requestBody"]["required"]
    assert not paths["/v1/sessions/{id}/end"]["post"]["requestBody"]["required"]


async def test_health_is_alive_without_a_swarm_server(open_gateway: OpenGateway) -> None:
    async with open_gateway(swarm_url="http://127.0.0.1:9", offline_wait_seconds=0.1) as http:
        response = await http.get("/health")
        assert (response.status_code, response.json()["engine"]) == (200, "unreachable")
        assert (await http.get("/v1/models")).status_code == 503


async def test_health_does_not_wait_for_a_swarm_server_that_hangs(swarm: Swarm, gateway: Http) -> None:
    swarm.silent = True
    for path in ("/health", "/status"):
        response = await gateway.get(path, timeout=3)
        assert (response.status_code, response.json()["engine"]) == (200, "unreachable")
    swarm.silent = False
    await swarm.set_state(EngineState.WEIGHT_SYNCING)
    health = (await gateway.get("/health")).json()
    assert (health["engine"], health["policy_version"]) == ("ENGINE.WEIGHT_SYNCING", 7)


async def test_the_history_of_a_run_is_not_read_again_each_second(swarm: Swarm, gateway: Http) -> None:
    """A thousand steps of eighty metrics are 3.5 MB, which hold up the streams of the swarm server and the gateway."""
    assert (await ask(gateway)).status_code == 200
    assert swarm.status_query == {"steps": "0", "episodes": "0"}


async def test_keys(swarm: Swarm, open_gateway: OpenGateway) -> None:
    async with open_gateway(api_keys=["secret"]) as http:
        wrong: list[Any] = [
            {},
            {"authorization": "Bearer wrong"},
            {"x-api-key": "wrong"},
            {"x-api-key": b"\xff\xc3\xa4"},
        ]
        for headers in wrong:
            refused = await ask(http, headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
            assert refused.headers["x-request-id"]
        assert (await http.get("/status")).status_code == 401
        assert (await http.get("/health")).status_code == 200
        assert not swarm.claims
        for headers in ({"authorization": "Bearer secret"}, {"x-api-key": "secret"}):
            assert (await ask(http, headers)).status_code == 200


def test_a_hook_file_with_a_syntax_error_stops_the_start(tmp_path: Any) -> None:
    hooks = write_hooks(tmp_path / "hooks", reward="def on_compute_relative_reward(:\n")
    with pytest.raises(ConfigError, match=r"on_compute_relative_reward\.py.*line 1"):
        create_app(GatewayConfig(hooks=str(hooks)))
