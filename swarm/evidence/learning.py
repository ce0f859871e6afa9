"""``learning``: whether a run learns, as one sentence with an interval.

Invariant: it is a function of what steps and evaluations measured. Its intervals hold however often one looks: each is
wrong at any time with a chance of 5 % at most. Without a step that has a reward it says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median_low
from typing import NamedTuple, TypeVar

from swarm.evidence.alarms import Alarm
from swarm.intervals import Interval, student_quantile, trend_interval
from swarm.measures import EVAL_REWARD, EVAL_SPREAD, LOGGED, REWARD, SHUFFLED, TRAIN
from swarm.types import EvalResult, StepResult

_CONFIDENCE = 0.95
#: The last evaluation goes on while it has a smaller share of the episodes of those before, and decides nothing yet. Of
#: those, one may have been done twice, by a run that was begun again.
_WHOLE = 0.9
#: Fewer episodes of two evaluations do not tell how far rewards deviate.
_LEAST_EPISODES = 8
#: Alarms that say that it does not learn; the others say what else is wrong.
_NO = ("reward", "held_out", "entropy", "signal")


class HeldOut(NamedTuple):
    """An evaluation: of which version, mean and deviation of the rewards, and of how many episodes."""

    version: int
    mean: float
    deviation: float
    episodes: int


_Evaluation = TypeVar("_Evaluation", HeldOut, EvalResult)


def line_of(steps: Iterable[StepResult]) -> list[StepResult]:
    """The steps that led to the weights of now: of those that were done again, from an earlier checkpoint, the last
    time."""
    line: list[StepResult] = []
    for step in steps:
        while line and line[-1].step >= step.step:
            line.pop()
        line.append(step)
    return line


def rewards_of(steps: Iterable[StepResult]) -> dict[int, float]:
    """The mean reward by step, of the :func:`line_of` them."""
    return {step.step: step.metrics[REWARD] for step in line_of(steps) if REWARD in step.metrics}


def learning_of(
    steps: Sequence[StepResult],
    evaluations: Sequence[EvalResult],
    alarms: Sequence[Alarm] = (),
    *,
    control: Mapping[int, float] | None = None,
) -> str:
    """:func:`learning` of what a journal has, or a status; a control is known by its latest step."""
    shuffled = bool(steps) and f"{TRAIN}{LOGGED}{SHUFFLED}" in steps[-1].metrics
    return learning(rewards_of(steps), held_out_of(evaluations), alarms, control=control, shuffled=shuffled)


def held_out_of(evaluations: Iterable[EvalResult]) -> list[HeldOut]:
    """Those of ``evaluations`` that measured a reward and its deviation."""
    return [
        HeldOut(each.step, each.metrics[EVAL_REWARD], each.metrics[EVAL_SPREAD], each.episodes)
        for each in evaluations
        if EVAL_REWARD in each.metrics and EVAL_SPREAD in each.metrics
    ]


def finished(evaluations: Sequence[_Evaluation]) -> Sequence[_Evaluation]:
    """``evaluations``, the oldest first, without the last one while it goes on."""
    *before, last = [each.episodes for each in evaluations] or [0]
    return evaluations[:-1] if before and last < _WHOLE * median_low(before) else evaluations


def learning(
    rewards: Mapping[int, float],
    held_out: Sequence[HeldOut] = (),
    alarms: Sequence[Alarm] = (),
    *,
    control: Mapping[int, float] | None = None,
    shuffled: bool = False,
) -> str:
    """``learning: reward rose by 0.12 [0.05, 0.19] over 20 steps``, ``not proven: reward +0.02 [-0.05, 0.09] over 20
    steps`` or ``no: ...``; empty without a reward.

    What the evaluations prove counts more than what the steps do; an alarm that says no counts more than both.

    Args:
        rewards: mean reward by step.
        held_out: the evaluations, the oldest first.
        alarms: what the watch says of the run.
        control: the same of a control run, if there is one: what counts is the difference at each step of both.
        shuffled: this run is a control itself.
    """
    if not rewards:
        return ""
    beside = ""
    if control is not None and not shuffled:
        beside = " compared with the control"
        rewards = {step: reward - control[step] for step, reward in rewards.items() if step in control}
    over = f" over {len(rewards)} step{'' if len(rewards) == 1 else 's'}"
    findings = [_finding("reward", trend_interval(rewards, _CONFIDENCE), over + beside)]
    held_out = finished(held_out)
    if len(held_out) > 1:
        first, last = held_out[0], held_out[-1]
        change = _change(first, last, len(held_out) - 1)
        findings.insert(0, _finding("held-out reward", change, f" from version {first.version} to {last.version}"))
    words = "; ".join(finding.words for finding in findings)
    if shuffled:
        return f"control, whose rewards are shuffled, so that it gains by chance alone: {words}"
    against = next((f"{alarm.text}; " for alarm in alarms if alarm.kind in _NO), "")
    others = ", ".join(alarm.kind for alarm in alarms if alarm.kind not in _NO)
    answer = next((finding.answer for finding in findings if finding.answer), "not proven")
    return f"{'no' if against else answer}: {against}{words}" + (f"; alarm: {others}" if others else "")


class _Finding(NamedTuple):
    answer: str
    words: str


def _finding(what: str, change: Interval, over: str) -> _Finding:
    if math.isinf(change.high):
        return _Finding("", f"{what}{over} tells nothing yet")
    answer = "learning" if change.low > 0 else "no" if change.high < 0 else ""
    if answer == "no":
        change = Interval(-change.mean, -change.high, -change.low)
    # two digits of the interval's width; differences of floats are never quite zero
    width = change.high - change.low
    digits = 1 - math.floor(math.log10(width)) if 1e-9 < width < 1e9 else 3
    form = f"z.{min(6, max(0, digits))}f" if width < 1e9 else ".3g"
    verb = {"learning": "rose by ", "no": "fell by "}.get(answer, "")
    mean = f"{change.mean:{'' if verb else '+'}{form}}"
    return _Finding(answer, f"{what} {verb}{mean} [{change.low:{form}}, {change.high:{form}}]{over}")


def _change(first: HeldOut, last: HeldOut, looks: int) -> Interval:
    """Of two means: Student's interval with one deviation for both ("The probable error of a mean", Biometrika 6,
    1908), whose error of 5 % is spent on the looks, 1 / (n (n + 1)) of it on the n-th, which comes to all of it (the
    union bound)."""
    error = (1 - _CONFIDENCE) / (looks * (looks + 1))
    change, episodes = last.mean - first.mean, first.episodes + last.episodes
    if episodes < _LEAST_EPISODES:
        return Interval(change, -math.inf, math.inf)
    squares = first.deviation**2 * first.episodes + last.deviation**2 * last.episodes
    variance = squares / (episodes - 2) * (1 / first.episodes + 1 / last.episodes)
    half = student_quantile(1 - error / 2, episodes - 2) * math.sqrt(variance)
    return Interval(change, change - half, change + half)
