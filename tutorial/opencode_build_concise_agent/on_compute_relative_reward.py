"""Short, complete, on-topic sentences score near 1; GRPO learns from the differences inside the group."""

from __future__ import annotations

from reward_hooks.builtin.rules import Concise
from reward_hooks.contract import Candidate, HookContext, Reward
from swarm.types import Task

RULE = Concise()


def on_compute_relative_reward(task: Task, candidates: list[Candidate], context: HookContext) -> list[Reward]:
    return [RULE.judge(task, candidate) for candidate in candidates]
