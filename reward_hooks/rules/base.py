"""What a rule is, and how rules are combined.

Invariant: a rule's reward is in [0, 1] and depends on the one answer only, so it moves only when answers change.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from reward_hooks.contract import Candidate, HookContext, Reward
from swarm.errors import ConfigError
from swarm.types import Task


class Rule(ABC):
    """Judges answers one by one; an instance is itself an ``on_compute_relative_reward``."""

    @property
    def name(self) -> str:
        """Prefix of this rule's components in a combination."""
        return type(self).__name__.lower()

    @abstractmethod
    def judge(self, task: Task, candidate: Candidate) -> Reward:
        """The reward of one answer, in [0, 1]."""

    def on_compute_relative_reward(self, task: Task, candidates: list[Candidate], context: HookContext) -> list[Reward]:
        """The rewards of a group, each judged alone."""
        return [self.judge(task, candidate) for candidate in candidates]

    def __call__(self, task: Task, candidates: list[Candidate], context: HookContext) -> list[Reward]:
        return self.on_compute_relative_reward(task, candidates, context)


class Weighted(Rule):
    """The weighted mean of several rules; their components appear as ``rule.component``.

    Args:
        parts: pairs of a rule and its positive weight.

    Raises:
        ConfigError: no parts, or a weight that is not positive.
    """

    def __init__(self, *parts: tuple[Rule, float]) -> None:
        if not parts or not all(weight > 0 for _, weight in parts):
            raise ConfigError("Weighted needs at least one (rule, weight) pair, each weight above 0")
        self._parts = parts

    def judge(self, task: Task, candidate: Candidate) -> Reward:
        """The mean of the parts' rewards."""
        judged = [(rule.name, rule.judge(task, candidate), weight) for rule, weight in self._parts]
        components: dict[str, float] = {}
        for name, reward, _ in judged:
            components[name] = reward.value
            components |= {f"{name}.{key}": value for key, value in reward.components.items()}
        value = sum(reward.value * weight for _, reward, weight in judged) / sum(weight for _, _, weight in judged)
        reasons = [f"{name}: {reward.reason}" for name, reward, _ in judged if reward.reason]
        return Reward(value=value, components=components, reason="; ".join(reasons))
