"""The picture of one or more replays: reward by training step, and below it the tokens of an answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gateway.replay.held_out import HeldOutScore
from gateway.replay.report import Report

# colours that stay apart for the colour-blind; the first is the run, the rest are what it is compared with
_COLOURS = ("#0b6e99", "#9a9a9a", "#c7662b", "#5b8c3a")
_INK = "#333333"


def smooth(values: Sequence[float]) -> list[float]:
    """Centred moving average over about a sixth of the values (at least three), narrower towards the ends."""
    half = max(1, len(values) // 12)
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def draw(reports: Sequence[Report], path: Path) -> None:
    """Write the PNG for ``reports``, the first of which is the run and the others its comparison."""
    # the object interface keeps pyplot's global state, and any display, out of it
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with_tokens = any(point.response_tokens is not None for report in reports for point in report.steps)
    figure = Figure(figsize=(9, 6.4 if with_tokens else 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    if with_tokens:
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1.6])
    else:
        top, bottom = figure.subplots(), None
    for report, colour in zip(reports, _COLOURS, strict=False):
        _line(top, report.label, [(point.step, point.reward_mean) for point in report.steps], colour)
        if bottom is not None:
            tokens = [(p.step, p.response_tokens) for p in report.steps if p.response_tokens is not None]
            _line(bottom, report.label, tokens, colour)
    first, last = reports[0].mean_of_first(), reports[0].mean_of_last()
    title = "Mean reward by training step"
    if first is not None and last is not None:
        title += f":  {first:.2f} → {last:.2f}"
    top.set_title(title, loc="left", fontsize=13, fontweight="bold", color=_INK)
    top.set_ylabel("mean reward", color=_INK)
    if len(reports) > 1:
        top.legend(frameon=False, loc="best")
    if bottom is not None:
        bottom.set_ylabel("tokens per answer", color=_INK)
        bottom.set_ylim(bottom=0)
    (bottom or top).set_xlabel("training step", color=_INK)
    for axes in filter(None, (top, bottom)):
        _tidy(axes)
        _whole_steps(axes)
    figure.savefig(path, dpi=150)


def draw_experiment(reports: Sequence[Report], scores: Sequence[HeldOutScore], path: Path) -> None:
    """Write the PNG of an experiment: reward by training step, and the held-out scores with their intervals.

    Args:
        reports: the run first, then its control.
        scores: of the base model, of the run and of its control; those that were trained in order of their reports.
        path: of the PNG.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    for report, colour in zip(reports, _COLOURS, strict=False):
        _line(left, report.label, [(point.step, point.reward_mean) for point in report.steps], colour)
    left.set_title("Mean reward by training step", loc="left", fontsize=12, fontweight="bold", color=_INK)
    left.set_xlabel("training step", color=_INK)
    left.legend(frameon=False, loc="best")
    for place, (score, colour) in enumerate(zip(scores, (_INK, *_COLOURS), strict=False)):
        ends = [[score.mean - score.low], [score.high - score.mean]]
        right.errorbar([place], [score.mean], yerr=ends, fmt="o", color=colour, capsize=5, markersize=7, linewidth=2)
        right.annotate(f"{score.mean:.3f}", (place, score.mean), xytext=(9, 0), textcoords="offset points", va="center")
    right.set_title("Held-out score, 95 % interval", loc="left", fontsize=12, fontweight="bold", color=_INK)
    right.set_xticks(range(len(scores)), [score.label for score in scores])
    for axes in (left, right):
        axes.set_ylim(0, 1)
        _tidy(axes)
    _whole_steps(left)
    right.set_xlim(-0.5, len(scores) - 0.3)
    figure.savefig(path, dpi=110)


def _line(axes: Any, label: str, points: Sequence[tuple[int, float]], colour: str) -> None:
    if not points:
        return
    steps, values = [step for step, _ in points], [value for _, value in points]
    axes.plot(steps, values, ".", color=colour, alpha=0.35, markersize=7, markeredgewidth=0)
    axes.plot(steps, smooth(values), "-", color=colour, linewidth=2.2, label=label)


def _tidy(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#bbbbbb")
    axes.tick_params(colors=_INK)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.02)


def _whole_steps(axes: Any) -> None:
    low, high = axes.get_xlim()
    if math.ceil(high) - math.floor(low) <= 12:
        axes.xaxis.get_major_locator().set_params(integer=True)
