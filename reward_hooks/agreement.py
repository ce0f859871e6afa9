"""How far two orders of the same answers agree; ``None`` means that nothing can be said."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from math import sqrt

from reward_hooks.contract import EQUAL_WITHIN


def kendall_tau(scores: Sequence[float], reference: Sequence[float]) -> float | None:
    """Kendall's tau-b of two lists of scores, in [-1, 1]: 1 where they order every pair alike.

    Ties count as in Kendall (1945), "The Treatment of Ties in Ranking Problems". If only ``scores`` are all equal, the
    result is 0; if ``reference`` has no order, it is ``None``. Lists of different lengths raise :class:`ValueError`.
    """
    signs = list(_signs(scores, reference))
    ordered, wanted = sum(1 for a, _ in signs if a), sum(1 for _, b in signs if b)
    if not wanted:
        return None
    return sum(a * b for a, b in signs) / sqrt(ordered * wanted) if ordered else 0.0


def flip_rate(scores: Sequence[float], again: Sequence[float]) -> float | None:
    """The share of pairs of answers that change their order between two scorings of one group, in [0, 1].

    A pair that is tied in exactly one of the two counts half; ``None`` for fewer than two answers. Lists of different
    lengths raise :class:`ValueError`.
    """
    changes = [abs(a - b) / 2 for a, b in _signs(scores, again)]
    return sum(changes) / len(changes) if changes else None


def ranking(scores: Sequence[float]) -> list[int]:
    """Indices of the answers, best first; equals in their own order."""
    return sorted(range(len(scores)), key=lambda index: -scores[index])


def _signs(one: Sequence[float], other: Sequence[float]) -> Iterator[tuple[int, int]]:
    """How each list orders each pair: 1, 0 or -1."""
    for (a, x), (b, y) in combinations(zip(one, other, strict=True), 2):
        yield _sign(a - b), _sign(x - y)


def _sign(difference: float) -> int:
    return 0 if abs(difference) <= EQUAL_WITHIN else 1 if difference > 0 else -1
