"""The picture of a study: rewards by training step, and held-out scores with their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gateway.reports.plot import COLOURS, INK, line, picture
from gateway.reports.report import Report
from study.held_out import HeldOutScore


def draw_experiment(reports: Sequence[Report], scores: Sequence[HeldOutScore], path: Path) -> None:
    """Write the PNG of an experiment.

    Args:
        reports: the run first, then its control.
        scores: of the base model, then of the run and its control, in the order of ``reports``.
        path: of the PNG.
    """
    with picture(path, (9, 4)) as figure:
        left, right = figure.subplots(1, 2, width_ratios=[3, 2])
        for report, colour in zip(reports, COLOURS, strict=False):
            line(left, report.label, [(point.step, point.reward_mean) for point in report.steps], colour)
        left.set_title("Mean reward by training step")
        left.set_xlabel("training step")
        left.set_ylim(0, 1)
        left.legend()
        for place, (score, colour) in enumerate(zip(scores, (INK, *COLOURS), strict=False)):
            ends = [[score.mean - score.low], [score.high - score.mean]]
            right.errorbar([place], [score.mean], yerr=ends, fmt="o", color=colour, capsize=5, linewidth=2)
            mean = f"{score.mean:.3f}"
            right.annotate(mean, (place, score.mean), xytext=(9, 0), textcoords="offset points", va="center")
        right.set_title("Held-out score, 95 % interval")
        right.set_xticks(range(len(scores)), [score.label for score in scores])
        right.set_xlim(-0.5, len(scores) - 0.3)
        right.set_ylim(0, 1)
