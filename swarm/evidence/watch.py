"""``watched``: the alarms of a training run, by what its steps and evaluations measured.

Invariant: it is a function of rows of the journal. What was not measured raises no alarm. A mean is compared with an
earlier one that shares no step with it; the difference must also be larger than chance makes it (``_SURE`` standard
errors, or ``_SURE_OF_BEST`` where the earlier mean was picked as the best of many).

Entropy alone is no alarm: in healthy training most of it is spent in the first steps, in exchange for reward (Cui et
al. 2025, arXiv 2505.22617, R = -a exp(H) + b). So what counts is entropy that was spent and bought no reward.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from swarm.evidence.alarms import ALARMS, Alarm, WatchRules
from swarm.evidence.learning import line_of
from swarm.measures import (
    EVAL_REWARD,
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

_SURE, _SURE_OF_BEST = 3.0, 5.0
_EPISODES, _ROWS = f"{TRAIN}episodes", f"{TRAIN}rows"
_ENTROPY, _BASE_KL = "actor/entropy", "actor/kl_loss"
#: The alarms of single steps: verl's metric, and what it is.
_LEVELS = {
    "weights": ("rollout_corr/rollout_is_mean", "the mean weight of the step's tokens, trainer over sampler,"),
    "sample_size": ("rollout_corr/rollout_is_eff_sample_size", "the effective sample size, as a share of the tokens,"),
    "sampler_kl": ("rollout_corr/kl", "the KL divergence of the sampler from the trainer"),
    "chi2": ("rollout_corr/chi2_token", "the chi-squared divergence of the sampler from the trainer"),
    "base_kl": (_BASE_KL, "the KL divergence of a token from the first weights"),
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
    alarms: list[Alarm] = []
    for name, says in _Steps(steps, rules, summed_over).rules():
        index = len(steps) - 1
        if text := says(index):
            while index and says(index - 1):
                index -= 1
            alarms.append(Alarm(kind=name, text=text, since=steps[index].step, action=rules.of(name).action))
    alarms += _held_out(evaluations, steps[-1].metrics, rules)
    order = {name: number for number, name in enumerate(ALARMS)}
    return sorted((alarm for alarm in alarms if alarm.action != "off"), key=lambda alarm: order[alarm.kind])


class _Means(NamedTuple):
    now: float
    then: float


class _Curve:
    """Values of steps, ``None`` where nothing was measured, and their means over a window that ends at each."""

    def __init__(self, values: Sequence[float | None], size: int) -> None:
        self._values, self._size = values, size
        self.means: list[float | None] = []
        #: the best mean so far
        self.best: list[float] = []
        for end in range(len(values)):
            window = self._window(end)
            mean = math.fsum(window) / size if len(window) == size else None
            self.means.append(mean)
            self.best.append(max(-math.inf if mean is None else mean, self.best[-1] if self.best else -math.inf))
        self.first = next((index for index, mean in enumerate(self.means) if mean is not None), len(values))

    def best_before(self, index: int) -> int | None:
        """Where the first window with the best mean ends that shares no step with the one at ``index``."""
        before = index - self._size
        return None if before < 0 or self.best[before] == -math.inf else bisect_left(self.best, self.best[before])

    def differ(self, index: int, before: int | None, sure: float) -> _Means | None:
        """The means at ``index`` and ``before``, if they differ by more than ``sure`` standard errors; ``None`` also if
        one is not measured, or they share a step."""
        if before is None or index - before < self._size or before < self.first:
            return None
        now, then = self.means[index], self.means[before]
        if now is None or then is None:
            return None
        apart = [value - now for value in self._window(index)] + [value - then for value in self._window(before)]
        # the square of a large number is none
        chance = sure * math.hypot(*apart) / math.sqrt((self._size - 1) * self._size)
        return _Means(now, then) if abs(now - then) >= chance else None

    def _window(self, end: int) -> list[float]:
        return [value for value in self._values[max(0, end + 1 - self._size) : end + 1] if value is not None]


class _Steps:
    """The rules about steps: each says what is wrong after the step at an index, as a sentence; empty: nothing."""

    def __init__(self, steps: Sequence[StepResult], rules: WatchRules, summed_over: int) -> None:
        self._steps, self._rules, self._summed_over = steps, rules, summed_over
        self._entropy = _Curve([_of_token(step, _ENTROPY, summed_over) for step in steps], rules.window)
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

    def rules(self) -> Iterator[tuple[str, Callable[[int], str]]]:
        """The name of each alarm, and when it is raised."""
        yield "entropy", self._spent
        yield "reward", self._worse
        yield "components", self._components_fell
        yield "length", self._longer
        yield "repetition", self._repeats
        yield "refusals", self._refuses
        yield "signal", self._silent
        for name in _LEVELS:
            yield name, partial(self._beyond, name)

    def _curve(self, metric: str) -> _Curve:
        return _Curve([step.metrics.get(metric) for step in self._steps], self._rules.window)

    def _spent(self, index: int) -> str:
        now = self._reward.means[index]
        as_good = None if now is None else bisect_left(self._reward.best, now)
        change = self._entropy.differ(index, as_good, _SURE)
        if now is None or as_good is None or change is None or change.now >= self._rules.entropy.limit * change.then:
            return ""
        return (
            f"the entropy fell from {change.then:.3g} to {change.now:.3g} since step {self._steps[as_good].step}, and "
            f"the mean reward is no higher (then {self._reward.means[as_good]:.3g}, now {now:.3g})"
        )

    def _worse(self, index: int) -> str:
        best = self._reward.best_before(index)
        change = self._reward.differ(index, best, _SURE_OF_BEST)
        deviation = None if best is None else self._spread.means[best]
        if best is None or change is None or deviation is None:
            return ""
        if change.then - change.now <= self._rules.reward.limit * deviation:
            return ""
        return f"the mean reward fell from {change.then:.3g} at step {self._steps[best].step} to {change.now:.3g}"

    def _components_fell(self, index: int) -> str:
        fell = (self._fell(name, curve, index) for name, curve in self._components.items())
        return "; ".join(text for text in fell if text)

    def _fell(self, name: str, curve: _Curve, index: int) -> str:
        best = curve.best_before(index)
        change = curve.differ(index, best, _SURE_OF_BEST)
        reward = self._reward.differ(index, best, 0.0)
        if best is None or change is None or reward is None or reward.now <= reward.then:
            return ""
        if change.then - change.now <= self._rules.components.limit:
            return ""
        return (
            f"{name} fell from {change.then:.3g} at step {self._steps[best].step} to {change.now:.3g}, while the mean "
            f"reward rose from {reward.then:.3g} to {reward.now:.3g}"
        )

    def _longer(self, index: int) -> str:
        change = self._tokens.differ(index, self._tokens.first, _SURE)
        if change is None or change.now <= self._rules.length.limit * change.then:
            return ""
        return f"an episode has {change.now:.0f} tokens, and had {change.then:.0f} at first"

    def _repeats(self, index: int) -> str:
        rise = self._risen(self._repetition, self._rules.repetition.limit, index)
        says = "of what answers end with they have said before, at first"
        return f"{rise.now:.0%} {says} {rise.then:.0%}" if rise else ""

    def _refuses(self, index: int) -> str:
        rise = self._risen(self._refusals, self._rules.refusals.limit, index)
        return f"{rise.now:.0%} of the answers refuse, at first {rise.then:.0%}" if rise else ""

    def _risen(self, curve: _Curve, limit: float, index: int) -> _Means | None:
        """The means of a share now and at first, if it rose by more than ``limit``."""
        change = curve.differ(index, curve.first, _SURE)
        return None if change is None or change.now - change.then <= limit else change

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
        if value is None:
            return ""
        match name:
            case "weights":
                fine = value <= limit and value * limit >= 1
            case "sample_size":
                fine = value >= limit
            case _:
                fine = abs(value) <= limit
        if fine:
            return ""
        return f"{about} is {value:.3g}, and its limit is {limit:g}"


def _of_token(step: StepResult, metric: str, summed_over: int) -> float | None:
    """What a step measured, of a token; ``summed_over`` as of :func:`watched`."""
    value = step.metrics.get(metric)
    if not summed_over or value is None:
        return value
    tokens, episodes, rows = (step.metrics.get(name, 0.0) for name in (RESPONSE_TOKENS, _EPISODES, _ROWS))
    return value * summed_over * rows / (tokens * episodes) if tokens * episodes * rows else None


def _held_out(evaluations: Sequence[EvalResult], last: dict[str, float], rules: WatchRules) -> list[Alarm]:
    """Chance is estimated by the deviation of the rewards in the last step."""
    spread = last.get(SPREAD)
    measured = [evaluation for evaluation in evaluations if EVAL_REWARD in evaluation.metrics]
    if spread is None or len(measured) < 3:
        return []
    best = max(measured[:-2], key=lambda evaluation: evaluation.metrics[EVAL_REWARD])
    then = best.metrics[EVAL_REWARD]

    def low(evaluation: EvalResult) -> bool:
        chance = _SURE_OF_BEST * spread * math.sqrt(1 / evaluation.episodes + 1 / best.episodes)
        return then - evaluation.metrics[EVAL_REWARD] > max(rules.held_out.limit * abs(then), chance)

    if not all(map(low, measured[-2:])):
        return []
    first = len(measured) - 2
    while low(measured[first - 1]):
        first -= 1
    now = measured[-1].metrics[EVAL_REWARD]
    trained = f" (in the last training step: {last[REWARD]:.3g})" if REWARD in last else ""
    text = f"the held-out reward fell from {then:.3g} of version {best.step} to {now:.3g}{trained}"
    # as with steps without a signal, the second one is what raises it
    return [Alarm(kind="held_out", text=text, since=measured[first + 1].step, action=rules.held_out.action)]
