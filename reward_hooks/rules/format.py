"""``format``: answers must have a form: match a regular expression, or be valid JSON. All or nothing.

The reward is 1 or 0, like the format reward of DeepSeek-R1 (arXiv:2501.12948, section 2.2.2).

Fails when: form is mistaken for content. ``{}`` is JSON, and a model finds the shortest thing that has the form. Where
no answer of a group has it, all are equal and nothing is learnt. A pattern with nested repetition (``(a+)+b``) can take
time exponential in the answer's length, and Python's ``re`` holds the whole process meanwhile, so that no deadline
helps: write patterns in which each character can match in one way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from reward_hooks.contract import Candidate, Reward
from reward_hooks.rules.base import Rule
from swarm.errors import ConfigError
from swarm.types import Task

_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)\n?```", re.DOTALL)


class Matches(Rule):
    """1 if the whole answer, white space around it aside, matches ``pattern``.

    Raises:
        ConfigError: ``pattern`` is no regular expression.
    """

    def __init__(self, pattern: str, flags: int = re.DOTALL) -> None:
        try:
            self._pattern = re.compile(pattern, flags)
        except re.error as exc:
            raise ConfigError(f"Matches: {pattern!r} is no regular expression: {exc}") from exc

    def judge(self, task: Task, candidate: Candidate) -> Reward:
        """1 or 0."""
        good = self._pattern.fullmatch(candidate.text.strip()) is not None
        return Reward(value=float(good), reason="" if good else f"does not match {self._pattern.pattern!r}")


class Json(Rule):
    """1 if the answer is one JSON value and has all ``keys``.

    Args:
        keys: members that the value, then an object, must have.
        fenced: also accept it inside one fenced code block that makes up the whole answer.
    """

    def __init__(self, keys: Sequence[str] = (), *, fenced: bool = False) -> None:
        self._keys = tuple(keys)
        self._fenced = fenced

    def judge(self, task: Task, candidate: Candidate) -> Reward:
        """1 or 0."""
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
    """The one JSON value that ``text`` is, white space around it aside, or its one code block if ``fenced``.

    Raises:
        ValueError: it is not JSON by the standard (NaN and Infinity are not), or nested too deep.
    """
    text = text.strip()
    if fenced and (block := _FENCED.fullmatch(text)):
        text = block[1]
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError as exc:
        raise ValueError("nested too deep") from exc


def _refuse(constant: str) -> None:
    # Python's json takes NaN and Infinity, which no other parser does
    raise ValueError(f"{constant} is not JSON")


hooks = Json(fenced=True)
