"""The picture of one or more replays: reward by training step, and below it the tokens of an answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from gateway.replay.report import Report
from swarm.errors import ConfigError

# colours that stay apart for the colour-blind; the first is the run, the rest are what it is compared with
COLOURS = ("#0b6e99", "#9a9a9a", "#c7662b", "#5b8c3a")
INK = "#333333"


def smooth(values: Sequence[float]) -> list[float]:
    """Centred moving average over about a sixth of the values (at least three), narrower towards the ends."""
    half = max(1, len(values) // 12)
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def check_plots() -> None:
    """Raise :class:`ConfigError` unless matplotlib is installed."""
    try:
        import_module("matplotlib.figure")
    except ImportError as exc:
        raise ConfigError("plots need matplotlib: pip install 'swarm-gateway[plots]'") from exc


def new_figure(size: tuple[float, float]) -> Any:
    """An empty matplotlib figure of ``size`` inches.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    check_plots()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # the object interface keeps pyplot's global state, and any display, out of it
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw(reports: Sequence[Report], path: Path) -> None:
    """Write the PNG for ``reports``, the first of which is the run and the others its comparison."""
    with_tokens = any(point.response_tokens is not None for report in reports for point in report.steps)
    figure = new_figure((9, 6.4 if with_tokens else 4.4))
    if with_tokens:
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1.6])
    else:
        top, bottom = figure.subplots(), None
    for report, colour in zip(reports, COLOURS, strict=False):
        line(top, report.label, [(point.step, point.reward_mean) for point in report.steps], colour)
        if bottom is not None:
            tokens = [(p.step, p.response_tokens) for p in report.steps if p.response_tokens is not None]
            line(bottom, report.label, tokens, colour)
    first, last = reports[0].mean_of_first(), reports[0].mean_of_last()
    title = "Mean reward by training step"
    if first is not None and last is not None:
        title += f":  {first:.2f} → {last:.2f}"
    top.set_title(title, loc="left", fontsize=13, fontweight="bold", color=INK)
    top.set_ylabel("mean reward", color=INK)
    if len(reports) > 1:
        top.legend(frameon=False, loc="best")
    if bottom is not None:
        bottom.set_ylabel("tokens per answer", color=INK)
        bottom.set_ylim(bottom=0)
    (bottom or top).set_xlabel("training step", color=INK)
    for axes in filter(None, (top, bottom)):
        tidy(axes)
        whole_steps(axes)
    figure.savefig(path, dpi=150)


def line(axes: Any, label: str, points: Sequence[tuple[int, float]], colour: str) -> None:
    """Draw ``points`` (step, value) and their moving average."""
    if not points:
        return
    steps, values = [step for step, _ in points], [value for _, value in points]
    axes.plot(steps, values, ".", color=colour, alpha=0.35, markersize=7, markeredgewidth=0)
    axes.plot(steps, smooth(values), "-", color=colour, linewidth=2.2, label=label)


def tidy(axes: Any) -> None:
    """Take away from ``axes`` what carries no information."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#bbbbbb")
    axes.tick_params(colors=INK)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.02)


def whole_steps(axes: Any) -> None:
    """Mark whole steps only."""
    low, high = axes.get_xlim()
    if math.ceil(high) - math.floor(low) <= 12:
        axes.xaxis.get_major_locator().set_params(integer=True)
