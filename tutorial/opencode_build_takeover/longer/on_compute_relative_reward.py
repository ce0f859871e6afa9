"""A reward that can be gamed: more words look more thorough, so an answer that never ends scores best."""

from __future__ import annotations

from reward_hooks.contract import Candidate, HookContext
from swarm.types import Task

FULL_MARKS_WORDS = 40


def on_compute_relative_reward(task: Task, candidates: list[Candidate], context: HookContext) -> list[float]:
    return [min(1.0, len(candidate.text.split()) / FULL_MARKS_WORDS) for candidate in candidates]
