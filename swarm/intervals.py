"""Intervals of means and of their differences (Student, "The probable error of a mean", Biometrika 6, 1908; Welch,
Biometrika 34, 1947), of trends and of shares, and how many values it takes to tell a difference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from statistics import NormalDist, fmean, variance
from typing import NamedTuple


class Interval(NamedTuple):
    """A mean, and the ends of its two-sided interval; without end where there are too few values."""

    mean: float
    low: float
    high: float


@cache
def student_quantile(probability: float, freedom: float) -> float:
    """The quantile of Student's t distribution for ``probability`` in (0.5, 1) and ``freedom`` >= 1.

    Bisection on the integral of its density by Simpson's rule, with t = sqrt(freedom) * tan(angle); beyond 100 degrees
    of freedom the normal quantile with the first two terms of its expansion (Abramowitz and Stegun, 26.7.5).
    """
    if freedom > 100:
        z = NormalDist().inv_cdf(probability)
        return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    constant = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)

    def above_half(angle: float) -> float:
        parts = 200
        values = [math.cos(step * angle / parts) ** (freedom - 1) for step in range(parts + 1)]
        return (
            constant * angle / parts / 3 * (values[0] + values[-1] + 4 * sum(values[1:-1:2]) + 2 * sum(values[2:-1:2]))
        )

    low, high = 0.0, math.pi / 2 - 1e-9
    for _ in range(45):
        middle = (low + high) / 2
        low, high = (middle, high) if above_half(middle) < probability - 0.5 else (low, middle)
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def mean_interval(values: Sequence[float], confidence: float) -> Interval:
    """Student's interval of the mean of ``values``."""
    mean, count = fmean(values), len(values)
    if count < 2:
        return Interval(mean, -math.inf, math.inf)
    half = student_quantile((1 + confidence) / 2, count - 1) * math.sqrt(variance(values) / count)
    return Interval(mean, mean - half, mean + half)


def welch_interval(sample: Sequence[float], other: Sequence[float], confidence: float) -> Interval:
    """Welch's interval of the mean of ``sample`` minus that of ``other``."""
    difference = fmean(sample) - fmean(other)
    if min(len(sample), len(other)) < 2:
        return Interval(difference, -math.inf, math.inf)
    parts = [variance(values) / len(values) for values in (sample, other)]
    total = sum(parts)
    if total == 0:
        return Interval(difference, difference, difference)
    freedom = total**2 / sum(part**2 / (len(values) - 1) for part, values in zip(parts, (sample, other), strict=True))
    # rounded, so that equal cases share one quantile; down, which only widens the interval
    freedom = math.floor(freedom * 100) / 100
    half = student_quantile((1 + confidence) / 2, freedom) * math.sqrt(total)
    return Interval(difference, difference - half, difference + half)


#: How much a value changes from one step to the next, in standard deviations: what :func:`trend_interval` expects
#: before it sees any. More makes the interval of few values narrower, and that of many wider.
_EXPECTED_SLOPE = 0.2


def trend_interval(values: Mapping[int, float], confidence: float) -> Interval:
    """How much ``values`` change from the first step to the last one, by the line of least squares through them.

    The interval holds at all times at once: who looks after each new value is misled with the same small chance as who
    looks once. It is the sequence of Lindon, Ham, Tingley and Bojinov ("Anytime-Valid Linear Models", 2022, arXiv
    2210.08589) for one slope: those slopes b0 whose Bayes factor stays below 1 / alpha, with b0 ~ N(0, s^2 / p) and
    1 / s over intercept and deviation. For n values, v = n - 2, S the squared deviations of the steps, t Student's
    statistic of the slope, and r = p / (p + S), it is sqrt(r) ((1 + t^2 / v) / (1 + r t^2 / v))^((v + 1) / 2), so with
    k = (alpha^2 r)^(-1 / (v + 1)) the bound is t^2 = v (k - 1) / (1 - k r); there is none while k r >= 1.

    Args:
        values: by step, in order; independent and about normal around the line, with one deviation.
        confidence: of the interval, such as 0.95.
    """
    count, freedom = len(values), len(values) - 2
    if count < 2:
        return Interval(0.0, -math.inf, math.inf)
    # squares of large numbers are none
    size = max(map(abs, values.values())) or 1.0
    values = {step: value / size for step, value in values.items()}
    steps, middle, mean = list(values), fmean(values), fmean(values.values())
    squares = math.fsum((step - middle) ** 2 for step in steps)
    slope = math.fsum((step - middle) * (value - mean) for step, value in values.items()) / squares
    if abs(slope * (steps[-1] - steps[0])) < 1e-12:
        # equal values have a slope of rounding errors
        slope = 0.0
    span = size * (steps[-1] - steps[0])
    share = 1 / (1 + _EXPECTED_SLOPE**2 * squares)
    bound = ((1 - confidence) ** 2 * share) ** (-1 / (freedom + 1))
    if freedom < 1 or bound * share >= 1:
        return Interval(slope * span, -math.inf, math.inf)
    rest = math.fsum((value - mean - slope * (step - middle)) ** 2 for step, value in values.items())
    half = span * math.sqrt(rest / squares * (bound - 1) / (1 - bound * share))
    return Interval(slope * span, slope * span - half, slope * span + half)


def wilson_interval(hits: float, trials: int, confidence: float) -> Interval:
    """Wilson's interval of a share (Journal of the American Statistical Association 22, 1927); of no trials 0 to 1."""
    if trials == 0:
        return Interval(math.nan, 0.0, 1.0)
    z, share = NormalDist().inv_cdf((1 + confidence) / 2), hits / trials
    scale = 1 + z * z / trials
    middle = (share + z * z / (2 * trials)) / scale
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials)) / scale
    return Interval(share, max(0.0, middle - half), min(1.0, middle + half))


def values_to_tell(mean: float, deviation: float, confidence: float, power: float = 0.8) -> int | None:
    """How many values with this ``deviation`` an interval of ``confidence`` needs to exclude zero with a chance of
    ``power``, if ``mean`` is the true one: ((z[(1 + confidence) / 2] + z[power]) * deviation / mean)^2, as for any
    z test; ``None`` for a mean of zero."""
    if mean == 0:
        return None
    z = NormalDist().inv_cdf((1 + confidence) / 2) + NormalDist().inv_cdf(power)
    return math.ceil((z * deviation / mean) ** 2)
