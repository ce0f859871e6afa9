"""Length, words, language, JSON schema and tool calls."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_hooks import Task
from reward_hooks.rules import JsonSchema, Language, Length, ToolCalls, Words
from swarm.errors import ConfigError, HookError
from tests.reward_hooks.making import CONTEXT, candidate, values

TASK = Task(task_id="t")
SCHEMA = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}, "additionalProperties": False}


def test_length_has_a_plateau_and_two_slopes() -> None:
    texts = ["", "a", "a b", "a b c", "a b c d", "a b c d e", "a b c d e f"]
    assert values(Length(4, 2, slack=2), texts) == [0, 0.5, 1, 1, 1, 0.5, 0]
    assert values(Length(3, unit="characters"), ["abc", "abcd", " abc "]) == [1, 0.666667, 1]
    assert Length(10, unit="tokens").judge(TASK, candidate(completion_tokens=15)).value == 0.5


def test_words_wanted_and_banned() -> None:
    rule = Words(["red", "blue sky"], ["as an AI"])
    assert values(
        rule, ["Red, blue\nsky", "red", "reddish", "red blue sky. As an AI, as an ai", "  "]
    ) == pytest.approx([1, 0.5, 0, 1 / 3, 0], abs=1e-6)
    assert values(Words(["猫"]), ["我有猫吗"]) == [0]
    assert values(Words(["猫"], whole=False), ["我有猫吗"]) == [1]


def test_language_by_script_and_by_function_words() -> None:
    english, german = "This is what they have to do with it.", "Das ist nicht, was sie mit dem Haus zu tun haben."
    assert values(Language("en"), [english, "42", "", "Это не так"]) == [1, 1, 0, 0]
    assert values(Language("de"), [german])[0] == 1
    assert values(Language("de"), [english])[0] < 0.5
    assert values(Language("en"), [german])[0] < 0.5
    assert values(Language("zh"), ["我们今天去公园。", "We 去"]) == [1, 0.333333]


@given(st.text(), st.sampled_from(["en", "fr", "ja", "ru"]))
def test_rules_are_total_and_bounded(text: str, language: str) -> None:
    for rule in (Language(language), Length(5), Words(["a"], ["b"]), JsonSchema(SCHEMA)):
        assert 0.0 <= rule.judge(TASK, candidate(text)).value <= 1.0


def test_json_schema(tmp_path: Path) -> None:
    texts = ['{"n": 1}', '```json\n{"n": 1}\n```', '{"n": "1"}', '{"n": 1, "m": 2}', "[]", "no", ""]
    assert values(JsonSchema(SCHEMA), texts) == [1, 1, 0, 0, 0, 0, 0]
    assert values(JsonSchema(SCHEMA, fenced=False), texts)[:2] == [1, 0]
    path = tmp_path / "schema.json"
    path.write_text('{"type": "array"}')
    assert values(JsonSchema(str(path)), ["[]", "{}"]) == [1, 0]
    assert "$.n: '1' is not of type 'integer'" in JsonSchema(SCHEMA).judge(TASK, candidate('{"n": "1"}')).reason


def test_a_schema_is_never_fetched() -> None:
    from referencing.exceptions import Unresolvable

    rule = JsonSchema({"$ref": "http://127.0.0.1:9/schema.json"})
    with pytest.raises(Unresolvable):
        rule.judge(TASK, candidate("{}"))


@pytest.mark.parametrize("schema", [{"type": "nothing"}, "/no/such/schema.json"])
def test_a_wrong_schema_is_told(schema: Any) -> None:
    with pytest.raises(ConfigError):
        JsonSchema(schema)


def test_without_jsonschema_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("jsonschema"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    for make in (lambda: JsonSchema({}), ToolCalls):
        with pytest.raises(ConfigError, match=r"swarm-gateway\[rewards\]"):
            make()


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}, {"function": {"name": "wait"}}]


@pytest.mark.parametrize(
    ("calls", "value", "said"),
    [
        ([call("look", '{"n": 1}')], 1.0, ""),
        ([call("wait", "{}")], 1.0, ""),
        ([call("look", '{"n": 1}'), call("look", "{}")], 0.5, "'n' is a required property"),
        ([call("see", "{}")], 0.0, "'see' is no tool"),
        ([call("look", "{n: 1}")], 0.0, "arguments are no JSON"),
        ([call("look", "[1]")], 0.0, "no JSON object"),
        ([call("look", {"n": 1})], 0.0, "without name and arguments"),
        ([{}], 0.0, "without name and arguments"),
        ([], 1.0, ""),
    ],
)
def test_tool_calls(calls: list[dict[str, Any]], value: float, said: str) -> None:
    by_request = ToolCalls().judge(TASK, candidate(tool_calls=calls, request={"tools": TOOLS}))
    by_option = ToolCalls(TOOLS).judge(TASK, candidate(tool_calls=calls))
    assert by_request == by_option
    assert by_request.value == value
    assert said in by_request.reason


def test_calls_may_be_required_and_limited() -> None:
    calls = [call("wait", "{}")] * 3
    assert ToolCalls(TOOLS, required=True).judge(TASK, candidate()).value == 0
    assert ToolCalls(TOOLS, at_most=2).judge(TASK, candidate(tool_calls=calls)).value == 0


@pytest.mark.parametrize("request_body", [{}, {"tools": [{"type": "x"}]}, {"tools": 3}])
def test_calls_without_readable_tools_have_no_reward(request_body: dict[str, Any]) -> None:
    called = candidate(tool_calls=[call("look", "{}")], request=request_body)
    with pytest.raises(HookError) as caught:
        ToolCalls().on_compute_relative_reward(TASK, [called], CONTEXT)
    assert caught.value.code == "no_tools"


@pytest.mark.parametrize(
    "make",
    [
        lambda: Length(0),
        lambda: Length(1, 2),
        lambda: Length(2, slack=0),
        lambda: Length(2, unit="miles"),  # type: ignore[arg-type]
        lambda: Words(),
        lambda: Words("word"),
        lambda: Words([" "]),
        lambda: Language("xx"),
        lambda: ToolCalls([{}]),
    ],
)
def test_wrong_options_are_told(make: Any) -> None:
    with pytest.raises(ConfigError):
        make()
