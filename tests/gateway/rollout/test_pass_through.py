"""Requests that are nothing to learn from: which the rules fit, and that they are answered once, counted, untrained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from adapters.dialects import ChatDialect, CompletionsDialect, MessagesDialect, ResponsesDialect
from gateway.config.route import SHIPPED, RouteSettings
from gateway.rollout.return_policy import passes
from gateway.types import Caller, Incoming
from tests.gateway.conftest import ask, gateway_before
from tests.swarm.server import conftest as server

overrides = server.overrides
rig = server.rig

RECORDED = Path(__file__).parents[2] / "adapters" / "dialects" / "recorded"
DIALECTS = {one.path: one for one in (ChatDialect(), MessagesDialect(), ResponsesDialect(stored=True))}
PASS = "from reward_hooks import PassThrough\n\ndef on_user_submit_new_requests(request, context):\n    return "


def incoming(path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Incoming:
    return Incoming(DIALECTS[path].parse(body), headers or {}, Caller(), path, b"", "req")


def passed_by(rules: list[Any], headers: dict[str, str] | None = None, **body: Any) -> str | None:
    settings = RouteSettings.model_validate({"hooks": "x", "pass_through": rules})
    messages = [{"role": "system", "content": "Be kind.\nAlways."}, {"role": "user", "content": "hi"}]
    return passes(settings, incoming("/v1/chat/completions", {"messages": messages, **body}, headers))


def recorded_turns() -> list[Any]:
    return [path for path in sorted(RECORDED.glob("*.json")) if "count_tokens" not in path.stem]


@pytest.mark.parametrize("file", recorded_turns(), ids=lambda file: file.stem)
def test_of_what_agents_really_send_only_titles_pass(file: Path) -> None:
    recorded = json.loads(file.read_text())
    agent = file.stem.split("_")[0]
    expected = f"{agent}-title" if file.stem.endswith("_title") else None
    settings = RouteSettings(hooks="x")
    assert passes(settings, incoming(recorded["path"], recorded["body"], recorded.get("headers"))) == expected


@pytest.mark.parametrize("text", ["quota", "test"])
def test_whether_the_model_answers_is_nothing_to_learn_from(text: str) -> None:
    # as in the code of Claude Code 2.1.197
    body = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": text}]}
    agent = {"user-agent": "claude-cli/2.1.197 (external, cli)"}
    settings = RouteSettings(hooks="x")
    assert passes(settings, incoming("/v1/messages", body, agent)) == "claude-check"
    assert passes(settings, incoming("/v1/messages", {**body, "max_tokens": 2}, agent)) is None
    assert passes(settings, incoming("/v1/messages", body)) is None


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize(
    ("rule", "fits", "other"),
    [
        ({"path": "/v1/chat/completions"}, {}, None),
        ({"path": "/v1/messages"}, None, {}),
        ({"headers": {"X-Kind": "^check$"}}, {"headers": {"x-kind": "check"}}, {}),
        ({"system": "^Be kind"}, {}, {"messages": [{"role": "user", "content": "Be kind"}]}),
        ({"system": "^Always"}, None, {}),
        ({"tools": True}, {"tools": TOOLS}, {}),
        ({"tools": False}, {}, {"tools": TOOLS}),
        ({"max_tokens": 2}, {"max_tokens": 1}, {"max_completion_tokens": 3}),
        ({"max_tokens": 2}, {"max_completion_tokens": 2}, {}),
        ({"max_prompt_chars": 20}, {}, {"messages": [{"role": "user", "content": "x" * 21}]}),
        ({"max_prompt_chars": 3}, {"messages": [{"role": "user", "content": [{"type": "text", "text": "abc"}]}]}, {}),
        ({"tools": False, "max_tokens": 2}, {"max_tokens": 2}, {"max_tokens": 2, "tools": TOOLS}),
    ],
)
def test_all_conditions_of_a_rule_hold(rule: dict[str, Any], fits: Any, other: Any) -> None:
    rules = [{"name": "mine", **rule}]
    assert fits is None or passed_by(rules, **fits) == "mine"
    assert other is None or passed_by(rules, **other) is None


def test_a_prompt_of_token_ids_is_not_known_to_be_short() -> None:
    rules = [{"name": "mine", "max_prompt_chars": 20}]
    settings = RouteSettings.model_validate({"hooks": "x", "pass_through": rules})
    call = CompletionsDialect().parse({"model": "tiny", "prompt": [1] * 1000})
    assert passes(settings, Incoming(call, {}, Caller(), "/v1/completions", b"", "req")) is None


@pytest.mark.parametrize("rule", [{}, {"system": "("}, {"name": "no spaces", "tools": True}, {"size": 3}, "shipped"])
def test_a_rule_that_means_nothing_is_refused(rule: Any) -> None:
    with pytest.raises(ValidationError):
        passed_by([{"name": "mine", **rule} if isinstance(rule, dict) else rule])


def test_the_shipped_rules_stay_beside_ones_own_only_if_asked_for() -> None:
    own = {"name": "mine", "tools": True}
    given = [RouteSettings.model_validate({"hooks": "x", "pass_through": one}) for one in (["agents", own], [own], [])]
    assert [len(one.pass_through) for one in given] == [len(SHIPPED) + 1, 1, 0]


@pytest.mark.anyio
@pytest.mark.parametrize("policy", ["best", "first"])
@pytest.mark.parametrize("by", ["rule", "hook"])
async def test_it_is_answered_once_and_not_trained(rig: server.Rig, tmp_path: Path, policy: str, by: str) -> None:
    settings: dict[str, Any] = {"policy": policy, "pass_through": [{"name": "mine", "max_tokens": 1}]}
    if by == "hook":
        settings = {"policy": policy, "submit": PASS + "PassThrough(name='mine')"}
    async with gateway_before(str(rig.client.base_url), tmp_path, **settings) as http:
        answer = await ask(http, max_tokens=1)
        told = answer.headers["x-swarm-trained"], answer.headers["x-swarm-drop-reason"]
        assert (answer.status_code, told) == (200, ("false", "pass_through:mine"))
        assert [sent.get("n") for _, sent in rig.vllm.requests] == [None]
        status = (await http.get("/status")).json()
        assert status["passed_through"] == status["routes"]["default"]["passed_through"] == {"mine": 1}
        assert status["groups"]["dropped"] == status["hook_failures"] == {}
        assert 'gateway_passed_total{route="default",rule="mine"} 1.0' in (await http.get("/metrics")).text
        information = rig.controller.pool.information()
        assert information.completed_episodes == information.running_episodes == 0
        if by == "rule":
            insisted = await ask(http, {"x-swarm-train": "true"}, max_tokens=1)
            assert "x-swarm-drop-reason" not in insisted.headers
