"""The built-in rules: their values, bounds and errors."""

from __future__ import annotations

import builtins
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_hooks import Reward, Task, load_hooks
from reward_hooks.builtin.rules import (
    Concise,
    Json,
    JsonSchema,
    Language,
    Length,
    Matches,
    Repetition,
    Rule,
    ToolCalls,
    Words,
)
from reward_hooks.builtin.rules.format import SchemaChecker
from reward_hooks.builtin.verifiable.match import Exact
from swarm.errors import ConfigError, HookError
from tests.reward_hooks.making import CONTEXT, answered, candidate, values

QUESTION = "Why are Python strings immutable?"
GOOD = "Python strings are immutable for speed and as dict keys."
TASK = Task(task_id="t", main_query=QUESTION)
SCHEMA = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}, "additionalProperties": False}


def concise(text: str, finish_reason: str = "stop", question: str = QUESTION, *lengths: int) -> Reward:
    task = Task(task_id="t", main_query=question)
    return Concise(*lengths).judge(task, candidate(text, finish_reason=finish_reason))


def test_a_short_complete_answer_gets_nearly_full_marks() -> None:
    reward = concise(GOOD)
    assert reward.value > 0.9
    assert all(value == 1.0 for name, value in reward.components.items() if name != "concise")


@pytest.mark.parametrize(
    ("factor", "text", "finish_reason"),
    [
        ("finished", GOOD, "length"),
        ("finished", "", "stop"),
        ("on_topic", "Cats sleep because the night is for hunting and play.", "stop"),
        ("substance", "Python strings are immutable.", "stop"),
        ("complete", GOOD.rstrip("."), "stop"),
        ("fluent", "Python strings are immutable, speed: python strings are immutable, keys.", "stop"),
        ("fluent", "Python strings immutable speed hashing dict keys interning memory.", "stop"),
        ("fluent", "Python strings are immutable §§§§§ ¶¶¶¶¶ for speed and hashing.", "stop"),
        ("concise", GOOD[:-1] + " and so on" * 12 + ".", "stop"),
    ],
)
def test_each_factor_has_its_fault(factor: str, text: str, finish_reason: str) -> None:
    reward = concise(text, finish_reason)
    assert reward.components[factor] < concise(GOOD).components[factor]
    assert reward.value < concise(GOOD).value


def test_concise_in_detail() -> None:
    marks = [concise("word " * words, "stop", QUESTION, 10, 20).components["concise"] for words in (1, 10, 15, 20, 40)]
    assert marks == [1.0, 1.0, 0.5, 0.0, 0.0]
    assert concise(GOOD, "length").reason.startswith("finished 0.00")
    assert concise("Python strings are immutable for speed and hashing.").reason == ""
    assert concise("Blue is a color.", "stop", "why?").components["on_topic"] == 1.0
    halves = concise("Python is the language for speed.").components
    assert (halves["on_topic"], concise("Python strings are for speed.").components["substance"]) == (0.5, 0.5)


@given(st.text(), st.text(), st.sampled_from(["stop", "length", "abort", ""]), st.integers(1, 5))
def test_rules_accept_any_text_and_are_bounded(text: str, question: str, finish_reason: str, n: int) -> None:
    task, answer = Task(task_id="t", main_query=question), candidate(text, finish_reason=finish_reason)
    languages = [Language(name) for name in ("en", "fr", "ja", "ru")]
    for rule in (Concise(), *languages, Length(5), Words(["a"], ["b"]), JsonSchema(SCHEMA), Repetition(n)):
        assert 0.0 <= rule.judge(task, answer).value <= 1.0


@pytest.mark.parametrize(
    ("rule", "text", "value"),
    [
        (Matches(r"Answer: \d+"), " Answer: 42\n", 1.0),
        (Matches(r"Answer: \d+"), "The Answer: 42", 0.0),
        (Json(), '{"a": 1}', 1.0),
        (Json(), " [1, 2] ", 1.0),
        (Json(), "{'a': 1}", 0.0),
        (Json(), "NaN", 0.0),
        (Json(), "", 0.0),
        (Json(), "[" * 100_000, 0.0),
        (Json(), '```json\n{"a": 1}\n```', 0.0),
        (Json(fenced=True), '```json\n{"a": 1}\n```', 1.0),
        (Json(fenced=True), '```JSON\r\n{"a": 1}\r\n```', 1.0),
        (Json(fenced=True), 'Here: ```json\n{"a": 1}\n```', 0.0),
        (Json(("a", "b")), '{"a": 1, "b": 2}', 1.0),
        (Json(("a", "b")), '{"a": 1}', 0.0),
        (Json(("a",)), "1", 0.0),
        (Repetition(), "all of these words are new", 1.0),
        (Repetition(), "again and again and again and again", 2 / 5),
        (Repetition(), "two words", 1.0),
        (Repetition(), " ", 0.0),
        (Repetition(1), "ДА да", 0.5),
        (Repetition(1), "दिन दान दीन ❤️", 1.0),
    ],
)
def test_format_and_repetition(rule: Rule, text: str, value: float) -> None:
    reward = rule.judge(TASK, candidate(text))
    assert reward.value == pytest.approx(value)
    assert bool(reward.reason) == (value < 1.0) or not text.strip()


#: Of names that take exponential time to be matched.
NAMES: dict[str, Any] = {"patternProperties": {"^(a+)+b$": {"const": 1}}}


@pytest.mark.parametrize(
    ("rule", "bad", "good"),
    [
        # nested repetition, and what repeats beside another repetition of the same characters
        (Matches(r"(a+)+b"), "a" * 60 + "c", "ab"),
        (Exact(extract=r"((?:a+)+b)"), "a" * 60 + "c", "aab"),
        (JsonSchema({"pattern": "^(a+)+b$"}), '"' + "a" * 60 + '"', '"ab"'),
        (JsonSchema(NAMES | {"additionalProperties": {"const": 2}}), f'{{"{"a" * 60}": 1}}', '{"ab": 1, "c": 2}'),
        (Json(fenced=True), "```" + "\n" * 200_000 + "x", "```json\n1\n```"),
        # numbers that no float can hold, or whose quotient cannot
        (JsonSchema({"multipleOf": 0.01}), "1e400", "1.25"),
        (JsonSchema({"multipleOf": 0.01}), "1" + "0" * 400, "1.25"),
        (JsonSchema({"type": "array"}), "[" * 100_000, "[]"),
        (Json(), "9" * 100_000, "9"),
    ],
    ids=["matches", "exact", "pattern", "names", "fence", "infinite", "huge", "nested", "digits"],
)
def test_one_bad_answer_does_not_cost_the_others_their_reward(rule: Rule, bad: str, good: str) -> None:
    assert values(rule, [good, bad, good], answered("aab")) == [1.0, 0.0, 1.0]


def test_names_are_checked_as_the_schema_says() -> None:
    closed = JsonSchema(NAMES | {"properties": {"c": {"type": "string"}}, "additionalProperties": False})
    texts = ['{"ab": 1, "c": "x"}', '{"ab": 2}', '{"c": 1}', '{"d": 1}', "[1]"]
    assert values(closed, texts) == [1, 0, 0, 0, 1]
    assert "'d' is not allowed" in closed.judge(TASK, candidate('{"d": 1}')).reason
    with pytest.raises(ConfigError, match="in time"):
        JsonSchema({"allOf": [NAMES], "unevaluatedProperties": False})


def test_length_has_a_plateau_and_two_slopes() -> None:
    texts = ["", "a", "a b", "a b c", "a b c d", "a b c d e", "a b c d e f"]
    assert values(Length(4, 2, slack=2), texts) == [0, 0.5, 1, 1, 1, 0.5, 0]
    assert values(Length(3, unit="characters"), ["abc", "abcd", " abc "]) == [1, 0.666667, 1]
    tokens = Length(10, 1, unit="tokens")
    assert tokens.judge(TASK, candidate(completion_tokens=15)).value == 0.5
    assert tokens.judge(TASK, candidate("")).value == 0
    # such as the stream of an incumbent that tells no usage
    with pytest.raises(HookError, match="does not say how many tokens"):
        tokens.judge(TASK, candidate("a b c"))


def test_words_wanted_and_banned() -> None:
    texts = ["Red, blue\nsky", "red", "reddish", "red blue sky. As an AI, as an ai", "  "]
    assert values(Words(["red", "blue sky"], ["as an AI"]), texts) == pytest.approx([1, 0.5, 0, 1 / 3, 0], abs=1e-6)
    assert values(Words(["猫"]), ["我有猫吗"]) == [0]
    assert values(Words(["猫"], whole=False), ["我有猫吗"]) == [1]
    # a vowel sign goes on with the word; what changes the look of a sign before it does not
    assert values(Words(["दिन"]), ["दिन।", "दिनों"]) == [1, 0]
    assert values(Words(banned=["❤"]), ["❤️", "no"]) == [0.5, 1]
    assert values(Words(["yes"]), ["✔️yes", "yesterday"]) == [1, 0]


def test_language_by_script_and_by_function_words() -> None:
    english, german = "This is what they have to do with it.", "Das ist nicht, was sie mit dem Haus zu tun haben."
    assert values(Language("en"), [english, "42", "", "Это не так"]) == [1, 1, 0, 0]
    assert values(Language("de"), [german])[0] == 1
    assert values(Language("de"), [english])[0] < 0.5
    assert values(Language("en"), [german])[0] < 0.5
    assert values(Language("zh"), ["我们今天去公园。", "We 去"]) == [1, 0.333333]
    # vowel signs and digits of a script are no letters: 4 of 8 are
    assert values(Language("hi"), ["नमस्ते १२३।", "नमस्ते good"]) == [1, 0.5]


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


def test_without_jsonschema_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("jsonschema"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    for make in (lambda: JsonSchema({}), ToolCalls):
        with pytest.raises(ConfigError, match=r"\.\[rewards\]"):
            make()


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}, {"function": {"name": "wait"}}]


@pytest.mark.parametrize(
    ("calls", "value", "said"),
    [
        ([call("look", '{"n": 1}')], 1.0, ""),
        ([call("wait", "{}")], 1.0, ""),
        ([call("wait", "")], 1.0, ""),
        ([call("look", "")], 0.0, "'n' is a required property"),
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
    assert by_request == ToolCalls(TOOLS).judge(TASK, candidate(tool_calls=calls))
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


@pytest.mark.parametrize("named", [{}, {"$schema": "https://json-schema.org/draft/2020-12/schema"}])
def test_a_check_by_tools_of_a_request_ends_with_the_time_of_the_hook(named: dict[str, Any]) -> None:
    # what a caller sends: each level is checked twice, 40 of them for weeks
    levels = {f"level{n}": named | {"allOf": [{"$ref": f"#/$defs/level{n + 1}"}] * 2} for n in range(13)}
    parameters = {"$defs": levels | {"level13": {"type": "object"}}, "$ref": "#/$defs/level0"}
    tools = [{"type": "function", "function": {"name": "look", "parameters": parameters}}]
    called = candidate(tool_calls=[call("look", "{}")], request={"tools": tools})
    with pytest.raises(HookError) as caught:
        ToolCalls().on_compute_relative_reward(TASK, [called], CONTEXT.model_copy(update={"deadline_seconds": 0.05}))
    assert caught.value.code == "hook_timeout"


def test_a_schema_is_itself_checked_in_time() -> None:
    """By the schema of schemas, whose names of required properties are to differ."""
    began = time.perf_counter()
    with pytest.raises(ConfigError, match="no JSON schema"):
        SchemaChecker({"required": [{"a": number} for number in range(4_000)]})
    with pytest.raises(HookError, match="takes too long"):
        SchemaChecker({"anyOf": [{}] * 100_000}, until=time.monotonic() + 0.05)
    # each took half a minute
    assert time.perf_counter() - began < 5.0


@pytest.mark.parametrize(
    ("items", "differ"),
    [([1, True, "1", [1], [True], {"a": 1}, {"a": [1]}, {}, []], True), ([1, 1.0], False), ([{"a": [1]}] * 2, False)],
)
def test_items_are_unique(items: list[Any], differ: bool) -> None:
    assert (SchemaChecker({"uniqueItems": True}).faults(items) == []) is differ


@pytest.mark.parametrize(
    "make",
    [
        lambda: Concise(0, 10),
        lambda: Concise(10, 10),
        lambda: Matches("("),
        lambda: Repetition(0),
        lambda: JsonSchema({"type": "nothing"}),
        lambda: JsonSchema("/no/such/schema.json"),
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
def test_wrong_options_are_refused(make: Any) -> None:
    with pytest.raises(ConfigError):
        make()


@pytest.mark.parametrize("name", ["concise:Concise", "format:Json"])
def test_rules_load_by_their_module(name: str) -> None:
    spec = f"reward_hooks.builtin.rules.{name}"
    assert load_hooks(spec).source == spec
