"""``diversity`` and ``novelty``: answers unlike the others of their group, or unlike recent answers of all groups.

``diversity`` is one minus the mean similarity to the other answers (the idea of Self-BLEU; Zhu et al. 2018,
arXiv:1802.01886, with the Jaccard similarity of word trigrams in place of BLEU). ``novelty`` is one minus the
similarity to the most similar of the last ``history`` answers (novelty search; Lehman and Stanley 2011, "Abandoning
Objectives", with one nearest neighbour).

Fails when: it is the only reward. Gibberish is as novel as can be, and a right answer that needs no variation is
punished. Give it a small weight behind a gate. Paraphrases count as different. The history belongs to this process: it
is empty after a restart, and each replica of the gateway has its own.
"""

from __future__ import annotations

import threading
from collections import deque
from statistics import fmean

from reward_hooks.builtin.rules.text import WORD
from reward_hooks.contract import Candidate, HookContext, Reward
from swarm.errors import ConfigError, HookError
from swarm.types import Task

_SIZE = 3


def shingles(text: str) -> frozenset[str]:
    """The word trigrams of ``text``; shorter texts are one shingle. Case and punctuation do not count."""
    words = WORD.findall(text.lower())
    if len(words) <= _SIZE:
        return frozenset({" ".join(words)})
    return frozenset(" ".join(words[start : start + _SIZE]) for start in range(len(words) - _SIZE + 1))


def jaccard(grams: frozenset[str], other: frozenset[str]) -> float:
    """Shared over all, in [0, 1]."""
    shared = len(grams & other)
    return shared / (len(grams) + len(other) - shared)


class Diversity:
    """Unlike the others of the group; one answer alone is refused (``group_of_one``)."""

    def on_compute_relative_reward(self, task: Task, candidates: list[Candidate], context: HookContext) -> list[Reward]:
        if len(candidates) < 2:
            raise HookError("one answer alone has no diversity", code="group_of_one")
        grams = [shingles(candidate.text) for candidate in candidates]
        rewards: list[Reward] = []
        for index, own in enumerate(grams):
            likeness = [jaccard(own, other) for other_index, other in enumerate(grams) if other_index != index]
            # exact, in whatever order: equal answers earn the same
            mean = fmean(likeness)
            rewards.append(Reward(value=1 - mean, reason=f"{mean:.2f} like the others on average" if mean else ""))
        return rewards

    __call__ = on_compute_relative_reward


class Novelty:
    """Unlike the answers of earlier groups. While the history is empty, all answers are equally new, and the group
    teaches nothing. A group that is judged again, with feedback or with answers that came late, is no earlier one.

    Args:
        history: how many answers are kept, at least 1; the time per group grows with it.
    """

    def __init__(self, history: int = 256) -> None:
        if history < 1:
            raise ConfigError("Novelty needs a history of at least 1")
        self._lock = threading.Lock()
        #: with the group of each
        self._recent: deque[tuple[str, frozenset[str]]] = deque(maxlen=history)

    def on_compute_relative_reward(self, task: Task, candidates: list[Candidate], context: HookContext) -> list[Reward]:
        grams, group = [shingles(candidate.text) for candidate in candidates], context.group_id
        with self._lock:
            of_group = {kept for of, kept in self._recent if group and of == group}
            recent = [kept for of, kept in self._recent if not group or of != group]
            self._recent.extend((group, each) for each in grams if each not in of_group)
        nearest = [max((jaccard(own, other) for other in recent), default=0.0) for own in grams]
        return [Reward(value=1 - like, reason=f"{like:.2f} like an earlier answer" if like else "") for like in nearest]

    __call__ = on_compute_relative_reward
