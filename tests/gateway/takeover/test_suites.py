"""Protected suites: a challenger that is worse on held-out prompts is not promoted, however good it is live."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.app import create_app
from gateway.config.gateway import read_config
from gateway.takeover.shadow import whole_answer
from gateway.takeover.suites import Suite
from swarm.concurrency import ClientGoneError, until_gone
from swarm.errors import ConfigError
from swarm.evidence.pairs import Pair
from swarm.evidence.stages import ServingStage
from tests.gateway.conftest import CHAT, Http, OpenGateway, ask, serving, write_hooks
from tests.gateway.takeover.test_shadow import known, pairs_of, serve
from tests.gateway.takeover.test_stages import move
from tests.standins.swarm import Swarm, as_one, error, said
from tests.standins.upstream import Upstream

pytestmark = pytest.mark.anyio

#: Rewards by the words of an answer; the rows of the suite say what is right.
JUDGE = """
REWARDS = {"good": 1.0, "bad": 0.0}

def on_compute_relative_reward(task, candidates, context):
    assert task.metadata.get("right") == ("yes" if "sum" in task.main_query else None), task
    return [REWARDS[candidate.text] for candidate in candidates]
"""
#: Fails on the suite.
DEAD = JUDGE.replace("    assert", "    assert 'sum' not in task.main_query\n    assert")
GATE = {"mode": "auto", "trial_every": 5, "margin": 0.5, "better": True}


class Engine:
    """What both sides answer: to prompts of the suite, and to users."""

    def __init__(self, swarm: Swarm, upstream: Upstream) -> None:
        self.suite, self.incumbent = "good", "good"
        #: prompts of the suite that each side was asked
        self.sampled: list[str] = []
        self.asked: list[str] = []
        self.left = asyncio.Event()
        self.go = asyncio.Event()
        self.go.set()
        swarm.answer = self._live
        swarm.app.router.routes.append(Route(CHAT, self._unrecorded, methods=["POST"]))
        upstream.answers[CHAT] = self._incumbent

    def _live(self, body: dict[str, Any], number: int) -> Response:
        return said("good")

    def _incumbent(self, body: dict[str, Any]) -> Response:
        prompt = body["messages"][-1]["content"]
        if not prompt.startswith("sum"):
            return said("bad")
        self.asked.append(prompt)
        match self.incumbent:
            case "fails":
                return error(500, "boom")
            case "malformed":
                return said("good", tool_calls="none")
            case words:
                return said(words)

    async def _unrecorded(self, request: Request) -> Response:
        self.sampled.append((await request.json())["messages"][-1]["content"])
        try:
            await until_gone(request.receive, self.go.wait())
        except ClientGoneError:
            self.left.set()
            return Response(status_code=499)
        response = as_one([said(self.suite)] * int(request.headers["x-swarm-samples"]))
        response.headers["x-swarm-policy-version"] = "7"
        return response


@pytest.fixture
def engine(swarm: Swarm, upstream: Upstream) -> Engine:
    return Engine(swarm, upstream)


def written(folder: Path, prompts: int = 3) -> str:
    rows = [{"prompt": f"sum {number}", "right": "yes"} for number in range(prompts)]
    (folder / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(folder / "sums.jsonl")


def settings(upstream: Upstream, suites: dict[str, str], **more: Any) -> dict[str, Any]:
    return serve(upstream, gate=GATE | more | {"suites": suites}, canary={"shares": [0.5]})


def draws(swarm: Swarm) -> list[Pair]:
    return [pair for pair in pairs_of(swarm) if pair.suite]


def stage_of(swarm: Swarm) -> ServingStage:
    [stage] = swarm.stages.pointers.values()
    return stage


async def ask_until(http: Http, condition: Callable[[], object]) -> None:
    """Users ask until ``condition`` holds."""
    async with asyncio.timeout(30):
        while not condition():
            assert (await ask(http)).status_code == 200


@pytest.mark.parametrize("suite", ["none", "good", "bad"])
async def test_a_challenger_that_is_worse_on_a_suite_is_not_promoted(
    swarm: Swarm, upstream: Upstream, engine: Engine, open_gateway: OpenGateway, tmp_path: Path, suite: str
) -> None:
    engine.suite = suite
    suites = {} if suite == "none" else {"sums": written(tmp_path)}
    async with open_gateway(**settings(upstream, suites), reward=JUDGE) as http:
        await known(http, "shadow")
        if suite == "bad":
            await swarm.until(lambda: draws(swarm) and not stage_of(swarm).trial)
            # while the machine is busy, a request may have no shadow
            await ask_until(http, lambda: len(pairs_of(swarm)) - len(draws(swarm)) >= 12)
            [status] = swarm.comparisons.statuses()
            assert status.verdict.sentence.startswith("better by 1.00 [")
            assert status.verdict.sentence.endswith("0 of 1 suites not worse, worse: sums")
            assert (stage_of(swarm).share, status.verdict.finding) == (0, "worse")
            return
        await ask_until(http, lambda: stage_of(swarm).share)
        assert stage_of(swarm).why.startswith("better by 1.00 [")
        assert stage_of(swarm).why.endswith("; 1 of 1 suites not worse" if suites else " requests")
        if not suites:
            return
        # the next share asks for a proof of its own, and the incumbent's answers to the same draws are kept
        asked = len(engine.asked)
        await swarm.until(lambda: [pair for pair in draws(swarm) if pair.terms.stage == "canary 0.5"])
        assert asked >= 4 and len(engine.asked) <= asked + 4
    assert {pair.terms.suites for pair in draws(swarm)} == {stage_of(swarm).rules.suites}
    assert {pair.terms.num_repeat for pair in draws(swarm)} == {4}


async def test_suites_claim_nothing_and_are_no_requests_of_users(
    swarm: Swarm, upstream: Upstream, engine: Engine, open_gateway: OpenGateway, tmp_path: Path
) -> None:
    async with open_gateway(**settings(upstream, {"sums": written(tmp_path)}), reward=JUDGE) as http:
        await swarm.until(lambda: len(draws(swarm)) >= 8)
        status = (await http.get("/status")).json()
        assert (status["requests"], status["shadows"], sum(status["answers"].values())) == (0, {}, 0)
    assert not swarm.claims and not swarm.ends
    # with replacement, each prompt as it is in the file
    assert set(engine.sampled) <= {"sum 0", "sum 1", "sum 2"}


@pytest.mark.parametrize("trouble", ["judge", "incumbent fails", "incumbent malformed"])
async def test_what_fails_counts_for_nobody_and_holds_back(
    swarm: Swarm, upstream: Upstream, engine: Engine, open_gateway: OpenGateway, tmp_path: Path, trouble: str
) -> None:
    engine.incumbent = "good" if trouble == "judge" else trouble.removeprefix("incumbent ")
    suites, reward = {"sums": written(tmp_path)}, DEAD if trouble == "judge" else JUDGE
    async with open_gateway(**settings(upstream, suites, trial_requests=12), reward=reward) as http:
        await known(http, "shadow")
        await ask_until(http, lambda: engine.asked and len(pairs_of(swarm)) - len(draws(swarm)) >= 12)
        if trouble == "judge":
            await swarm.until(lambda: not stage_of(swarm).trial)
            assert {pair.unjudged for pair in draws(swarm)} == {"the hook failed"} and len(draws(swarm)) == 12
            [status] = swarm.comparisons.statuses()
            assert "not proven: sums; held back: 12 of 12 draws of sums were not judged" in status.verdict.sentence
            assert stage_of(swarm).share == 0
            return
        assert (draws(swarm), stage_of(swarm).share, stage_of(swarm).trial) == ([], 0, True)
        engine.incumbent = "good"
        await swarm.until(lambda: stage_of(swarm).share, seconds=60)


async def test_a_draw_that_the_submit_hook_lets_pass_through_is_sampled_as_it_is(
    swarm: Swarm, upstream: Upstream, engine: Engine, open_gateway: OpenGateway, tmp_path: Path
) -> None:
    submit = """
from reward_hooks import PassThrough

def on_user_submit_new_requests(request, context):
    return PassThrough(name="sums")
"""
    async with open_gateway(**settings(upstream, {"sums": written(tmp_path)}), reward=JUDGE, submit=submit):
        await swarm.until(lambda: draws(swarm))
    assert {(pair.challenger.reward, pair.incumbent.reward) for pair in draws(swarm)} == {(1.0, 1.0)}


async def test_a_draw_that_fails_in_a_way_that_nobody_foresaw_is_repeated(
    swarm: Swarm,
    upstream: Upstream,
    engine: Engine,
    open_gateway: OpenGateway,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    failures = [RuntimeError("nobody knows")]

    async def failing(*asked: Any) -> Any:
        if failures:
            raise failures.pop()
        return await whole_answer(*asked)

    monkeypatch.setattr("gateway.takeover.suites.whole_answer", failing)
    async with open_gateway(**settings(upstream, {"sums": written(tmp_path)}), reward=JUDGE):
        await swarm.until(lambda: draws(swarm))
    assert "nobody knows" in caplog.text
    caplog.clear()


async def test_several_gateways_count_a_draw_once(
    swarm: Swarm, upstream: Upstream, engine: Engine, open_gateway: OpenGateway, tmp_path: Path
) -> None:
    suites = {"sums": written(tmp_path)}
    asked = settings(upstream, suites, margin=0.05, trial_requests=6)
    async with open_gateway(**asked, reward=JUDGE), open_gateway(**asked, reward=JUDGE):
        await swarm.until(lambda: len(draws(swarm)) == 12)
    [followed] = swarm.comparisons.followed.values()
    assert followed.draws(*stage_of(swarm).rules.suites) == (6, 0)
    groups = {pair.group_id: pair.challenger.characters for pair in draws(swarm)}
    assert len(groups) == 6


async def test_an_edit_of_the_file_begins_a_new_comparison(
    swarm: Swarm, upstream: Upstream, engine: Engine, open_gateway: OpenGateway, tmp_path: Path
) -> None:
    hooks = str(write_hooks(tmp_path / "hooks", JUDGE))
    config = read_config({"swarm_url": swarm.url, "hooks": hooks, **settings(upstream, {"sums": written(tmp_path)})})
    async with serving(create_app(config, lambda: config)) as http:
        await swarm.until(lambda: draws(swarm))
        [before] = stage_of(swarm).rules.suites
        written(tmp_path, prompts=4)
        assert (await http.post("/admin/reload")).json()["changed"] == ["serve.gate.suites"]
        await swarm.until(lambda: draws(swarm)[-1].suite != before)
    assert stage_of(swarm).rules.suites == (draws(swarm)[-1].suite,)
    assert len({pair.terms.digest for pair in draws(swarm)}) == 2


async def test_a_reload_names_an_edited_hook_of_the_gate(
    swarm: Swarm, upstream: Upstream, engine: Engine, tmp_path: Path
) -> None:
    hooks, gate = (str(write_hooks(tmp_path / name, JUDGE)) for name in ("hooks", "gate"))
    asked = settings(upstream, {"sums": written(tmp_path)}, hook=gate)
    config = read_config({"swarm_url": swarm.url, "hooks": hooks, **asked})
    async with serving(create_app(config, lambda: config)) as http:
        write_hooks(tmp_path / "gate", f"{JUDGE}\n# stricter\n")
        assert (await http.post("/admin/reload")).json()["changed"] == ["serve.gate.hook"]


async def test_a_trial_that_ends_ends_its_draws(
    swarm: Swarm, upstream: Upstream, engine: Engine, open_gateway: OpenGateway, tmp_path: Path
) -> None:
    engine.go.clear()
    async with open_gateway(**settings(upstream, {"sums": written(tmp_path)}), reward=JUDGE) as http:
        await known(http, "shadow")
        async with asyncio.timeout(30):
            while not engine.sampled:
                await http.get("/status")
        # a canary that began live users of its own is another comparison
        move(swarm, 0.5)
        await asyncio.wait_for(engine.left.wait(), 30)
        engine.go.set()
        await swarm.until(lambda: draws(swarm))
    assert {pair.terms.stage for pair in draws(swarm)} == {"canary 0.5"}


def test_a_suite_is_known_by_its_prompts(tmp_path: Path) -> None:
    suite = Suite.read("sums", written(tmp_path))
    assert suite.key.startswith("sums@") and len(suite.tasks) == 3
    assert [suite.drawn(number).main_query for number in range(20)] == [
        suite.drawn(number).main_query for number in range(20)
    ]
    assert {suite.drawn(number).main_query for number in range(50)} == {"sum 0", "sum 1", "sum 2"}
    (tmp_path / "sums.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"gate\.suites\.sums: .*sums\.jsonl holds no prompt"):
        Suite.read("sums", str(tmp_path / "sums.jsonl"))
    (tmp_path / "sums.jsonl").write_text('{"messages": [{"role": 5, "content": "sum"}]}\n')
    with pytest.raises(ConfigError, match=r"gate\.suites\.sums: prompt 1 of .*sums\.jsonl: "):
        Suite.read("sums", str(tmp_path / "sums.jsonl"))
    with pytest.raises(ConfigError, match="there is no file"):
        Suite.read("sums", str(tmp_path / "other.jsonl"))
