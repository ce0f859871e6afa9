"""The picture of one or more runs: reward by training step with its evaluations, and below it what else was measured:
successes, tokens of an answer, calls, and what workflows log."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from gateway.reports.report import Curves, StepPoint
from swarm.errors import ConfigError

#: Colours that the colour-blind can tell apart; the first is the run's, the others are for comparison.
COLOURS = ("#0b6e99", "#9a9a9a", "#c7662b", "#5b8c3a")
INK = "#333333"
_STYLE: Any = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"), INK),
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#bbbbbb",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "axes.xmargin": 0.02,
    "legend.frameon": False,
    # labels are users' words
    "text.parse_math": False,
}


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
        raise ConfigError("plots need matplotlib: pip install '.[plots]' in a clone") from exc


@contextmanager
def picture(path: Path, size: tuple[float, float]) -> Generator[Any]:
    """A matplotlib figure of ``size`` inches, written to ``path`` as PNG at the end of the block.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    check_plots()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # a Figure of its own needs no display and none of pyplot's global state
    with rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        figure.savefig(path, dpi=150)


#: Panels below the reward: of calls only where an episode makes several, of what is logged the first ones.
_LOGGED_PANELS = 4


def draw(reports: Sequence[Curves], path: Path) -> None:
    """Write the PNG for ``reports``: first the run, then the reports that it is compared with."""
    panels = _panels(reports)
    below = len(panels) - 1
    with picture(path, (9, 4.4 + 1.6 * below)) as figure:
        axes = figure.subplots(1 + below, 1, sharex=True, squeeze=False, height_ratios=[3, *[1.6] * below])
        for (title, value), [axis] in zip(panels, axes, strict=True):
            axis.set_ylabel(title)
            for report, colour in zip(reports, COLOURS, strict=False):
                line(axis, report.label, _points(report.steps, value), colour)
                evaluated(axis, f"{report.label}, evaluation", _points(report.evaluations, value), colour)
        top = axes[0][0]
        top.set_title(f"Mean reward by training step\n{reports[0].learning(reports[1:])}", fontsize="medium")
        if len(reports) > 1 or any(report.evaluations for report in reports):
            top.legend()
        axes[-1][0].set_xlabel("training step")


def _panels(reports: Sequence[Curves]) -> list[tuple[str, Callable[[StepPoint], float | None]]]:
    points = [point for report in reports for point in (*report.steps, *report.evaluations)]
    panels: list[tuple[str, Callable[[StepPoint], float | None]]] = [("mean reward", lambda point: point.reward_mean)]
    if any(point.success_rate is not None for point in points):
        panels.append(("success rate", lambda point: point.success_rate))
    if any(point.response_tokens is not None for point in points):
        panels.append(("tokens per answer", lambda point: point.response_tokens))
    if any((point.calls or 0) > 1 for point in points):
        panels.append(("calls", lambda point: point.calls))
    names = list(dict.fromkeys(name for point in points for name in point.logged))[:_LOGGED_PANELS]
    return panels + [(name, lambda point, name=name: point.logged.get(name)) for name in names]


def _points(points: Sequence[StepPoint], value: Callable[[StepPoint], float | None]) -> list[tuple[int, float]]:
    return [(point.step, number) for point in points if (number := value(point)) is not None]


def evaluated(axes: Any, label: str, points: Sequence[tuple[int, float]], colour: str) -> None:
    """Draw evaluations: each is exact, so they are joined and not smoothed."""
    if points:
        steps, values = [step for step, _ in points], [value for _, value in points]
        axes.plot(steps, values, "o--", color=colour, markersize=5, linewidth=1.4, label=label)


def line(axes: Any, label: str, points: Sequence[tuple[int, float]], colour: str) -> None:
    """Draw ``points`` (step, value) and their moving average; the x axis marks whole steps."""
    if not points:
        return
    steps, values = [step for step, _ in points], [value for _, value in points]
    axes.plot(steps, values, ".", color=colour, alpha=0.35, markersize=7, markeredgewidth=0)
    axes.plot(steps, smooth(values), "-", color=colour, linewidth=2.2, label=label)
    axes.xaxis.get_major_locator().set_params(integer=True)
