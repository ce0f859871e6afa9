"""``feedback`` and ``implicit_feedback``: what the user said or did about the delivered answer.

``feedback`` is the rating, from -1 to 1. ``implicit_feedback`` is the mean of the weights of the observed signals,
weighed by their certainty, ``sum(w * s) / sum(s)``. (Clicks and edits as implicit preference: Joachims 2002,
"Optimizing Search Engines using Clickthrough Data".)

A user sees one answer of the group, so the others have no feedback. With ``others: similar`` (the default) each of them
earns the mean of the rated ones' rewards, weighed by and multiplied with the similarity of the texts (Nadaraya-Watson
regression that shrinks to 0, with the Jaccard similarity of word trigrams). With ``others: refuse`` the group is
dropped unless all answers are rated.

Fails when: users praise what flatters them, or only angry users give feedback: the loudest users then train the model.
``similar`` teaches a praised answer's wording as much as its content. ``copied`` may mean that the code was good or
that the user searched for the error message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from reward_hooks.builtin.novelty import jaccard, shingles
from reward_hooks.contract import Candidate, Feedback, HookContext, Reward
from swarm.errors import ConfigError, HookError
from swarm.types import Task

Others = Literal["similar", "refuse"]

#: Default weights of the signals, from -1 to 1.
SIGNAL_WEIGHTS: dict[str, float] = {
    "accepted": 1.0,
    "copied": 0.7,
    "continued": 0.2,
    "edited": -0.3,
    "abandoned": -0.5,
    "repeated": -0.7,
    "regenerated": -1.0,
}


class _FromUsers:
    """Rewards by ``rate``, and by similarity for candidates without feedback."""

    def __init__(self, rate: Callable[[Feedback], float | None], others: Others) -> None:
        if others not in ("similar", "refuse"):
            raise ConfigError(f"others is {others!r}; use similar or refuse")
        self._rate = rate
        self._others = others

    def on_compute_relative_reward(self, task: Task, candidates: list[Candidate], context: HookContext) -> list[Reward]:
        """The rewards of a group, in [-1, 1].

        Raises:
            HookError: no answer has feedback, or not all that must have (``no_feedback``).
        """
        ratings = [None if candidate.feedback is None else self._rate(candidate.feedback) for candidate in candidates]
        rated = {index: rating for index, rating in enumerate(ratings) if rating is not None}
        if not rated or (self._others == "refuse" and len(rated) < len(candidates)):
            raise HookError(f"{len(rated)} of {len(candidates)} answers have feedback", code="no_feedback")
        grams = [shingles(candidate.text) for candidate in candidates]
        return [
            Reward(value=rated[index], components={"rated": 1.0}, reason=_comment(candidate))
            if index in rated
            else _alike(index, rated, grams)
            for index, candidate in enumerate(candidates)
        ]

    __call__ = on_compute_relative_reward


class UserFeedback(_FromUsers):
    """The rating that the user gave."""

    def __init__(self, others: Others = "similar") -> None:
        super().__init__(lambda feedback: feedback.rating, others)


class ImplicitFeedback(_FromUsers):
    """What the user did.

    Args:
        weights: from -1 to 1, by signal; they replace :data:`SIGNAL_WEIGHTS`. Other signals are ignored.
        others: how answers without feedback are scored.
    """

    def __init__(self, weights: Mapping[str, float] | None = None, others: Others = "similar") -> None:
        chosen = dict(SIGNAL_WEIGHTS if weights is None else weights)
        if not chosen or not all(-1 <= weight <= 1 for weight in chosen.values()):
            raise ConfigError("ImplicitFeedback needs weights, each from -1 to 1")

        def rate(feedback: Feedback) -> float | None:
            seen = {name: how for name, how in feedback.signals.items() if name in chosen and how > 0}
            return sum(chosen[name] * how for name, how in seen.items()) / sum(seen.values()) if seen else None

        super().__init__(rate, others)


def _alike(index: int, rated: Mapping[int, float], grams: list[frozenset[str]]) -> Reward:
    likeness = {other: jaccard(grams[index], grams[other]) for other in rated}
    total = sum(likeness.values())
    nearest = max(likeness.values())
    mean = sum(rated[other] * how for other, how in likeness.items()) / total if total else 0.0
    return Reward(
        value=mean * nearest,
        components={"rated": 0.0, "likeness": nearest},
        reason=f"no feedback; {nearest:.2f} like one that has",
    )


def _comment(candidate: Candidate) -> str:
    feedback = candidate.feedback
    if feedback is None:
        return ""
    return feedback.comment or feedback.better or ", ".join(sorted(feedback.signals))
