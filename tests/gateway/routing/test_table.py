"""Which route a model name leads to, with several swarm servers and a plain upstream behind one gateway."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.app import create_app
from gateway.config.load import parse_config
from gateway.keys.store import KeyFile
from swarm.errors import ConfigError
from swarm.job import TrainJob
from tests.gateway.conftest import REWARD, write_hooks
from tests.standins.swarm import Swarm, completion
from tests.standins.vllm import listening

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
#: Shorter answers are better.
BRIEF = REWARD.replace("[len(", "[1 - len(")


@dataclass
class Team:
    """Two swarm servers that serve ``plan-1`` and ``code-1``, and an upstream that has ``big``."""

    folder: Path
    planner: Swarm
    coder: Swarm
    upstream_url: str
    asked: list[Any]

    def routes(self) -> list[dict[str, Any]]:
        return [
            {"name": "planner", "models": ["planner", "gpt-4o"], "swarm_url": self.planner.url},
            {"name": "coder", "swarm_url": self.coder.url, "hooks": str(write_hooks(self.folder / "brief", BRIEF))},
            {"name": "other", "swarm_url": None, "upstream": {"base_url": f"{self.upstream_url}/v1"}},
        ]

    def gateway(self, **settings: Any) -> Starlette:
        """An app with these three routes, or those of ``settings``."""
        config = {
            "hooks": str(write_hooks(self.folder / "hooks")),
            "acknowledge_seconds": 5.0,
            "offline_wait_seconds": 0.0,
            "routes": self.routes(),
            **settings,
        }
        return create_app(parse_config(yaml.safe_dump(config), folder=self.folder))


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address where nobody listens, and nobody else will."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture
async def team(tmp_path: Path) -> AsyncIterator[Team]:
    asked: list[Any] = []

    async def chat(request: Request) -> Response:
        asked.append((await request.json()).get("model"))
        return JSONResponse(completion("from the upstream"))

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "big", "object": "model"}]})

    upstream = Starlette(
        routes=[Route("/v1/chat/completions", chat, methods=["POST"]), Route("/v1/models", models, methods=["GET"])]
    )
    async with AsyncExitStack() as stack:
        swarms: list[Swarm] = []
        for model in ("plan-1", "code-1"):
            swarm = Swarm(num_repeat=2)
            swarm.job = TrainJob(model=model, num_repeat=2, batch_size=2)
            swarm.url = await stack.enter_async_context(listening(swarm.app))
            swarms.append(swarm)
        yield Team(tmp_path, *swarms, await stack.enter_async_context(listening(upstream)), asked)


async def ask(app: Starlette, model: str | None) -> httpx.Response:
    async with listening(app) as url, httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
        return await asked_for(http, model)


async def asked_for(http: httpx.AsyncClient, model: str | None) -> httpx.Response:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
    return await http.post(CHAT, json=body if model is None else {**body, "model": model})


@pytest.mark.parametrize("model", ["planner", "gpt-4o"])
async def test_a_name_of_a_route_leads_to_its_swarm_server(team: Team, model: str) -> None:
    answer = await ask(team.gateway(), model)
    # what the top says of all routes holds here: the longer answer is the better one
    assert (answer.status_code, answer.json()["choices"][0]["message"]["content"]) == (200, "word word")
    assert [end["workflow_output"]["reward"] for end in team.planner.ends[0]["ends"]] == [0.1, 0.2]
    assert not team.coder.claims and not team.asked


@pytest.mark.parametrize("model", ["coder", "code-1"])
async def test_without_names_a_route_has_its_own_and_that_of_the_model_it_serves(team: Team, model: str) -> None:
    answer = await ask(team.gateway(), model)
    # its own hook judges
    assert (answer.status_code, answer.json()["choices"][0]["message"]["content"]) == (200, "word")
    assert len(team.coder.ends) == 1
    assert not team.planner.claims and not team.asked


async def test_a_plain_upstream_is_a_route_like_any_other(team: Team) -> None:
    answer = await ask(team.gateway(), "other")
    assert (answer.status_code, answer.headers["x-swarm-trained"], team.asked) == (200, "false", ["other"])
    assert not team.planner.claims and not team.coder.claims


@pytest.mark.parametrize("model", ["plan-1", "unheard-of", None])
async def test_what_has_no_route_is_refused_with_the_names_there_are(team: Team, model: str | None) -> None:
    answer = await ask(team.gateway(), model)
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")
    for name in ("planner", "gpt-4o", "coder", "other"):
        assert f"`{name}`" in answer.json()["error"]["message"]


@pytest.mark.parametrize("model", ["unheard-of", None])
async def test_the_default_route_takes_what_has_no_other(team: Team, model: str | None) -> None:
    answer = await ask(team.gateway(default_route="other"), model)
    assert (answer.status_code, team.asked) == (200, [model])


@pytest.mark.parametrize("model", ["unheard-of", "plan-1", None])
async def test_the_only_route_may_be_the_default_too(team: Team, model: str | None) -> None:
    answer = await ask(team.gateway(routes=[], swarm_url=team.planner.url, default_route="default"), model)
    assert (answer.status_code, len(team.planner.ends)) == (200, 1)
    assert {body["model"] for body in team.planner.bodies} == {"plan-1"}


async def test_aliases_are_names_of_the_default_route(team: Team) -> None:
    answer = await ask(team.gateway(default_route="coder", model_aliases=["o1"]), "o1")
    assert (answer.status_code, len(team.coder.ends)) == (200, 1)


async def test_models_are_listed_with_those_of_an_upstream_that_takes_the_rest(team: Team) -> None:
    async with (
        listening(team.gateway(default_route="other")) as url,
        httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http,
    ):
        listed = [card["id"] for card in (await http.get("/v1/models")).json()["data"]]
    assert sorted(listed) == ["big", "code-1", "coder", "gpt-4o", "other", "planner"]


async def test_a_key_opens_its_routes_alone(team: Team) -> None:
    file = KeyFile(team.folder / "keys.json")
    _, key = file.create("app", routes=["coder"])
    app = team.gateway(keys_file=str(file.path))
    async with (
        listening(app) as url,
        httpx.AsyncClient(
            base_url=url, timeout=60, trust_env=False, headers={"authorization": f"Bearer {key}"}
        ) as http,
    ):
        refused = await asked_for(http, "planner")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "route_not_allowed")
        assert (await asked_for(http, "coder")).status_code == 200
        listed = [card["id"] for card in (await http.get("/v1/models")).json()["data"]]
    assert listed == ["code-1", "coder"] and not team.planner.claims


async def test_one_swarm_server_that_is_away_leaves_the_others_alone(team: Team, nobody: str) -> None:
    routes = team.routes()
    routes[0]["swarm_url"] = nobody
    async with (
        listening(team.gateway(routes=routes)) as url,
        httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http,
    ):
        away = await asked_for(http, "planner")
        assert (away.status_code, away.json()["error"]["code"]) == (503, "server_unreachable")
        assert "retry-after" in away.headers
        assert (await asked_for(http, "coder")).status_code == 200
        told = (await http.get("/status")).json()["routes"]
    assert (told["planner"]["errors"], told["coder"]["errors"]) == ({"server_unreachable": 1}, {})


async def test_a_name_that_a_silent_server_may_serve_is_not_said_to_be_unknown(team: Team, nobody: str) -> None:
    routes = [{"name": "one", "swarm_url": nobody}, {"name": "two", "swarm_url": f"{nobody}/"}]
    answer = await ask(team.gateway(routes=routes), "plan-1")
    assert (answer.status_code, nobody in answer.json()["error"]["message"]) == (503, True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"routes": [{"name": "a"}, {"name": "a"}]}, "'a' is given more than once"),
        ({"routes": [{"name": "a", "models": ["m"]}, {"name": "b", "models": ["m"]}]}, "'m' is given more than once"),
        ({"routes": [{"name": "a"}], "default_route": "b"}, "there is no route named 'b'; there is 'a'"),
        ({"default_route": "b"}, "there is no route named 'b'; there is 'default'"),
        ({"routes": [{"name": "a", "swarm_url": None}]}, "set swarm_url, upstream or both"),
        ({"routes": [{"name": "a", "hook": "x"}]}, "routes: 0: unknown key 'hook'"),
        # it is there before the route of a request is known
        ({"routes": [{"name": "a", "keepalive_seconds": 1}]}, "routes: 0: unknown key 'keepalive_seconds'"),
    ],
)
def test_routes_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config(yaml.safe_dump({"hooks": "h", **settings}))
    assert message in refused.value.message


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({}, False),
        ({"session_idle_seconds": 1800}, True),
        ({"session_window_seconds": 300}, True),
        ({"session_window_seconds": 30, "session_idle_seconds": 20}, False),
        # nothing is to be credited
        ({"session_window_seconds": 0}, False),
    ],
)
def test_a_session_has_to_end_before_its_groups(tmp_path: Path, settings: dict[str, Any], refused: bool) -> None:
    folder = write_hooks(tmp_path / "hooks")
    config = yaml.safe_dump({"hooks": str(folder), **settings})
    # without a hook for sessions these settings mean nothing
    create_app(parse_config(config))
    (folder / "on_session_end.py").write_text("def on_session_end(session, context):\n    return []\n")
    if not refused:
        create_app(parse_config(config))
        return
    with pytest.raises(ConfigError, match=r"session_idle_seconds .* is not below session_window_seconds"):
        create_app(parse_config(config))
