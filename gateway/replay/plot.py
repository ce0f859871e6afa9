"""The picture of one or more replays: reward by training step, and below it the tokens of an answer."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from gateway.replay.report import Report
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
        raise ConfigError("plots need matplotlib: pip install 'swarm-gateway[plots]'") from exc


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


def draw(reports: Sequence[Report], path: Path) -> None:
    """Write the PNG for ``reports``: first the run, then the reports that it is compared with."""
    with_tokens = any(point.response_tokens is not None for report in reports for point in report.steps)
    with picture(path, (9, 6.4 if with_tokens else 4.4)) as figure:
        if with_tokens:
            top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1.6])
            bottom.set_ylabel("tokens per answer")
        else:
            top = bottom = figure.subplots()
        for report, colour in zip(reports, COLOURS, strict=False):
            line(top, report.label, [(point.step, point.reward_mean) for point in report.steps], colour)
            if with_tokens:
                tokens = [(p.step, p.response_tokens) for p in report.steps if p.response_tokens is not None]
                line(bottom, report.label, tokens, colour)
                bottom.set_ylim(bottom=0)
        first, last = reports[0].mean_of_first(), reports[0].mean_of_last()
        change = "" if first is None or last is None else f":  {first:.2f} → {last:.2f}"
        top.set_title(f"Mean reward by training step{change}")
        top.set_ylabel("mean reward")
        if len(reports) > 1:
            top.legend()
        bottom.set_xlabel("training step")


def line(axes: Any, label: str, points: Sequence[tuple[int, float]], colour: str) -> None:
    """Draw ``points`` (step, value) and their moving average; the x axis marks whole steps."""
    if not points:
        return
    steps, values = [step for step, _ in points], [value for _, value in points]
    axes.plot(steps, values, ".", color=colour, alpha=0.35, markersize=7, markeredgewidth=0)
    axes.plot(steps, smooth(values), "-", color=colour, linewidth=2.2, label=label)
    axes.xaxis.get_major_locator().set_params(integer=True)
