"""Which route a model name leads to, with several swarm servers and a plain upstream behind one gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse

from gateway.app import create_app
from gateway.config.gateway import read_config
from gateway.keys.store import KeyFile
from swarm.errors import ConfigError
from swarm.job import TrainJob
from swarm.states import EngineState
from tests.gateway.conftest import BODY, CHAT, REWARD, Http, OpenGateway, serving, write_hooks
from tests.standins.swarm import Swarm
from tests.standins.upstream import Upstream
from tests.standins.vllm import listening

pytestmark = pytest.mark.anyio
#: Shorter answers are better.
BRIEF = REWARD.replace("[len(", "[1 - len(")


@dataclass
class Team:
    """Two swarm servers that serve ``plan-1`` and ``code-1``, and an upstream that has ``big``."""

    folder: Path
    planner: Swarm
    coder: Swarm
    upstream: Upstream

    def routes(self) -> list[dict[str, Any]]:
        return [
            {"name": "planner", "models": ["planner", "gpt-4o"], "swarm_url": self.planner.url},
            {"name": "coder", "swarm_url": self.coder.url, "hooks": str(write_hooks(self.folder / "brief", BRIEF))},
            {"name": "other", "swarm_url": None, "upstream": {"base_url": self.upstream.url}},
        ]

    def gateway(self, **settings: Any) -> AbstractAsyncContextManager[Http]:
        """One with these three routes, or those of ``settings``."""
        config = {
            "hooks": str(write_hooks(self.folder / "hooks")),
            "acknowledge_seconds": 5.0,
            "offline_wait_seconds": 0.0,
            "routes": self.routes(),
            **settings,
        }
        return serving(create_app(read_config(config, folder=self.folder)))

    @property
    def asked(self) -> tuple[int, int, int]:
        """How many groups and requests the three got."""
        return len(self.planner.ends), len(self.coder.ends), len(self.upstream.got)


@pytest.fixture
async def team(tmp_path: Path, upstream: Upstream) -> AsyncIterator[Team]:
    planner, coder = Swarm(num_repeat=2), Swarm(num_repeat=2)
    for swarm, model in ((planner, "plan-1"), (coder, "code-1")):
        swarm.job = TrainJob(model=model, num_repeat=2, batch_size=2)
    async with listening(planner.app) as planner.url, listening(coder.app) as coder.url:
        yield Team(tmp_path, planner, coder, upstream)


async def ask(http: Http, model: str | None) -> httpx.Response:
    body: dict[str, Any] = {"messages": BODY["messages"]}
    return await http.post(CHAT, json=body if model is None else {**body, "model": model})


async def test_a_name_leads_to_its_route(team: Team) -> None:
    async with team.gateway() as http:
        # the hook of the top holds here: the longer answer is the better one
        for number, model in enumerate(("planner", "gpt-4o"), start=1):
            answer = await ask(http, model)
            assert (answer.status_code, answer.json()["choices"][0]["message"]["content"]) == (200, "word word")
            assert team.asked == (number, 0, 0)
        assert [end["workflow_output"]["reward"] for end in team.planner.ends[0]["ends"]] == [0.1, 0.2]
        # without names a route has its own and that of the model it serves; its own hook judges
        for number, model in enumerate(("coder", "code-1"), start=1):
            answer = await ask(http, model)
            assert (answer.status_code, answer.json()["choices"][0]["message"]["content"]) == (200, "word")
            assert team.asked == (2, number, 0)
        answer = await ask(http, "other")
        assert (answer.status_code, answer.headers["x-swarm-trained"]) == (200, "false")
        for model in ("plan-1", "unheard-of", None):
            answer = await ask(http, model)
            assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")
            for name in ("planner", "gpt-4o", "coder", "other"):
                assert f"`{name}`" in answer.json()["error"]["message"]
    assert team.asked == (2, 2, 1)


async def test_the_default_route_takes_what_has_no_other(team: Team) -> None:
    async with team.gateway(default_route="other") as http:
        for model in ("unheard-of", None):
            assert (await ask(http, model)).status_code == 200
        listed = [card["id"] for card in (await http.get("/v1/models")).json()["data"]]
    assert [got.body.get("model") for got in team.upstream.got] == ["unheard-of", None]
    assert sorted(listed) == ["big", "code-1", "coder", "gpt-4o", "other", "planner"]


async def test_a_name_that_the_upstream_has_too_is_listed_as_it_lists_it(team: Team) -> None:
    names = ("big", "coder")
    listed = [{"id": name, "object": "model", "max_model_len": 4096} for name in names]
    team.upstream.models = JSONResponse({"object": "list", "data": listed})
    routes = team.routes()
    routes[2]["models"] = ["big"]
    async with team.gateway(routes=routes, default_route="other") as http:
        cards = {name: (await http.get(f"/v1/models/{name}")).json() for name in names}
    assert cards["big"]["max_model_len"] == 4096
    assert cards["coder"]["root"] == "code-1", "another route's name is its own"


async def test_the_only_route_may_be_the_default_too(team: Team) -> None:
    async with team.gateway(routes=[], swarm_url=team.planner.url, default_route="default") as http:
        for model in ("unheard-of", "plan-1", None):
            assert (await ask(http, model)).status_code == 200
    assert {body["model"] for body in team.planner.bodies} == {"plan-1"} and team.asked == (3, 0, 0)


async def test_aliases_are_names_of_the_default_route(team: Team) -> None:
    async with team.gateway(default_route="coder", model_aliases=["o1"]) as http:
        assert (await ask(http, "o1")).status_code == 200
    assert team.asked == (0, 1, 0)


async def test_a_pattern_leads_to_its_route_where_no_whole_name_does(team: Team) -> None:
    routes = team.routes()
    routes[0]["models"] = ["claude-*", "code-*", "gpt-4?"]
    routes[2]["models"] = ["claude-haiku-*", "claude-haiku-4[1m]"]
    async with team.gateway(routes=routes, default_route="coder", model_aliases=["claude-opus-5-5", "o*"]) as http:
        expected = {
            "claude-sonnet-5-5": (1, 0, 0),
            "gpt-4o": (2, 0, 0),
            "claude-haiku-4-5": (2, 0, 1),
            "claude-haiku-4[1m]": (2, 0, 2),
            "claude-opus-5-5": (2, 1, 2),
            "code-1": (2, 2, 2),
            "o3": (2, 3, 2),
        }
        for model, asked in expected.items():
            assert (await ask(http, model)).status_code == 200
            assert team.asked == asked, model
        cards = (await http.get("/v1/models")).json()["data"]
        card = (await http.get("/v1/models/claude-sonnet-5-5")).json()
    # a pattern is no model; the route that has nothing else is listed by its own names
    assert sorted(one["id"] for one in cards) == [
        "claude-haiku-4[1m]",
        "claude-opus-5-5",
        "code-1",
        "coder",
        "plan-1",
        "planner",
    ]
    assert (card["id"], card["root"]) == ("claude-sonnet-5-5", "plan-1")


async def test_an_unknown_name_is_told_the_patterns(open_gateway: OpenGateway) -> None:
    async with open_gateway(model_aliases=["claude-*"]) as http:
        assert (await ask(http, "claude-opus-5-5")).status_code == 200
        answer = await ask(http, "gpt-7")
        listed = [one["id"] for one in (await http.get("/v1/models")).json()["data"]]
    assert answer.status_code == 404 and "`claude-*`, `tiny`" in answer.json()["error"]["message"]
    assert listed == ["tiny"]


async def test_a_key_opens_its_routes_alone(team: Team) -> None:
    file = KeyFile(team.folder / "keys.json")
    _, key = file.create("app", routes=["coder"])
    async with team.gateway(keys_file=str(file.path)) as http:
        http.headers["authorization"] = f"Bearer {key}"
        refused = await ask(http, "planner")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "route_not_allowed")
        assert "`coder`" in refused.json()["error"]["message"]
        assert (await http.get("/status")).status_code == 403
        assert (await ask(http, "coder")).status_code == 200
        listed = [card["id"] for card in (await http.get("/v1/models")).json()["data"]]
    assert listed == ["code-1", "coder"] and not team.planner.claims


async def test_one_swarm_server_that_is_away_leaves_the_others_alone(team: Team, nobody: str) -> None:
    routes = team.routes()
    routes[0]["swarm_url"] = nobody
    async with team.gateway(routes=routes) as http:
        away = await ask(http, "planner")
        assert (away.status_code, away.json()["error"]["code"]) == (503, "server_unreachable")
        assert "retry-after" in away.headers
        assert (await ask(http, "coder")).status_code == 200
        told = (await http.get("/status")).json()["routes"]
    assert (told["planner"]["errors"], told["coder"]["errors"]) == ({"server_unreachable": 1}, {})


async def test_a_name_that_a_silent_server_may_serve_is_not_said_to_be_unknown(team: Team, nobody: str) -> None:
    routes = [{"name": "one", "swarm_url": nobody}, {"name": "two", "swarm_url": f"{nobody}/"}]
    async with team.gateway(routes=routes) as http:
        answer = await ask(http, "plan-1")
    assert (answer.status_code, nobody in answer.json()["error"]["message"]) == (503, True)


async def test_a_server_that_hangs_holds_up_no_request_of_another_route(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.rollout.server._STATUS_STALE", 0.0)
    monkeypatch.setattr("gateway.rollout.server._STATUS_AGE", 0.0)
    routes = [
        {"name": "one", "swarm_url": team.planner.url, "models": ["gpt-*"]},
        {"name": "two", "swarm_url": team.coder.url},
    ]
    async with team.gateway(routes=routes) as http:
        assert (await ask(http, "code-1")).status_code == 200
        team.coder.silent = True
        assert (await ask(http, "gpt-5")).status_code == 200
        one, two = (await http.get("/status")).json()["swarms"]
        # nobody knows yet
        assert (one["down_since"], two["down_since"]) == (None, None)
        team.coder.silent = False
        await team.coder.set_state(EngineState.ROLLING)
    assert team.asked == (1, 1, 0)


async def test_the_models_are_listed_once_the_first_server_has_a_job(team: Team) -> None:
    # the job comes after the gateway has read its first status, as it did under `up` on a fast machine
    job, team.planner.job = team.planner.job, None
    async with team.gateway(routes=[], swarm_url=team.planner.url, offline_wait_seconds=30.0) as http:
        listed = asyncio.create_task(http.get("/v1/models"))
        await team.planner.until(lambda: team.planner.status_reads)
        team.planner.job = job
        answer = await listed
    assert (answer.status_code, [card["id"] for card in answer.json().get("data", ())]) == (200, ["plan-1"])


async def test_a_list_of_models_that_nobody_can_give_is_refused_within_the_bound(nobody: str, tmp_path: Path) -> None:
    settings = {"hooks": str(write_hooks(tmp_path / "hooks")), "swarm_url": nobody, "offline_wait_seconds": 0.0}
    async with serving(create_app(read_config(settings))) as http:
        answer = await http.get("/v1/models")
    assert (answer.status_code, "retry-after" in answer.headers) == (503, True)


async def test_a_name_waits_for_the_servers_that_have_no_job_yet(team: Team) -> None:
    jobs = team.planner.job, team.coder.job
    team.planner.job = team.coder.job = None
    routes = [{"name": "one", "swarm_url": team.planner.url}, {"name": "two", "swarm_url": team.coder.url}]
    async with team.gateway(routes=routes, offline_wait_seconds=30.0) as http:
        asked = asyncio.create_task(ask(http, "code-1"))
        await team.planner.until(lambda: team.planner.status_reads)
        await team.coder.until(lambda: team.coder.status_reads)
        team.planner.job, team.coder.job = jobs
        assert (await asked).status_code == 200
    assert team.asked == (0, 1, 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"routes": [{"name": "a"}, {"name": "a"}]}, "'a' is given more than once"),
        ({"routes": [{"name": "a", "models": ["m"]}, {"name": "b", "models": ["m"]}]}, "'m' is given more than once"),
        ({"routes": [{"name": "a"}], "default_route": "b"}, "there is no route named 'b'; there is 'a'"),
        ({"default_route": "b"}, "there is no route named 'b'; there is 'default'"),
        ({"routes": [{"name": "a", "swarm_url": None}]}, "set swarm_url, upstream or both"),
        ({"routes": [{"name": "a", "hook": "x"}]}, "routes.0: unknown key 'hook'"),
        # it is there before the route of a request is known
        ({"routes": [{"name": "a", "keepalive_seconds": 1}]}, "routes.0: unknown key 'keepalive_seconds'"),
    ],
)
def test_routes_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_config({"hooks": "h", **settings})
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
    config = {"hooks": str(folder), **settings}
    # without a hook for sessions these settings mean nothing
    create_app(read_config(config))
    (folder / "on_session_end.py").write_text("def on_session_end(session, context):\n    return []\n")
    if not refused:
        create_app(read_config(config))
        return
    with pytest.raises(ConfigError, match=r"session_idle_seconds .* is not below session_window_seconds"):
        create_app(read_config(config))
