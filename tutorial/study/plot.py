"""The picture of a study: rewards by training step, and held-out scores with their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gateway.replay import Report
from gateway.replay.plot import COLOURS, INK, line, new_figure, tidy, whole_steps
from study.held_out import HeldOutScore


def draw_experiment(reports: Sequence[Report], scores: Sequence[HeldOutScore], path: Path) -> None:
    """Write the PNG of an experiment: reward by training step, and the held-out scores with their intervals.

    Args:
        reports: the run first, then its control.
        scores: of the base model, of the run and of its control; those that were trained in order of their reports.
        path: of the PNG.
    """
    figure = new_figure((9, 4))
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    for report, colour in zip(reports, COLOURS, strict=False):
        line(left, report.label, [(point.step, point.reward_mean) for point in report.steps], colour)
    left.set_title("Mean reward by training step", loc="left", fontsize=12, fontweight="bold", color=INK)
    left.set_xlabel("training step", color=INK)
    left.legend(frameon=False, loc="best")
    for place, (score, colour) in enumerate(zip(scores, (INK, *COLOURS), strict=False)):
        ends = [[score.mean - score.low], [score.high - score.mean]]
        right.errorbar([place], [score.mean], yerr=ends, fmt="o", color=colour, capsize=5, markersize=7, linewidth=2)
        right.annotate(f"{score.mean:.3f}", (place, score.mean), xytext=(9, 0), textcoords="offset points", va="center")
    right.set_title("Held-out score, 95 % interval", loc="left", fontsize=12, fontweight="bold", color=INK)
    right.set_xticks(range(len(scores)), [score.label for score in scores])
    for axes in (left, right):
        axes.set_ylim(0, 1)
        tidy(axes)
    whole_steps(left)
    right.set_xlim(-0.5, len(scores) - 0.3)
    figure.savefig(path, dpi=110)
