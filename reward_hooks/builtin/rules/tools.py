"""``tool_calls``: calls name an offered tool, with arguments that fit its parameters.

The reward is the share of an answer's calls that are valid: the name is one of the request's ``tools``, the arguments
are a JSON object, and they fit the tool's ``parameters`` (the syntactic half of the AST check of the Berkeley Function
Calling Leaderboard, https://gorilla.cs.berkeley.edu/leaderboard.html). An answer without calls earns 1, or 0 if
``required``. Parameters are checked with ``jsonschema`` (extra ``swarm-gateway[rewards]``).

Fails when: a call is valid and useless. It does not check whether the tool or the time was right, and without
``required`` the safest answer has no call.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from reward_hooks.builtin.rules.format import SchemaChecker, read_json
from reward_hooks.contract import Candidate, HookContext, Reward, Rule
from swarm.errors import ConfigError, HookError
from swarm.types import Task


class ToolCalls(Rule):
    """The rule.

    Args:
        tools: in OpenAI's form; default: the tools of each answer's request.
        required: an answer must call a tool.
        at_most: with more calls than this, all of them are invalid.

    Raises:
        ConfigError: ``jsonschema`` is not installed, or ``tools`` are not in OpenAI's form.
    """

    def __init__(
        self, tools: Sequence[Mapping[str, Any]] | None = None, *, required: bool = False, at_most: int | None = None
    ) -> None:
        SchemaChecker(True)  # fails without the package
        self._required = required
        self._at_most = at_most
        try:
            self._checkers = None if tools is None else _checkers(tools)
        except ValueError as exc:
            raise ConfigError(f"ToolCalls: {exc}") from exc

    def on_compute_relative_reward(self, task: Task, candidates: list[Candidate], context: HookContext) -> list[Reward]:
        """The rewards of a group; equal tools are compiled once.

        Raises:
            HookError: an answer calls tools, but its request is unknown or has no readable tools (``no_tools``), or
                the tools take all of the hook's time to check a call (``hook_timeout``).
        """
        checked: dict[str, dict[str, SchemaChecker]] = {}
        until = time.monotonic() + context.deadline_seconds
        return [self._reward(candidate, checked, until) for candidate in candidates]

    def judge(self, task: Task, candidate: Candidate) -> Reward:
        return self._reward(candidate, {})

    def _reward(
        self, candidate: Candidate, checked: dict[str, dict[str, SchemaChecker]], until: float = math.inf
    ) -> Reward:
        calls = candidate.tool_calls
        if not calls:
            return Reward(
                value=float(not self._required), components={"calls": 0.0}, reason="no call" if self._required else ""
            )
        checkers = self._checkers if self._checkers is not None else _of_request(candidate, checked, until)
        problems = [_problem(call, checkers) for call in calls]
        if self._at_most is not None and len(calls) > self._at_most:
            problems = [f"{len(calls)} calls, at most {self._at_most} allowed"] * len(calls)
        return Reward(
            value=problems.count("") / len(calls),
            components={"calls": float(len(calls))},
            reason="; ".join(dict.fromkeys(filter(None, problems))),
        )


def _of_request(
    candidate: Candidate, checked: dict[str, dict[str, SchemaChecker]], until: float
) -> dict[str, SchemaChecker]:
    tools = candidate.request.get("tools")
    if not tools:
        raise HookError("an answer calls tools, but its request shows none; give ToolCalls its tools", code="no_tools")
    key = json.dumps(tools, sort_keys=True, default=str)
    if key not in checked:
        try:
            checked[key] = _checkers(tools, until)
        except (ValueError, ConfigError) as exc:
            raise HookError(f"the request's tools are not readable: {exc}", code="no_tools") from exc
    return checked[key]


def _checkers(tools: Any, until: float = math.inf) -> dict[str, SchemaChecker]:
    checkers: dict[str, SchemaChecker] = {}
    if not isinstance(tools, list | tuple):
        raise ValueError(f"tools are a {type(tools).__name__}, not a list")
    for tool in cast("Sequence[Any]", tools):
        match tool:
            case {"function": {"name": str() as name, **rest}}:
                checkers[name] = SchemaChecker(rest.get("parameters") or {"type": "object"}, until)
            case _:
                raise ValueError(f"a tool has no function with a name: {str(tool)[:100]}")
    return checkers


def _problem(call: Mapping[str, Any], checkers: Mapping[str, SchemaChecker]) -> str:
    match call:
        case {"function": {"name": str() as name, "arguments": str() as arguments}}:
            pass
        case _:
            return "a call without name and arguments"
    if name not in checkers:
        return f"{name!r} is no tool of this request"
    try:
        # some engines give none where a tool takes none
        value = read_json(arguments or "{}")
    except ValueError as exc:
        return f"{name}: arguments are no JSON: {exc}"
    if not isinstance(value, dict):
        return f"{name}: arguments are no JSON object"
    return "; ".join(f"{name}: {fault}" for fault in checkers[name].faults(value)[:2])
