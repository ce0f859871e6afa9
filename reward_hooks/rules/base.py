"""The base of rules: their reward is in [0, 1] and depends on one answer only."""

from __future__ import annotations

from abc import ABC, abstractmethod

from reward_hooks.contract import Candidate, HookContext, Reward
from swarm.types import Task


class Rule(ABC):
    """Scores answers one by one; an instance is itself an ``on_compute_relative_reward``."""

    @abstractmethod
    def judge(self, task: Task, candidate: Candidate) -> Reward:
        """The reward of one answer, in [0, 1].

        Raises:
            HookError: the task or the request lacks what the rule needs.
        """

    def on_compute_relative_reward(self, task: Task, candidates: list[Candidate], context: HookContext) -> list[Reward]:
        """The reward of each answer."""
        return [self.judge(task, candidate) for candidate in candidates]

    def __call__(self, task: Task, candidates: list[Candidate], context: HookContext) -> list[Reward]:
        return self.on_compute_relative_reward(task, candidates, context)
