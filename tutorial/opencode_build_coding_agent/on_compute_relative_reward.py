"""Each answer by itself: whether an agent can use it. What it was good for, its session's outcome says."""

from __future__ import annotations

from reward_hooks.contract import Candidate, HookContext, Reward
from swarm.types import Task


def on_compute_relative_reward(task: Task, candidates: list[Candidate], context: HookContext) -> list[Reward]:
    return [judge(candidate) for candidate in candidates]


def judge(candidate: Candidate) -> Reward:
    if candidate.finish_reason == "length":
        return Reward(value=0.0, reason="cut off")
    if candidate.malformed_calls:
        return Reward(value=0.0, reason="a tool call that is no JSON")
    if not candidate.text.strip() and not candidate.tool_calls:
        return Reward(value=0.0, reason="empty")
    return Reward(value=1.0, reason="usable")
