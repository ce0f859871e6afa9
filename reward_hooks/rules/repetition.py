"""``repetition``: answers that go round in circles score low.

The reward is the share of distinct word n-grams among all n-grams (distinct-n; Li et al. 2016, "A Diversity-Promoting
Objective Function for Neural Conversation Models"): 1 when nothing is said twice, towards 0 in a loop.

Fails when: repetition is right, as in tables, code and refrains, and when answers differ in length: a long text repeats
more n-grams than a short one by nature, so it also rewards brevity. Saying one thing twice in other words passes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from reward_hooks.contract import Candidate, Reward
from reward_hooks.rules.base import Rule
from swarm.errors import ConfigError
from swarm.types import Task

# letters, digits and underscore of any script
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Repetition(Rule):
    """The rule with its ``n``. An empty answer scores 0, one of fewer than ``n`` words 1."""

    n: int = 3

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ConfigError("Repetition needs n of at least 1")

    def judge(self, task: Task, candidate: Candidate) -> Reward:
        """Judge one answer."""
        value = distinct_share(candidate.text, self.n)
        return Reward(value=value, reason="" if value == 1.0 else f"{value:.2f} of the {self.n}-grams are distinct")


def distinct_share(text: str, n: int = 3) -> float:
    """Distinct n-grams of words over all of them, in [0, 1]; case does not count."""
    words = _WORD.findall(text.lower())
    if not words:
        return 0.0
    grams = [tuple(words[start : start + n]) for start in range(len(words) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


hooks = Repetition()
