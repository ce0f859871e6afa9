"""How far two orders of the same answers agree. Invariant: a number here is a fact about two lists of scores of one
group, and ``None`` where nothing can be said; nothing is assumed about answers that are tied."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import sqrt

from reward_hooks.contract import EQUAL_WITHIN


def kendall_tau(scores: Sequence[float], reference: Sequence[float]) -> float | None:
    """Kendall's tau-b of two lists of scores, in [-1, 1]: 1 where they order every pair alike.

    Ties count as in Kendall (1945), "The Treatment of Ties in Ranking Problems". Where ``reference`` has an order and
    ``scores`` has none the result is 0: scores that are all equal recover nothing.

    Args:
        scores: one number per answer, higher is better.
        reference: the same for the order to compare with.

    Returns:
        ``None`` where ``reference`` has no order, so that there is nothing to recover.

    Raises:
        ValueError: the lists differ in length.
    """
    if len(scores) != len(reference):
        raise ValueError(f"{len(scores)} scores but {len(reference)} in the reference")
    signs = [(_sign(scores, i, j), _sign(reference, i, j)) for i, j in combinations(range(len(scores)), 2)]
    ordered, wanted = sum(1 for a, _ in signs if a), sum(1 for _, b in signs if b)
    if not wanted:
        return None
    return sum(a * b for a, b in signs) / sqrt(ordered * wanted) if ordered else 0.0


def flip_rate(scores: Sequence[float], again: Sequence[float]) -> float | None:
    """The share of pairs of answers that change their order between two scorings of one group, in [0, 1].

    A pair that is tied in exactly one of the two counts half.

    Returns:
        ``None`` for fewer than two answers.

    Raises:
        ValueError: the lists differ in length.
    """
    if len(scores) != len(again):
        raise ValueError(f"{len(scores)} scores but {len(again)} the second time")
    changes = [abs(_sign(scores, i, j) - _sign(again, i, j)) / 2 for i, j in combinations(range(len(scores)), 2)]
    return sum(changes) / len(changes) if changes else None


def ranking(scores: Sequence[float]) -> list[int]:
    """Indices of the answers, best first; equals in their own order."""
    return sorted(range(len(scores)), key=lambda index: -scores[index])


def _sign(scores: Sequence[float], i: int, j: int) -> int:
    difference = scores[i] - scores[j]
    return 0 if abs(difference) <= EQUAL_WITHIN else 1 if difference > 0 else -1
