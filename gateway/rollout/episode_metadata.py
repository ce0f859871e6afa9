"""What the swarm server keeps of a group beside its rewards: whose hook gave them, in which order, and why.

Invariant: of bounded size, whatever a hook says; the order and the reasons are the hook's own, also where the rewards
that are trained on are permuted for a control.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from reward_hooks.contract import EQUAL_WITHIN, GroupScore, Reward
from swarm.protocol import MAX_REASON
from swarm.text import sendable
from swarm.types import Task, WorkflowOutput

#: Components kept of one reward, and characters of the name of each.
MAX_COMPONENTS, MAX_COMPONENT_NAME = 64, 100
#: Characters of JSON of a task that is kept.
MAX_TASK = 8000
#: The component of what the whole session earned, beyond what the hook gave the answer.
SESSION = "session"


@dataclass(frozen=True, slots=True)
class Why:
    """What is kept with episodes that are given up: ``reason`` is empty where there is nothing to say."""

    reason: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])


NO_REASON = Why()


def outputs(
    score: GroupScore,
    credits: Mapping[int, float],
    origin: Mapping[str, Any],
    task: Task,
    *,
    shuffled: bool = False,
) -> list[WorkflowOutput]:
    """The results of a group's episodes, in the order of ``score``.

    Args:
        score: what the hook said.
        credits: what answers earn beyond that, by their place in ``score``.
        origin: metadata of all of them.
        task: what they were asked; kept with the first of them, so that a hook can be tried on the group later.
        shuffled: permute the rewards, for a control; rank, components and reasons stay where they were.
    """
    values = [value + credits.get(place, 0.0) for place, value in enumerate(score.values)]
    ranks = [1 + sum(other > value + EQUAL_WITHIN for other in values) for value in values]
    given = random.sample(values, len(values)) if shuffled else values
    return [
        WorkflowOutput(
            reward=value,
            log_metrics=_components(reward, credits.get(place)),
            metadata={**origin, **(_asked(task) if place == 0 else {}), "rank": ranks[place], **_said(reward)},
        )
        for place, (value, reward) in enumerate(zip(given, score.rewards, strict=True))
    ]


def _components(reward: Reward, credit: float | None) -> dict[str, float]:
    listed = list(reward.components.items())[:MAX_COMPONENTS]
    kept = {sendable(name)[:MAX_COMPONENT_NAME]: value for name, value in listed}
    return kept if credit is None else {**kept, SESSION: credit}


def _asked(task: Task) -> dict[str, Any]:
    """The task without its messages, which the tokens of the prompt tell; nothing where it is long or no JSON."""
    kept = task.model_dump(include={"main_query", "metadata"})
    try:
        size = len(json.dumps(kept, allow_nan=False))
        # what sends it refuses more: lone surrogates and deep nesting
        WorkflowOutput(reward=0, metadata={"task": kept}).model_dump_json()
    except (TypeError, ValueError, RecursionError):  # a submit hook's metadata can hold anything
        return {}
    return {"task": kept} if size <= MAX_TASK else {}


def _said(reward: Reward) -> dict[str, str]:
    return {"reason": sendable(reward.reason)[:MAX_REASON]} if reward.reason else {}
