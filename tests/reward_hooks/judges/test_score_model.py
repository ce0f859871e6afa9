"""Reward models over HTTP: vLLM's two routes, any JSON endpoint, and path expressions."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.responses import JSONResponse

from reward_hooks.judges.score_model import JsonPath
from swarm.errors import ConfigError, HookError
from tests.reward_hooks.judges.conftest import OpenJudge
from tests.reward_hooks.judges.scripted import TASK, ScriptedJudge, answer, answers, context

anyio = pytest.mark.anyio

ONE = {"api": "json", "route": "/mine", "body": {"one": "A: {answer}", "q": "{prompt}"}, "path": "out.values[-1]"}
ALL = {"api": "json", "route": "/mine", "body": {"all": "{answers}", "k": [1, None]}, "path": "out[*].s"}


@anyio
@pytest.mark.parametrize(
    ("settings", "calls"),
    [({}, 1), ({"api": "pooling"}, 3), (ONE, 3), (ALL, 1)],
    ids=["score", "pooling", "one", "all"],
)
async def test_numbers_are_passed_on_in_order(
    settings: dict[str, Any], calls: int, scripted: ScriptedJudge, open_judge: OpenJudge
) -> None:
    judge = open_judge("score_model", endpoint={"base_url": scripted.url}, **settings)
    rewards = await judge.on_compute_relative_reward(TASK, answers(2.5, -1, 12), context())
    assert [one.value for one in rewards] == [2.5, -1.0, 12.0]
    assert len(scripted.bodies) == calls
    assert all(body["model"] == "judge" for body in scripted.bodies)


@anyio
async def test_pooling_gets_the_conversation_with_the_answer(scripted: ScriptedJudge, open_judge: OpenJudge) -> None:
    judge = open_judge("score_model", endpoint={"base_url": scripted.url}, api="pooling")
    await judge.on_compute_relative_reward(TASK, answers(1), context())
    assert [one["role"] for one in scripted.bodies[0]["messages"]] == ["user", "assistant"]


@anyio
async def test_an_answer_brings_no_placeholders_of_its_own(scripted: ScriptedJudge, open_judge: OpenJudge) -> None:
    judge = open_judge("score_model", endpoint={"base_url": scripted.url}, **ONE)
    await judge.on_compute_relative_reward(TASK, [answer("{prompt} of quality 1")], context())
    assert scripted.bodies[0]["one"] == "A: {prompt} of quality 1"
    assert scripted.bodies[0]["q"] == TASK.main_query


@anyio
@pytest.mark.parametrize(
    ("settings", "reply"),
    [
        ({}, {"data": [{"index": 0, "score": 1.0}]}),
        ({}, {"data": [{"index": 0, "score": 1.0}, {"index": 0, "score": 2.0}]}),
        ({}, {"data": [{"index": 0, "score": 1.0}, {"index": 1, "score": "2"}]}),
        ({}, {"data": [{"index": 0, "score": 1.0}, {"index": 1, "score": None}]}),
        ({}, {"error": "?"}),
        ({}, ["?"]),
        ({"api": "pooling"}, {"data": [{"index": 0, "data": [0.1, 0.2, 0.3]}]}),
        ({"api": "pooling"}, {"data": [{"index": 0, "data": "base64"}]}),
        (ALL, {"out": [{"s": 1.0}]}),
        (ALL, {"out": {"s": 1.0}}),
        (ONE, {"out": {"values": []}}),
    ],
)
async def test_anything_else_is_no_score(
    settings: dict[str, Any], reply: Any, scripted: ScriptedJudge, open_judge: OpenJudge
) -> None:
    scripted.replies = [JSONResponse(reply), JSONResponse(reply)]
    judge = open_judge("score_model", endpoint={"base_url": scripted.url}, **settings)
    with pytest.raises(HookError) as caught:
        await judge.on_compute_relative_reward(TASK, answers(1, 2), context())
    assert caught.value.code == "judge_unparsable"


@pytest.mark.parametrize(
    ("text", "found"),
    [("a.b[0]", [1.0]), ("a.b[-1]", [3.0]), ("a.b[*]", [1.0, 2.0, 3.0]), ("c[*].d", [4.0, 5.0]), (".e-f", [6.0])],
)
def test_paths_lead_to_numbers(text: str, found: list[float]) -> None:
    data = {"a": {"b": [1, 2, 3]}, "c": [{"d": 4}, {"d": 5}], "e-f": 6}
    assert JsonPath(text).numbers(data) == found


@pytest.mark.parametrize("text", ["", "a..b", "a[", "a[x]", "[1:2]", "a b", "$.a"])
def test_a_wrong_path_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no path expression"):
        JsonPath(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [("a.x", "step 2"), ("b[3]", "step 2"), ("a[0]", "step 2"), ("b", "no finite number"), ("c", "no finite number")],
)
def test_the_error_names_the_step_where_a_path_ends(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        JsonPath(text).numbers({"a": {}, "b": [1], "c": float("nan")})
