"""``length``: answers within a range of lengths score 1, others less the further they are from it.

The reward is 1 from ``at_least`` to ``at_most``, falls in a straight line to 0 over ``slack`` beyond ``at_most`` (the
soft overlong punishment of DAPO, arXiv:2503.14476, equation 13, moved from [-1, 0] to [0, 1]) and below ``at_least`` is
the share of it that is there.

Fails when: length is not what makes an answer good. It counts and does not read: padding, and a sentence cut off in
the middle, earn what a good answer of that length earns. Gate it with a rule about substance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from reward_hooks.contract import Candidate, Reward
from reward_hooks.rules.base import Rule
from swarm.errors import ConfigError
from swarm.types import Task


@dataclass(frozen=True)
class Length(Rule):
    """The rule with its range; ``slack`` defaults to ``at_most``.

    ``unit`` is ``words`` (separated by white space: one word per sentence in Chinese or Japanese), ``characters``, or
    the engine's own ``tokens``.
    """

    at_most: int
    at_least: int = 0
    slack: int | None = None
    unit: Literal["words", "characters", "tokens"] = "words"

    def __post_init__(self) -> None:
        if not 0 <= self.at_least <= self.at_most or self.at_most < 1 or (self.slack is not None and self.slack < 1):
            raise ConfigError("Length needs 0 <= at_least <= at_most, at_most and slack of at least 1")
        if self.unit not in ("words", "characters", "tokens"):
            raise ConfigError(f"Length: unit is {self.unit!r}; use words, characters or tokens")

    def judge(self, task: Task, candidate: Candidate) -> Reward:
        """Judge one answer."""
        size = self._size(candidate)
        if size > self.at_most:
            value = max(0.0, 1 - (size - self.at_most) / (self.slack or self.at_most))
        else:
            value = min(1.0, size / self.at_least) if self.at_least else 1.0
        reason = "" if value == 1.0 else f"{size} {self.unit}, wanted {self.at_least} to {self.at_most}"
        return Reward(value=value, components={self.unit: float(size)}, reason=reason)

    def _size(self, candidate: Candidate) -> int:
        if self.unit == "tokens":
            return candidate.completion_tokens
        text = candidate.text.strip()
        return len(text) if self.unit == "characters" else len(text.split())
