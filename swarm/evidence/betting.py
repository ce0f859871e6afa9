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
from dataclasses import dataclass, field

#: Fractions of the largest safe stake. Small ones find small differences late, large ones find large differences soon.
BETS = (0.1, 0.2, 0.4, 0.6, 0.8, 0.95)
#: Ends of intervals are multiples of one part in so many.
GRID = 200
#: Values are rounded to multiples of one part in so many, so that an end costs the same for any number of them.
_FINE = 5 * GRID


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

    def add(self, value: float, times: int = 1) -> None:
        """Bet on ``value``, in [-1, 1], so many ``times``."""
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


class LowEnd:
    """The lower end of the means that values in [-1, 1] do not refute, as they come.

    It is on a grid of step ``1 / GRID``, and values are rounded, so that it can only be lower. It is a function of the
    values, however often one looked, up to rounding in any order; a look costs the less the nearer the last one's end.
    The upper end is the same of the values times -1, times -1.
    """

    def __init__(self) -> None:
        #: how often each came
        self._values: Counter[float] = Counter()
        #: the last look refuted this mean and none above it; in steps of the grid
        self._refuted = 0

    def add(self, value: float) -> None:
        """Count ``value``, in [-1, 1]."""
        # down, which is less evidence; what rounding errors moved below a step is on it
        self._values[math.floor(value * _FINE + 1e-6) / _FINE] += 1

    def at(self, alpha: float) -> float:
        """The largest mean of the grid that the values refute at ``alpha`` as an upper bound of their mean; -1 if they
        refute none."""
        # whoever refutes a mean refutes all below it: away from the last end in steps that double, then by bisection
        refuted, standing, step, mean = -GRID, GRID, 1, max(self._refuted, 1 - GRID)
        while standing - refuted > 1:
            wealth = Wealth(mean / GRID)
            for value, times in self._values.items():
                wealth.add(value, times)
            if wealth.refutes(alpha):
                refuted = mean
                mean = min(refuted + step, (refuted + standing) // 2)
            else:
                standing = mean
                mean = max(standing - step, (refuted + standing) // 2)
            step *= 2
        self._refuted = refuted
        return refuted / GRID
