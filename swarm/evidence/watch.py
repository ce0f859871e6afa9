"""``watched``: the alarms of a training run, by what its steps and evaluations measured.

Invariant: it is a function of rows of the journal. What was not measured raises no alarm. A mean is compared with an
earlier one that shares no step with it; the difference must also be larger than chance makes it: see :class:`_Curve`.

Entropy alone is no alarm: in healthy training most of it is spent in the first steps, in exchange for reward (Cui et
al. 2025, arXiv 2505.22617, R = -a exp(H) + b). So what counts is entropy that was spent and bought no reward.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from itertools import accumulate, chain, pairwise
from statistics import NormalDist
from typing import NamedTuple

from swarm.evidence.alarms import ALARMS, Alarm, WatchRules
from swarm.evidence.learning import HeldOut, held_out_of, line_of
from swarm.intervals import student_quantile
from swarm.measures import (
    LOGGED,
    REFUSED,
    REPETITION,
    RESPONSE_TOKENS,
    REWARD,
    SPREAD,
    TASKS,
    TASKS_WITH_SIGNAL,
    TRAIN,
)
from swarm.types import EvalResult, StepResult

#: says what is wrong after the step, or the evaluation, at an index; empty: nothing
_Says = Callable[[int], str]
#: the share of runs in which chance alone makes such a difference
_ERROR = 0.003
#: evaluations of a mean
_EVALUATIONS = (8, 5, 3, 2)
#: steps of a mean, as shares of the window
_SHARES = (1.0, 0.5, 0.3)
#: steps that say how far chance goes: what a run begins with, or one in which all went wrong, hides nothing for ever
_LATEST = 50
_EPISODES, _ROWS, _PADDING = f"{TRAIN}episodes", f"{TRAIN}rows", f"{TRAIN}padding_rows"
_ENTROPY, _BASE_KL = "actor/entropy", "actor/kl_loss"
#: The alarms of single steps: verl's metric, and what it is.
_LEVELS = {
    "weights": ("rollout_corr/rollout_is_mean", "the mean weight of the step's tokens, trainer over sampler,"),
    "sample_size": ("rollout_corr/rollout_is_eff_sample_size", "the effective sample size, as a share of the tokens,"),
    "sampler_kl": ("rollout_corr/kl", "the KL divergence of the sampler from the trainer"),
    "chi2": ("rollout_corr/chi2_token", "the chi-squared divergence of the sampler from the trainer"),
    "base_kl": (_BASE_KL, "the KL divergence of a token from the first weights"),
}
#: What is fine of each, by value and limit; of the others a size within the limit.
_FINE: dict[str, Callable[[float, float], bool]] = {
    "weights": lambda value, limit: value <= limit and value * limit >= 1,
    "sample_size": lambda value, limit: value >= limit,
}
#: steps in a row without a signal
_SILENT_STEPS = 2
_CURE = "make the reward finer, raise job.temperature, or set job.collection to finish_enough_non_dummy_tasks"


def watched(
    steps: Sequence[StepResult],
    evaluations: Sequence[EvalResult],
    rules: WatchRules,
    *,
    summed_over: int = 0,
) -> list[Alarm]:
    """What is beyond its limit after the last of ``steps``.

    Args:
        steps: in order, each as the journal has it; of those that were done again the last time counts.
        evaluations: by version, the oldest first.
        rules: limits; what has the action ``off`` is left out.
        summed_over: by this number verl divides its entropy and KL loss, which are sums over the sampled tokens of a
            row, as they are with ``dr_grpo``; 0: they are of a token.
    """
    if not steps:
        return []
    steps = line_of(steps)
    sizes = (round(share * rules.window) for share in _SHARES)
    by_size = [_Steps(steps, rules, summed_over, size) for size in sizes if size > 1]
    says: dict[str, list[_Says]] = {}
    for name, rule in chain(by_size[0].rules(), *(of_size.rules_of_means() for of_size in by_size[1:])):
        says.setdefault(name, []).append(rule)
    numbers = [step.step for step in steps]
    alarms = [_alarm(name, says_of, numbers, rules) for name, says_of in says.items()]
    held_out = held_out_of(evaluations)
    versions = [evaluation.version for evaluation in held_out]
    alarms.append(_alarm("held_out", [_HeldOut(held_out, steps[-1].metrics, rules).fell], versions, rules))
    order = {name: number for number, name in enumerate(ALARMS)}
    raised = (alarm for alarm in alarms if alarm is not None and alarm.action != "off")
    return sorted(raised, key=lambda alarm: order[alarm.kind])


def _alarm(name: str, says: Sequence[_Says], numbers: Sequence[int], rules: WatchRules) -> Alarm | None:
    """The alarm ``name``, if one of ``says`` has a text for the last of ``numbers``."""

    def text(index: int) -> str:
        return next(filter(None, (each(index) for each in says)), "")

    first = len(numbers) - 1
    if not numbers or not (now := text(first)):
        return None
    while first and text(first - 1):
        first -= 1
    return Alarm(kind=name, text=now, since=numbers[first], action=rules.of(name).action)


class _Means(NamedTuple):
    now: float
    then: float


def _quantile(looks: int, freedom: float = math.inf) -> float:
    """By how many standard errors chance makes two means differ, at the ``looks``-th of a run's looks. Of ``_ERROR``
    1 / (n (n + 1)) is spent on the n-th, which comes to all of it (the union bound). That the earlier mean is the best
    of many is not counted: of 100 steps chance misleads less than that nevertheless, as neighbouring looks see nearly
    the same; evaluations share less, and misled one of 300 runs within ten, and six within a hundred (simulated)."""
    error = _ERROR / (looks * (looks + 1))
    return NormalDist().inv_cdf(1 - error) if freedom == math.inf else student_quantile(1 - error, freedom)


class _Curve:
    """Values in their order, ``None`` where nothing was measured, and their means over a window that ends at each."""

    def __init__(self, values: Sequence[float | None], size: int) -> None:
        self._values, self._size = values, size
        windows = (self._window(end) for end in range(len(values)))
        self.means = [math.fsum(window) / size if len(window) == size else None for window in windows]
        measured = (-math.inf if mean is None else mean for mean in self.means)
        #: the best mean so far
        self.best = list(accumulate(measured, max, initial=-math.inf))[1:]
        self.first = next((index for index, mean in enumerate(self.means) if mean is not None), len(values))

    def best_before(self, index: int) -> int | None:
        """Where the first window with the best mean ends that shares no value with the one at ``index``."""
        before = index - self._size
        return None if before < 0 or self.best[before] == -math.inf else bisect_left(self.best, self.best[before])

    def both(self, index: int, before: int | None) -> _Means | None:
        """The means at ``index`` and ``before``; ``None`` if one is not measured, or they share a value."""
        if before is None or index - before < self._size or before < self.first:
            return None
        now, then = self.means[index], self.means[before]
        return None if now is None or then is None else _Means(now, then)

    def change(self, index: int, before: int | None, beyond: Callable[[_Means], bool]) -> _Means | None:
        """The means of :meth:`both`, if they are ``beyond`` the limit of a change and chance alone has not made it.

        The deviation of a value is the larger of that within both windows and that by which the latest neighbours
        differ, of which a trend is little (von Neumann et al., "The mean square successive difference", Annals of
        Mathematical Statistics 12, 1941; two thirds of such differences are degrees of freedom).
        """
        change = self.both(index, before)
        if before is None or change is None or not beyond(change):
            return None
        windows = (self._window(index), change.now), (self._window(before), change.then)
        # the square of a large number is none
        within = math.hypot(*(value - mean for window, mean in windows for value in window))
        latest = [step for step in self._changes[max(0, index - _LATEST) : index] if step is not None]
        between = math.hypot(*latest) / math.sqrt(2 * len(latest))
        deviation = max(within / math.sqrt(2 * (self._size - 1)), between)
        errors = _quantile(index + 1, max(1, 2 * len(latest) // 3))
        chance = errors * deviation * math.sqrt(2 / self._size)
        return None if abs(change.now - change.then) < chance else change

    @cached_property
    def _changes(self) -> list[float | None]:
        """By how much each value but the first differs from the one before."""
        return [None if before is None or value is None else value - before for before, value in pairwise(self._values)]

    def _window(self, end: int) -> list[float]:
        """What was measured of the values of the window that ends at ``end``."""
        return [value for value in self._values[max(0, end + 1 - self._size) : end + 1] if value is not None]


class _HeldOut:
    """The rule about evaluations: each mean is compared with the best earlier one over as many of them or fewer."""

    def __init__(self, held_out: Sequence[HeldOut], last: dict[str, float], rules: WatchRules) -> None:
        self._held_out, self._last, self._limit = held_out, last, rules.held_out.limit
        self._episodes = list(accumulate((each.episodes for each in held_out), initial=0))
        self._sums = list(accumulate((each.mean * each.episodes for each in held_out), initial=0.0))
        squares = math.fsum(each.deviation**2 * each.episodes for each in held_out)
        self._deviation = math.sqrt(squares / self._episodes[-1]) if held_out else 0.0
        #: by how many standard errors chance takes a mean away from what it is
        self._errors = _quantile(len(held_out)) if held_out else 0.0
        #: by size, where the best window ends up to each evaluation; one of few episodes is good by chance
        self._best: dict[int, list[int]] = {}
        for size in (*_EVALUATIONS, 1):
            ends = range(size - 1, len(held_out))
            self._best[size] = list(
                accumulate(ends, lambda best, end, n=size: max(best, end, key=partial(self._low, n)))
            )

    def fell(self, index: int) -> str:
        """What is wrong after the evaluation at ``index``."""
        texts = (self._fell(index, now, then) for now in _EVALUATIONS for then in self._best if then <= now)
        return next(filter(None, texts), "")

    def _fell(self, index: int, size: int, size_then: int) -> str:
        if index + 1 < size + size_then:
            return ""
        best = self._best[size_then][index - size - size_then + 1]
        now, then = self._mean(size, index), self._mean(size_then, best)
        # one alone raises no alarm, also as a part of a mean
        last = max(self._mean(1, index), self._mean(1, index - 1))
        error = math.hypot(self._error(size, index), self._error(size_then, best))
        if last >= then or then - now <= max(self._limit * abs(then), _quantile(index + 1) * error):
            return ""
        trained = f" (in the last training step: {self._last[REWARD]:.3g})" if REWARD in self._last else ""
        return (
            f"the held-out reward fell from {then:.3g} of version {self._held_out[best].version} to {now:.3g}{trained}"
        )

    def _mean(self, size: int, end: int) -> float:
        """Over the episodes of the evaluations of a window."""
        return (self._sums[end + 1] - self._sums[end + 1 - size]) / self._count(size, end)

    def _error(self, size: int, end: int) -> float:
        return self._deviation / math.sqrt(self._count(size, end))

    def _count(self, size: int, end: int) -> int:
        return self._episodes[end + 1] - self._episodes[end + 1 - size]

    def _low(self, size: int, end: int) -> float:
        """What the mean is at least, but for chance."""
        return self._mean(size, end) - self._errors * self._error(size, end)


class _Steps:
    """The rules about steps: each says what is wrong after the step at an index, as a sentence; empty: nothing."""

    def __init__(self, steps: Sequence[StepResult], rules: WatchRules, summed_over: int, size: int) -> None:
        self._steps, self._rules, self._summed_over, self._size = steps, rules, summed_over, size
        self._entropy = _Curve([_of_token(step, _ENTROPY, summed_over) for step in steps], size)
        self._reward, self._spread = self._curve(REWARD), self._curve(SPREAD)
        self._tokens, self._repetition = self._curve(RESPONSE_TOKENS), self._curve(REPETITION)
        logged = TRAIN + LOGGED
        self._refusals = self._curve(logged + REFUSED)
        self._components = {
            name.removeprefix(logged): self._curve(name)
            for name in steps[-1].metrics
            if name.startswith(logged)
            and name.removeprefix(logged).rpartition(".")[2] not in rules.lower_is_better
            and all(0 <= step.metrics.get(name, 0) <= 1 for step in steps)
        }

    def rules(self) -> Iterator[tuple[str, _Says]]:
        """The name of each alarm, and when it is raised."""
        yield from self.rules_of_means()
        # a reward that is as low as earlier by chance makes the entropy that a healthy run has spent look lost
        yield "entropy", self._spent
        yield "signal", self._silent
        for name in _LEVELS:
            yield name, partial(self._beyond, name)

    def rules_of_means(self) -> Iterator[tuple[str, _Says]]:
        """Those for which fewer steps do as well where the difference is large."""
        yield "reward", self._worse
        yield "components", self._components_fell
        yield "length", self._longer
        yield "repetition", self._repeats
        yield "refusals", self._refuses

    def _curve(self, metric: str) -> _Curve:
        return _Curve([step.metrics.get(metric) for step in self._steps], self._size)

    def _spent(self, index: int) -> str:
        now = self._reward.means[index]
        as_good = None if now is None else bisect_left(self._reward.best, now)
        limit = self._rules.entropy.limit
        change = self._entropy.change(index, as_good, lambda change: change.now < limit * change.then)
        if now is None or as_good is None or change is None:
            return ""
        return (
            f"the entropy fell from {change.then:.3g} to {change.now:.3g} since step {self._steps[as_good].step}, and "
            f"the mean reward is no higher (then {self._reward.means[as_good]:.3g}, now {now:.3g})"
        )

    def _worse(self, index: int) -> str:
        best = self._reward.best_before(index)
        deviation = None if best is None else self._spread.means[best]
        if best is None or deviation is None:
            return ""
        limit = self._rules.reward.limit * deviation
        change = self._reward.change(index, best, lambda change: change.then - change.now > limit)
        if change is None:
            return ""
        return f"the mean reward fell from {change.then:.3g} at step {self._steps[best].step} to {change.now:.3g}"

    def _components_fell(self, index: int) -> str:
        fell = (self._fell(name, curve, index) for name, curve in self._components.items())
        return "; ".join(text for text in fell if text)

    def _fell(self, name: str, curve: _Curve, index: int) -> str:
        best = curve.best_before(index)
        reward, limit = self._reward.both(index, best), self._rules.components.limit
        change = curve.change(index, best, lambda change: change.then - change.now > limit)
        if best is None or change is None or reward is None or reward.now <= reward.then:
            return ""
        return (
            f"{name} fell from {change.then:.3g} at step {self._steps[best].step} to {change.now:.3g}, while the mean "
            f"reward rose from {reward.then:.3g} to {reward.now:.3g}"
        )

    def _longer(self, index: int) -> str:
        first, limit = self._tokens.first, self._rules.length.limit
        change = self._tokens.change(index, first, lambda change: change.now > limit * change.then)
        return f"an episode has {change.now:.0f} tokens, and had {change.then:.0f} at first" if change else ""

    def _repeats(self, index: int) -> str:
        rise = self._risen(self._repetition, self._rules.repetition.limit, index)
        says = "of what answers end with they have said before, at first"
        return f"{rise.now:.0%} {says} {rise.then:.0%}" if rise else ""

    def _refuses(self, index: int) -> str:
        rise = self._risen(self._refusals, self._rules.refusals.limit, index)
        return f"{rise.now:.0%} of the answers refuse, at first {rise.then:.0%}" if rise else ""

    def _risen(self, curve: _Curve, limit: float, index: int) -> _Means | None:
        """The means of a share now and at first, if it rose by more than ``limit``."""
        return curve.change(index, curve.first, lambda change: change.now - change.then > limit)

    def _silent(self, index: int) -> str:
        last = [step.metrics for step in self._steps[max(0, index + 1 - _SILENT_STEPS) : index + 1]]
        if len(last) < _SILENT_STEPS or any(
            TASKS_WITH_SIGNAL not in metrics or TASKS not in metrics for metrics in last
        ):
            return ""
        differ, of = (sum(metrics[name] for metrics in last) for name in (TASKS_WITH_SIGNAL, TASKS))
        if differ >= self._rules.signal.limit * of:
            return ""
        learned = "little" if differ else "nothing"
        return (
            f"in {_SILENT_STEPS} steps in a row the rewards differ in {differ:.0f} of {of:.0f} groups, so {learned} "
            f"was learned: {_CURE}"
        )

    def _beyond(self, name: str, index: int) -> str:
        metric, about = _LEVELS[name]
        summed_over = self._summed_over if metric == _BASE_KL else 0
        value, limit = _of_token(self._steps[index], metric, summed_over), self._rules.of(name).limit
        is_fine = _FINE.get(name, lambda value, limit: abs(value) <= limit)
        if value is None or is_fine(value, limit):
            return ""
        return f"{about} is {value:.3g}, and its limit is {limit:g}"


def _of_token(step: StepResult, metric: str, summed_over: int) -> float | None:
    """What a step measured, of a token; ``summed_over`` as of :func:`watched`."""
    value = step.metrics.get(metric)
    if not summed_over or value is None:
        return value
    tokens, episodes, rows = (step.metrics.get(name, 0.0) for name in (RESPONSE_TOKENS, _EPISODES, _ROWS))
    if metric == _BASE_KL:
        # verl's KL loss is over whole mini-batches, its entropy over the rows with a sampled token
        rows += step.metrics.get(_PADDING, 0.0)
    return value * summed_over * rows / (tokens * episodes) if tokens * episodes * rows else None
