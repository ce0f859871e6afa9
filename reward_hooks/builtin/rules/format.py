"""``json``, ``json_schema`` and ``matches``: 1 if the answer has a form, else 0.

Like the format reward of DeepSeek-R1 (arXiv:2501.12948, section 2.2.2). Schemas are JSON Schema
(https://json-schema.org; the draft of ``$schema``, else 2020-12), checked by the ``jsonschema`` package of the extra
``swarm-gateway[rewards]``. References to other documents are not fetched.

Fails when: form is mistaken for content. ``{}`` is JSON, an object of empty strings fits most schemas, and a model
finds the shortest text with the form: use ``minLength``, ``enum`` and ``required``, or a gate before a reward for the
content. If no answer of a group has the form, the group teaches nothing. A pattern with nested repetition (``(a+)+b``)
can take time exponential in the answer's length: an answer on which it takes more than a second does not match.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

import regex

from reward_hooks.builtin.verifiable.match import MATCH_SECONDS, compiled
from reward_hooks.contract import Candidate, Reward, Rule
from swarm.errors import ConfigError, HookError
from swarm.types import Task
from swarm.validation import read_text

_FENCED = re.compile(r"```(?:json)?[ \t]*\r?\n(.*?)```", re.DOTALL | re.IGNORECASE)


class Matches(Rule):
    """1 if the whole answer, without surrounding white space, matches ``pattern``, with ``flags`` of the ``regex``
    package."""

    def __init__(self, pattern: str, flags: int = regex.DOTALL) -> None:
        self._pattern = compiled(pattern, "Matches", flags)

    def judge(self, task: Task, candidate: Candidate) -> Reward:
        try:
            good = self._pattern.fullmatch(candidate.text.strip(), timeout=MATCH_SECONDS, concurrent=True) is not None
        except TimeoutError:
            return Reward(value=0.0, reason=f"takes more than {MATCH_SECONDS:g} s to match {self._pattern.pattern!r}")
        return Reward(value=float(good), reason="" if good else f"does not match {self._pattern.pattern!r}")


class Json(Rule):
    """1 if the answer is one JSON value and has all ``keys``.

    Args:
        keys: required members; the value must then be an object.
        fenced: also accept a single fenced code block that is the whole answer.
    """

    def __init__(self, keys: Sequence[str] = (), *, fenced: bool = False) -> None:
        if isinstance(keys, str):
            raise ConfigError("Json needs a list of keys, not a string")
        self._keys = tuple(keys)
        self._fenced = fenced

    def judge(self, task: Task, candidate: Candidate) -> Reward:
        problem = self._problem(candidate.text)
        return Reward(value=float(not problem), reason=problem)

    def _problem(self, text: str) -> str:
        try:
            value = read_json(text, fenced=self._fenced)
        except ValueError as exc:
            return f"no JSON: {exc}"
        if self._keys and not isinstance(value, dict):
            return f"a JSON {type(value).__name__}, not an object"
        missing = [key for key in self._keys if key not in value]
        return f"lacks {', '.join(missing)}" if missing else ""


def read_json(text: str, *, fenced: bool = False) -> Any:
    """The JSON value of ``text``, or of its only code block if ``fenced``.

    Raises:
        ValueError: it is not standard JSON (which has no NaN and Infinity), or is nested too deep.
    """
    text = text.strip()
    if fenced and (block := _FENCED.fullmatch(text)):
        text = block[1]
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError as exc:
        raise ValueError("nested too deep") from exc


def _refuse(constant: str) -> None:
    # Python's json accepts NaN and Infinity, other parsers do not
    raise ValueError(f"{constant} is not JSON")


_MOST_FAULTS = 20


class SchemaChecker:
    """Validates values against one schema.

    Args:
        schema: one of others may refer to itself so often that it takes weeks.
        until: when all checks must be done, by the monotonic clock; one that is late raises :class:`HookError`
            (``hook_timeout``).

    Raises:
        ConfigError: ``jsonschema`` is not installed, or this is no schema.
    """

    def __init__(self, schema: Mapping[str, Any] | bool, until: float = math.inf) -> None:
        try:
            import attrs
            from jsonschema import validators
            from referencing import Registry
        except ImportError as exc:
            raise ConfigError(
                "JSON schemas need the jsonschema package: pip install '.[rewards]' in a clone", code="missing_extra"
            ) from exc
        kind: Any = validators.validator_for(schema, default=validators.Draft202012Validator)
        keywords = {**kind.VALIDATORS, **_KEYWORDS}
        kind = validators.extend(kind, {name: _in_time(check, until) for name, check in keywords.items()})
        # its own takes the package's keywords for a part that names a $schema
        kind.evolve = attrs.evolve
        about = kind(kind.META_SCHEMA, registry=Registry(), format_checker=kind.FORMAT_CHECKER)
        if fault := next(about.iter_errors(schema), None):
            raise ConfigError(f"this is no JSON schema: {fault.message} (at {fault.json_path})")
        if "unevaluatedProperties" in (text := str(schema)) and "patternProperties" in text:
            # the one keyword for names that is not among ours
            raise ConfigError("a schema with unevaluatedProperties beside patternProperties cannot be checked in time")
        # an empty registry: without one, references are fetched over the network
        self._validator: Any = kind(schema, registry=Registry())

    def faults(self, value: object) -> list[str]:
        """The first 20 faults of ``value``, with their places."""
        try:
            errors = list(islice(self._validator.iter_errors(value), _MOST_FAULTS))
        except RecursionError:
            return ["nested too deep to be checked"]
        except ArithmeticError as exc:
            # multipleOf divides: 1e400 is infinite
            return [f"has a number that cannot be checked: {exc}"]
        except TimeoutError:
            return [f"takes more than {MATCH_SECONDS:g} s to match a pattern"]
        return [f"{error.json_path}: {error.message[:200]}" for error in errors]


def _in_time(check: Callable[..., Any], until: float) -> Callable[..., Any]:
    def in_time(*args: Any) -> Any:
        if time.monotonic() > until:
            raise HookError("a value takes too long to be checked by its schema", code="hook_timeout")
        return check(*args)

    return in_time


def _is_in(pattern: str, text: str) -> bool:
    """Whether it is in ``text``, with a deadline: the package has none, and holds the whole process meanwhile."""
    return regex.search(pattern, text, timeout=MATCH_SECONDS, concurrent=True) is not None


def _pattern(validator: Any, pattern: str, instance: object, schema: object) -> Iterator[Exception]:
    from jsonschema.exceptions import ValidationError

    if isinstance(instance, str) and not _is_in(pattern, instance):
        yield ValidationError(f"{instance[:100]!r} does not match {pattern!r}")


def _pattern_properties(
    validator: Any, patterns: Mapping[str, Any], instance: object, schema: object
) -> Iterator[Exception]:
    for name, value in _members(instance).items():
        for pattern, inner in patterns.items():
            if _is_in(pattern, name):
                yield from validator.descend(value, inner, path=name, schema_path=pattern)


def _additional_properties(
    validator: Any, allowed: Any, instance: object, schema: Mapping[str, Any]
) -> Iterator[Exception]:
    from jsonschema.exceptions import ValidationError

    declared, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    for name, value in _members(instance).items():
        if name in declared or any(_is_in(pattern, name) for pattern in patterns):
            continue
        if isinstance(allowed, dict):
            yield from validator.descend(value, allowed, path=name)
        elif not allowed:
            yield ValidationError(f"the property {name[:100]!r} is not allowed")


def _unique_items(validator: Any, unique: bool, instance: object, schema: object) -> Iterator[Exception]:
    """In time that grows with the items: the package compares each with each."""
    from jsonschema.exceptions import ValidationError

    if unique and isinstance(instance, list):
        items = cast("list[Any]", instance)
        if len(set(map(_hashable, items))) < len(items):
            yield ValidationError(f"{str(items)[:100]} has items that are equal")


def _hashable(value: Any) -> Any:
    match value:
        case dict():
            return frozenset((name, _hashable(item)) for name, item in cast("dict[str, Any]", value).items())
        case list():
            return tuple(map(_hashable, cast("list[Any]", value)))
        case bool():
            # in Python True is 1
            return bool, value
        case _:
            return value


def _members(instance: object) -> dict[str, Any]:
    return cast("dict[str, Any]", instance) if isinstance(instance, dict) else {}


#: Those that look for patterns, or compare.
_KEYWORDS = {
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "uniqueItems": _unique_items,
}


class JsonSchema(Rule):
    """1 if the answer is JSON that fits, else 0.

    Args:
        schema: the schema, or the path of a JSON file with it.
        fenced: also accept a single fenced code block that is the whole answer.

    Raises:
        ConfigError: see :class:`SchemaChecker`; or the file cannot be read.
    """

    def __init__(self, schema: Mapping[str, Any] | str, *, fenced: bool = True) -> None:
        self._checker = SchemaChecker(_load(schema) if isinstance(schema, str) else schema)
        self._fenced = fenced

    def judge(self, task: Task, candidate: Candidate) -> Reward:
        try:
            value = read_json(candidate.text, fenced=self._fenced)
        except ValueError as exc:
            return Reward(value=0.0, components={"is_json": 0.0}, reason=f"no JSON: {exc}")
        faults = self._checker.faults(value)
        return Reward(
            value=float(not faults),
            components={"is_json": 1.0, "faults": float(len(faults))},
            reason="; ".join(faults[:3]),
        )


def _load(path: str) -> Mapping[str, Any]:
    try:
        return json.loads(read_text(Path(path), "JSON schema"))
    except ValueError as exc:
        raise ConfigError(f"the JSON schema {path} is no JSON: {exc}") from exc
