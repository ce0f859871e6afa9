"""What a study does next, and what its numbers mean: pure functions of the declared rules and the ledger's state.

Invariant: the same ledger gives the same next action and the same verdicts; nothing is kept on one seed.

Formulas:

* A run against the base run, both with one seed: the interval of the mean of the paired differences by held-out task
  (Student, "The probable error of a mean", Biometrika 6, 1908). It knows nothing of seeds, so it only drops and ranks.
* Confirmation, over the mean scores of runs with different seeds: the interval of the difference of two means with
  unequal variances (Welch, Biometrika 34, 1947; degrees of freedom by Satterthwaite, Biometrics 2, 1946). Where all
  seeds of both arms score equally, it has no width: then Student's interval by held-out task, of the means over seeds.
* Collapse: Welch's interval over the rewards of the first and the latest steps.
* Several winners at once: each is tested at ``(1 - confidence) / winners`` (Bonferroni's bound).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from swarm.intervals import Interval, mean_interval, welch_interval
from swarm.measures import NOT_FINITE, REWARD
from swarm.research.ledger import BASE, Experiment, Outcome, Run, RunState, State
from swarm.research.study import Study
from swarm.types import StepResult


class RunEnding(NamedTuple):
    """How a run ends."""

    outcome: Outcome
    why: str


class Propose(NamedTuple):
    """Ask the proposer for an experiment of this name."""

    experiment: str


class Record(NamedTuple):
    """Write this event."""

    event: str
    values: dict[str, Any]


#: A run is to be done.
Action = Run | Propose | Record


def gain(study: Study, state: State, run: str, step: int, confidence: float) -> Interval | None:
    """How much better ``run`` is than the base run at ``step``, paired by held-out task; ``None`` unless both were
    measured there."""
    ours, base = (state.runs[name].scores.get(step) if name in state.runs else None for name in (run, BASE))
    if ours is None or base is None or len(ours) != len(base):
        return None
    sign = 1 if study.evaluator.goal == "maximize" else -1
    return mean_interval([sign * (a - b) for a, b in zip(ours, base, strict=True)], confidence)


def last_gain(study: Study, state: State, experiment: str) -> Interval | None:
    """The :func:`gain` of the experiment's first run at its latest step that has one; ``None`` if no step has."""
    run = state.runs.get(experiment)
    steps = sorted(run.scores, reverse=True) if run else []
    gains = (gain(study, state, experiment, step, study.decision.confidence) for step in steps)
    return next((measured for measured in gains if measured is not None), None)


# ---------------------------------------------------------------------- one run


def is_due(study: Study, run: Run, step: int) -> bool:
    """Whether ``run`` is evaluated at ``step``; all runs begin with the same weights, so one of them measures these."""
    if step == 0:
        return run == Run(BASE)
    return step % study.evaluator.every_steps == 0 or step == study.steps


def most_trained(study: Study, run_state: RunState) -> int:
    """The steps that the attempt of a run may have trained at most: it waits for each evaluation that is due."""
    every = study.evaluator.every_steps
    return min(study.steps, (max(run_state.scores, default=0) // every + 1) * every)


def ending(study: Study, state: State, run: Run) -> RunEnding | None:
    """Whether what was measured ends ``run``."""
    scores = state.runs[run.name].scores
    if study.steps in scores:
        return RunEnding("done", "")
    step = max(scores, default=0)
    if step and _may_stop(run):
        interval = gain(study, state, run.name, step, 1 - 2 * study.early_stop.doubt)
        if interval is not None and interval.high < 0:
            return RunEnding("stopped", f"beaten: {-interval.mean:.4g} worse than the base at step {step}")
    return None


def trouble(study: Study, run: Run, steps: Sequence[StepResult]) -> RunEnding | None:
    """What in the training steps of ``run`` ends it."""
    for step in steps:
        # the engine counts what is no number, because JSON has none such
        if step.metrics.get(NOT_FINITE) or not all(map(math.isfinite, step.metrics.values())):
            return RunEnding("failed", f"NaN: a metric of step {step.step} is not finite")
    rewards = [step.metrics[REWARD] for step in steps if REWARD in step.metrics]
    window = study.early_stop.window
    if _may_stop(run) and len(rewards) >= 2 * window:
        began, now = rewards[:window], rewards[-window:]
        fall, share = welch_interval(began, now, study.decision.confidence), study.early_stop.collapse
        if share < 1 and fall.low > 0 and fall.mean > share * abs(fmean(began)):
            words = f"from {fmean(began):.4g} to {fmean(now):.4g}"
            return RunEnding("stopped", f"collapsed: the reward in training fell {words}")
    return None


def _may_stop(run: Run) -> bool:
    """The base and the confirmation run to their end: what is compared there must not be selected."""
    return run.arm == "first" and run.experiment != BASE


# ---------------------------------------------------------------------- the study


def next_action(study: Study, state: State, busy: frozenset[str] = frozenset()) -> Action | None:
    """What to do now; ``None``: wait for a run that is ``busy``, or, after the end, nothing."""
    if state.finished is not None:
        return None
    for name in state.open_runs():
        if name not in busy:
            return Run.named(name)
    if BASE not in state.runs:
        return Run(BASE)
    if BASE in busy:
        return None
    base = state.runs[BASE]
    if base.outcome != "done" and state.exhausted is None:
        return Record("exhausted", {"why": f"the base run {base.outcome}: {base.why}"})
    if state.chosen is None:
        return _explore(study, state, bool(busy))
    if not _lacks(study, state, 0):
        for run in confirmation(study, state.chosen):
            if run.name not in state.runs:
                return run
    if busy:
        return None
    for experiment in state.experiments.values():
        if not experiment.verdict:
            verdict, interval, why = judge(study, state, experiment)
            values = {"experiment": experiment.name, "verdict": verdict, "interval": interval, "why": why}
            return Record("verdict", values)
    conclusion = f"kept {', '.join(state.kept)}" if state.kept else "nothing was found that beats the base"
    return Record("finished", {"why": f"{conclusion}; {state.exhausted}"})


def _explore(study: Study, state: State, busy: bool) -> Action | None:
    waiting = [
        experiment.name
        for experiment in state.experiments.values()
        if not experiment.refused and experiment.name not in state.runs
    ]
    if waiting and not _lacks(study, state, study.reserved_runs):
        return Run(waiting[0])
    if state.exhausted is None:
        if why := _explored(study, state):
            return Record("exhausted", {"why": why})
        if study.stop.patience is not None and busy:
            barren, running = _since_the_best(study, state)
            if barren + running >= study.stop.patience:
                return None  # what runs may decide it
        return Propose(f"e{len(state.experiments) + 1}")
    return None if busy else Record("chosen", {"experiments": choose(study, state)})


def _explored(study: Study, state: State) -> str:
    """Why no more experiments are proposed."""
    if lacking := _lacks(study, state, study.reserved_runs):
        return f"the budget for first runs is used: no more {lacking}"
    # a proposer that is always refused must end as well
    if len(state.experiments) >= 3 * study.budget.runs:
        return f"{len(state.experiments)} proposals are enough for this budget"
    tried = [experiment.name for experiment in state.experiments.values() if experiment.name in state.runs]
    if study.stop.experiments is not None and len(tried) >= study.stop.experiments:
        return f"the stop rule: {len(tried)} experiments"
    if study.stop.patience is not None and _since_the_best(study, state)[0] >= study.stop.patience:
        return f"the stop rule: no new best in {study.stop.patience} experiments"
    return ""


def _since_the_best(study: Study, state: State) -> tuple[int, int]:
    """How many first runs have ended since the best one that beats the base, and how many go on."""
    tried = [name for name in state.experiments if name in state.runs]
    over = [name for name in tried if state.runs[name].outcome is not None]
    gains = [interval.mean if (interval := last_gain(study, state, name)) else -math.inf for name in over]
    best = max(range(len(gains)), key=gains.__getitem__, default=-1) if any(gain > 0 for gain in gains) else -1
    return len(over) - 1 - best, len(tried) - len(over)


def _lacks(study: Study, state: State, reserved: int) -> str:
    """What the budget does not have for another run beside ``reserved`` ones: runs, steps or hours; empty if it has
    all. A run is taken to last as long as the longest one that was done."""
    budget, runs, more = study.budget, state.runs.values(), 1 + reserved
    if len(runs) + more > budget.runs:
        return "runs"
    steps = sum(run.lost_steps + study.steps if run.outcome is None else run.steps for run in runs)
    if budget.steps is not None and steps + study.steps * more > budget.steps:
        return "steps"
    longest = max((run.seconds for run in runs if run.outcome == "done"), default=0.0)
    still = sum(max(0.0, longest - run.seconds) for run in runs if run.outcome is None)
    if budget.hours is not None and (
        state.hours >= budget.hours or state.hours + (still + longest * more) / 3600 > budget.hours
    ):
        return "hours"
    return ""


def choose(study: Study, state: State) -> list[str]:
    """The experiments to confirm, the best first: their first run is better than the base's, and not surely by too
    little."""
    gains = {name: last_gain(study, state, name) for name in state.experiments}
    good = {
        name: interval.mean
        for name, interval in gains.items()
        if interval
        and interval.mean > 0
        and interval.high > study.decision.min_effect
        and state.runs[name].outcome == "done"
    }
    return sorted(good, key=good.__getitem__, reverse=True)[: study.decision.winners]


def confirmation(study: Study, chosen: Sequence[str]) -> Iterator[Run]:
    """The runs that confirm ``chosen``, with seeds that no first run had."""
    for seed in range(1, study.decision.seeds + 1):
        if chosen:
            yield Run(BASE, "seed", seed)
        for name in chosen:
            yield Run(name, "seed", seed)
            yield Run(name, "control", seed)


def arm_scores(study: Study, state: State, experiment: str, arm: str) -> list[float]:
    """Final mean scores of the confirmation runs of one arm, by seed."""
    return [fmean(scores) for scores in _arm_tasks(study, state, experiment, arm)]


def _arm_tasks(study: Study, state: State, experiment: str, arm: str) -> list[list[float]]:
    """The same by seed and held-out task."""
    runs = [(Run.named(name), run) for name, run in state.runs.items()]
    return [
        scores
        for run, run_state in sorted(runs, key=lambda pair: pair[0].seed)
        if (run.experiment, run.arm) == (experiment, arm) and (scores := run_state.scores.get(study.steps))
    ]


def judge(study: Study, state: State, experiment: Experiment) -> tuple[str, tuple[float, float] | None, str]:
    """The verdict ``kept``, ``dropped`` or ``inconclusive``, the interval of the gain, and why."""
    name, rule = experiment.name, study.decision
    if experiment.refused:
        return "dropped", None, f"refused: {experiment.refused}"
    first = state.runs.get(name)
    if first is None:
        return "inconclusive", None, "it was not run: the budget is used"
    gained = last_gain(study, state, name)
    interval = (gained.low, gained.high) if gained and math.isfinite(gained.low) else None
    if first.outcome != "done":
        return "dropped", interval, f"{first.outcome}: {first.why}"
    if name not in (state.chosen or ()):
        if gained is not None and gained.high <= rule.min_effect:
            return "dropped", interval, "one seed: not better than the base"
        return "inconclusive", interval, "one seed: not among those that were confirmed"
    runs = [run for run in confirmation(study, [name]) if run.name not in state.runs]
    bad = [run for run in confirmation(study, [name]) if run not in runs and state.runs[run.name].outcome != "done"]
    if own := [run.name for run in bad if (run.experiment, run.arm) == (name, "seed")]:
        return "dropped", interval, f"run {own[0]} {state.runs[own[0]].outcome}: {state.runs[own[0]].why}"
    if runs or bad:
        why = "the budget is used" if runs else state.runs[bad[0].name].why
        return "inconclusive", interval, f"run {(runs or bad)[0].name} is missing: {why}"
    return _confirmed(study, state, name)


def _gain_over(study: Study, state: State, name: str, other: tuple[str, str]) -> Interval:
    """How much better the runs of ``name`` with other seeds are than those of another arm; where seeds make no
    difference, so that Welch's interval has no width, by held-out task."""
    confidence = 1 - (1 - study.decision.confidence) / study.decision.winners
    sign = 1 if study.evaluator.goal == "maximize" else -1
    arms = [(name, "seed"), other]
    ours, theirs = ([sign * score for score in arm_scores(study, state, *arm)] for arm in arms)
    interval = welch_interval(ours, theirs, confidence)
    if not math.isclose(interval.low, interval.high):
        return interval
    by_task = ([sign * fmean(scores) for scores in zip(*_arm_tasks(study, state, *arm), strict=True)] for arm in arms)
    return mean_interval([a - b for a, b in zip(*by_task, strict=True)], confidence)


def _confirmed(study: Study, state: State, name: str) -> tuple[str, tuple[float, float] | None, str]:
    rule = study.decision
    over_base, over_control = (_gain_over(study, state, name, arm) for arm in ((BASE, "seed"), (name, "control")))
    interval = (over_base.low, over_base.high) if math.isfinite(over_base.low) else None
    words = (
        f"{rule.seeds} seeds: gain {over_base.mean:.4g} over the base, {over_control.mean:.4g} over its control with "
        "shuffled rewards"
    )
    if over_base.high <= rule.min_effect:
        return "dropped", interval, words
    if over_base.low > rule.min_effect and over_control.low > 0:
        return "kept", interval, words
    return "inconclusive", interval, words
