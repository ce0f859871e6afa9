"""The share of the four values that the answer's first JSON object copies rightly from the sentence.

Form is judged by the other parts of ``hooks.yaml``: this one also credits an object that has text around it. Case does
not matter in texts; an age is a number.
"""

from __future__ import annotations

import json
from typing import Any

from reward_hooks.contract import Candidate, HookContext, Reward
from swarm.errors import HookError
from swarm.types import Task


def on_compute_relative_reward(task: Task, candidates: list[Candidate], context: HookContext) -> list[Reward]:
    person: Any = task.metadata.get("person")
    if not isinstance(person, dict):
        raise HookError(f"task {task.task_id} does not say who the sentence is about", code="no_reference")
    return [judge(person, candidate.text) for candidate in candidates]


def judge(person: dict[str, Any], text: str) -> Reward:
    """1 if all values are right, less by the same share for each that is not."""
    said = first_object(text)
    if said is None:
        return Reward(value=0.0, reason="holds no JSON object")
    wrong = [key for key, value in person.items() if not same(said.get(key), value)]
    return Reward(value=1 - len(wrong) / len(person), reason=f"wrong: {', '.join(wrong)}" if wrong else "")


def same(said: object, meant: object) -> bool:
    if isinstance(said, str) and isinstance(meant, str):
        return said.strip().casefold() == meant.casefold()
    # True is 1 to Python
    return type(said) is type(meant) and said == meant


def first_object(text: str) -> dict[str, Any] | None:
    """The JSON object that begins at the first brace, if it is one."""
    start = text.find("{")
    if start < 0:
        return None
    try:
        value: Any = json.JSONDecoder().raw_decode(text, start)[0]
    except (ValueError, RecursionError):
        return None
    return value
