"""Orders in which a listwise judge is shown the answers, and scores freed of what it gives to a place.

Invariant: a preference that adds to the score of a place, whatever its shape, leaves no trace in the scores of three
orders or more; whoever stood where, the mean over all answers stays as it was.

A score is taken to be ``quality of the answer + effect of its place``. One order, and an order with its reverse, cannot
tell the two apart. Three orders that are turns of one another can: each answer stands at three places and each place
holds three answers, so that all are compared with all through others (an incomplete Latin square, Youden 1937), and
least squares says what is whose. Judges that are shown every turn need no solving: the mean is free of places.
"""

from __future__ import annotations

import cmath
from collections.abc import Sequence
from functools import lru_cache


def orders_of(first: Sequence[int], count: int) -> list[list[int]]:
    """At most ``count`` orders of the items in ``first``, that one among them; fewer where there are fewer turns.

    Two are an order and its reverse, which cancels a preference that grows evenly along the list; more are turns.
    """
    listed = list(first)
    count = min(count, len(listed))
    if count <= 2:
        return [listed, listed[::-1]][:count]
    return [listed[turn:] + listed[:turn] for turn in _turns(len(listed), count)]


def freed(orders: Sequence[Sequence[int]], scores: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    """Qualities of the items, and effects of the places (mean 0).

    Args:
        orders: K orders of N items from :func:`orders_of`.
        scores: K lists of N, by item.

    Returns:
        N qualities, with the mean of all scores; N effects, zeros for fewer than three orders.
    """
    size, count = len(orders[0]), len(orders)
    mean = [sum(one[item] for one in scores) / count for item in range(size)]
    if count <= 2:
        return mean, [0.0] * size
    at: list[float] = [0.0] * size
    for order, one in zip(orders, scores, strict=True):
        for place, item in enumerate(order):
            at[place] += one[item] / count
    # normal equations of y = quality + effect; the effects, mean(at - quality), are put into those of the qualities
    right = list(mean)
    matrix = [[1.0 / size] * size for _ in range(size)]  # what is undetermined, a constant, has mean 0
    for item in range(size):
        matrix[item][item] += 1.0
    for order in orders:
        for place, item in enumerate(order):
            right[item] -= at[place] / count
            for other in orders:
                matrix[item][other[place]] -= 1.0 / count**2
    found = _solved(matrix, right)
    level = sum(mean) / size - sum(found) / size
    quality = [value + level for value in found]
    effects = list(at)
    for order in orders:
        for place, item in enumerate(order):
            effects[place] -= quality[item] / count
    return quality, effects


@lru_cache(maxsize=64)
def _turns(size: int, count: int) -> tuple[int, ...]:
    """Turns of a circle of ``size`` that tell patterns of places apart: each next turn is the one that sees best what
    those before it see worst."""
    turns = [0]
    while len(turns) < count:
        left = [turn for turn in range(1, size) if turn not in turns]
        turns.append(min(left, key=lambda turn: (round(_confusion(size, (*turns, turn)), 9), turn)))
    return tuple(turns)


def _confusion(size: int, turns: Sequence[int]) -> float:
    """How much of the worst wave along the places stays in the means of the items, between 0 and 1."""
    waves = range(1, size // 2 + 1)
    seen = (abs(sum(cmath.exp(2j * cmath.pi * wave * turn / size) for turn in turns)) for wave in waves)
    return max(seen) / len(turns)


def _solved(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gaussian elimination; ``matrix`` is positive definite, so that no pivot is small."""
    size = len(right)
    for column in range(size):
        for row in range(column + 1, size):
            factor = matrix[row][column] / matrix[column][column]
            if factor:
                for k in range(column, size):
                    matrix[row][k] -= factor * matrix[column][k]
                right[row] -= factor * right[column]
    found = [0.0] * size
    for row in reversed(range(size)):
        known = sum(matrix[row][k] * found[k] for k in range(row + 1, size))
        found[row] = (right[row] - known) / matrix[row][row]
    return found
