"""What a study found: Markdown with all experiments, the failed and refused ones too, and its summary as JSON.

Invariant: every number comes from the ledger, and a claim stands beside its interval and its control.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

from swarm.intervals import mean_interval
from swarm.research.decisions import arm_scores, last_gain
from swarm.research.ledger import BASE, Experiment, RunState, State, words_of
from swarm.research.study import Study


def summary(study: Study, state: State) -> dict[str, Any]:
    """Where the study is, in JSON's types."""
    return {
        "study": state.study,
        "question": study.question,
        "phase": phase(state),
        "why": state.finished or state.exhausted or "",
        "runs": {"used": len(state.runs), "of": study.budget.runs},
        "steps": {"used": sum(run.steps for run in state.runs.values()), "of": study.budget.steps},
        "hours": {"used": round(state.hours, 4), "of": study.budget.hours},
        "running": {
            name: {"server": state.runs[name].server, "step": _last(state.runs[name])} for name in state.open_runs()
        },
        "experiments": {
            experiment.name: {
                "hypothesis": experiment.hypothesis,
                "set": experiment.delta,
                "code": experiment.code,
                "refused": experiment.refused,
                "outcome": state.runs[experiment.name].outcome if experiment.name in state.runs else None,
                "verdict": experiment.verdict,
                "interval": experiment.interval,
                "why": experiment.why,
            }
            for experiment in state.experiments.values()
        },
        "kept": state.kept,
    }


def phase(state: State) -> str:
    """What the study does."""
    if not state.study:
        return "not begun"
    if state.finished is not None:
        return "finished"
    return "exploring" if state.chosen is None else "confirming"


def markdown(study: Study, state: State, picture: str = "") -> str:
    """The report; ``picture`` is the path of its plot."""
    numbers = summary(study, state)
    rule = study.decision
    lines = [
        f"# {study.question}",
        "",
        f"**{_answer(state)}**",
        "",
        f"Study `{state.study}`, {numbers['phase']}: {numbers['runs']['used']} of {numbers['runs']['of']} runs, "
        f"{numbers['steps']['used']} training steps, {state.hours:.2f} engine hours. {numbers['why']}".rstrip()
        + ".",
        "",
        f"- Metric: `{study.evaluator.metric}` of `{study.evaluator.workflow}` on `{study.evaluator.tasks}`, "
        f"{study.evaluator.samples} per task, to {study.evaluator.goal}; locked, SHA-256 "
        f"`{state.locked[:16]}`.",
        f"- Code: SHA-256 `{state.code[:16]}`, commit `{state.revision or 'none'}`.",
        f"- Decision, declared before the first run: kept if over {rule.seeds} seeds the {100 * rule.confidence:g}% "
        f"Welch interval of the gain lies above {rule.min_effect:g}, and above the shuffled-reward control"
        + (f" (each of {rule.winners} winners by Bonferroni's bound)." if rule.winners > 1 else "."),
        *(["- **Control study: every run had permuted rewards.**"] if study.control == "shuffle" else []),
        "",
        *([f"![scores by training step]({picture})", ""] if picture else []),
        "## Experiments",
        "",
        *_table(
            ("experiment", "change", "first run", "score", "gain over the base", "verdict", "why"),
            (BASE, "the base job", *_first_run(state, BASE), "", "", ""),
            *(
                (
                    experiment.name,
                    _change(experiment),
                    *_first_run(state, experiment.name),
                    _gain(study, state, experiment),
                    experiment.verdict,
                    experiment.why,
                )
                for experiment in state.experiments.values()
            ),
        ),
        *_confirmation(study, state),
        "## Runs",
        "",
        *_table(
            ("run", "server", "attempts", "outcome", "scores by step", "why"),
            *(
                (
                    name,
                    run.server,
                    run.attempt,
                    run.outcome or "runs",
                    ", ".join(f"{step}: {score:.4g}" for step, score in run.means.items()),
                    run.why,
                )
                for name, run in state.runs.items()
            ),
        ),
    ]
    for experiment in state.experiments.values():
        if experiment.patch:
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", experiment.patch)), default=0))
            lines += [f"### Patch of {experiment.name}", "", _cell(experiment.hypothesis), ""]
            lines += [f"{fence}diff", experiment.patch.rstrip("\n"), fence, ""]
    return "\n".join(lines) + f"\nWritten {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}.\n"


def _answer(state: State) -> str:
    if state.finished is None:
        return "The study is not over; there is no result yet."
    base = state.runs.get(BASE)
    if base is None or base.outcome != "done":
        return f"There is no result: the base run {base.outcome}: {base.why}." if base else "There is no result."
    if not (names := state.kept):
        return "Nothing was found that beats the base job."
    return "; ".join(
        f"{name} beats the base job ({_change(state.experiments[name])}): {state.experiments[name].why}"
        for name in names
    )


def _confirmation(study: Study, state: State) -> list[str]:
    arms = [(name, arm) for name in state.chosen or () for arm in ("seed", "control")]
    rows: list[tuple[str, ...]] = []
    for experiment, arm in [(BASE, "seed"), *arms] if arms else ():
        if scores := arm_scores(study, state, experiment, arm):
            interval = mean_interval(scores, study.decision.confidence)
            name = f"{experiment}, shuffled rewards" if arm == "control" else experiment
            each = ", ".join(f"{score:.4g}" for score in scores)
            rows.append((name, each, f"{interval.mean:.4g}", f"[{interval.low:.4g}, {interval.high:.4g}]"))
    head = ("arm", "scores by seed", "mean", "interval (Student)")
    return ["## Confirmation", "", *_table(head, *rows)] if rows else []


def _first_run(state: State, name: str) -> tuple[str, str]:
    """Its outcome and its last score."""
    if (run := state.runs.get(name)) is None:
        return "not run", ""
    means = run.means
    return run.outcome or f"runs, step {_last(run)}", f"{means[_last(run)]:.4g}" if means else ""


def _gain(study: Study, state: State, experiment: Experiment) -> str:
    if experiment.interval is not None:
        return "[{:+.4g}, {:+.4g}]".format(*experiment.interval)
    interval = last_gain(study, state, experiment.name)
    return "" if interval is None else f"{interval.mean:+.4g}"


def _change(experiment: Experiment) -> str:
    return ", ".join([*words_of(experiment.delta), *(["a patch"] if experiment.patch else [])])


def _last(run: RunState) -> int:
    return max(run.scores, default=0)


def _table(*rows: Sequence[object]) -> list[str]:
    """A table of Markdown, whose first row is its head."""
    head, *rest = ["| " + " | ".join(map(_cell, row)) + " |" for row in rows]
    return [head, "|---" * len(rows[0]) + "|", *rest, ""]


def _cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")
