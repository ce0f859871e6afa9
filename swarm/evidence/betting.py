"""Evidence about a mean by betting: a one-sided e-process, valid whenever one looks, and the interval by its inversion.

For values ``y`` in [-1, 1] and the hypothesis "their mean is at most ``m``", a gambler who bets the fraction ``b`` of
the largest safe stake on each next value has the wealth ``W_b = prod(1 + b * (y_i - m) / (1 + m))``. It is never
negative and, if the hypothesis is true, a supermartingale that begins at 1; so is the mean ``E`` over fixed bets. By
Ville's inequality the chance that ``E`` ever reaches ``1 / alpha`` is then at most ``alpha``: one may look after each
value and stop at any time (Waudby-Smith & Ramdas, "Estimating means of bounded random variables by betting", JRSS B
86, 2024, sections 2 and 4). ``m = 0`` gives ``E = mean_b prod(1 + b * y_i)``.

Every factor falls as ``m`` rises, so ``E`` does, and the ``m`` that are refuted at ``alpha`` are those below one bound:
the lower end of a confidence sequence. The upper end is the same of ``-y``.

Invariant: the wealth of bets after some values is a function of these values alone, up to rounding in any order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from swarm.intervals import Interval

#: Fractions of the largest safe stake. Small ones find small differences late, large ones find large differences soon.
BETS = (0.1, 0.2, 0.4, 0.6, 0.8, 0.95)
#: Ends of intervals are multiples of one part in so many.
GRID = 200
#: Steps of the grid are cut in so many before values are rounded to it: an interval then costs the same for any number.
_FINER = 5


@dataclass(slots=True)
class Wealth:
    """The state of one e-process against "the mean is at most ``most``".

    Args:
        most: in (-1, 1).

    Attributes:
        logs: natural logarithm of the wealth of each bet.
    """

    most: float = 0.0
    logs: list[float] = field(default_factory=lambda: [0.0] * len(BETS))

    def __post_init__(self) -> None:
        if not -1 < self.most < 1:
            raise ValueError(f"a mean of values in [-1, 1] can be tested against what is between: not {self.most}")

    def add(self, value: float, times: int = 1) -> None:
        """Bet on ``value``, in [-1, 1], so many ``times``.

        Raises:
            ValueError: it is not in [-1, 1].
        """
        # also of NaN
        if not -1 <= value <= 1:
            raise ValueError(f"a paired difference is in [-1, 1], not {value}")
        gain = (value - self.most) / (1 + self.most)
        for index, bet in enumerate(BETS):
            self.logs[index] += times * math.log1p(bet * gain)

    @property
    def log_evidence(self) -> float:
        """Natural logarithm of ``E``, the mean wealth."""
        largest = max(self.logs)
        return largest + math.log(sum(math.exp(log - largest) for log in self.logs) / len(self.logs))

    def refutes(self, alpha: float) -> bool:
        """Whether ``E`` is at least ``1 / alpha``."""
        return self.log_evidence >= -math.log(alpha)


def interval(values: Iterable[float], below: float, above: float) -> Interval:
    """The mean of ``values``, each in [-1, 1], and the means that they do not refute: those below the low end are
    refuted at ``below``, those above the high end at ``above``, and the interval errs by chance in at most the sum.

    The ends are on a grid of step ``1 / GRID``, and values are rounded, so that the interval can only be wider; without
    values they are -1 and 1.

    Raises:
        ValueError: a value is not in [-1, 1].
    """
    counts = Counter(values)
    total = counts.total()
    if not total:
        return Interval(0.0, -1.0, 1.0)
    mean = math.fsum(value * times for value, times in counts.items()) / total
    return Interval(mean, _low(counts, below, 1), -_low(counts, above, -1))


def _low(counts: Counter[float], alpha: float, sign: int) -> float:
    """The largest mean of the grid that the values times ``sign`` refute as an upper bound of their mean; -1 if they
    refute none."""
    fine = _FINER * GRID
    rounded: Counter[float] = Counter()
    for value, times in counts.items():
        if not -1 <= value <= 1:
            raise ValueError(f"a paired difference is in [-1, 1], not {value}")
        # down, which is less evidence; what rounding errors moved below a step is on it
        rounded[math.floor(sign * value * fine + 1e-6) / fine] += times
    # by bisection, because whoever refutes a mean refutes all below it
    refuted, standing = -GRID, GRID
    while standing - refuted > 1:
        middle = (refuted + standing) // 2
        wealth = Wealth(middle / GRID)
        for value, times in rounded.items():
            wealth.add(value, times)
        refuted, standing = (middle, standing) if wealth.refutes(alpha) else (refuted, middle)
    return refuted / GRID
