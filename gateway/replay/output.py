"""Output of a replay: progress on stderr (a bar on a terminal, a line per training step on a pipe), and its report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from gateway.replay.report import Report
from gateway.replay.run import Progress

#: Rows of the table of steps.
_MAX_ROWS = 30


class ReplayBar:
    """Shows a :class:`Progress`; its report may be printed to ``console`` (stdout) afterwards."""

    def __init__(self, visible: bool) -> None:
        self.console = Console(highlight=False)
        self._visible = visible
        self._began = time.monotonic()
        self._printed_step = 0
        errors = Console(stderr=True, highlight=False)
        self._live = visible and errors.is_terminal
        self._bars = Bars(
            SpinnerColumn(),
            TimeElapsedColumn(),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            console=errors,
            disable=not self._live,
        )
        self._task = self._bars.add_task("", total=None)
        self._errors = errors

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._bars.stop()

    def __call__(self, progress: Progress) -> None:
        line = describe(progress, time.monotonic() - self._began)
        self._bars.update(self._task, completed=len(progress.outcomes), total=progress.total, description=line)
        if self._visible and not self._live and progress.step > self._printed_step:
            self._printed_step = progress.step
            self._errors.print(f"{len(progress.outcomes)} requests  {line}", markup=False)


def describe(progress: Progress, seconds: float) -> str:
    """Rate, failures, step and reward in a few words."""
    done = len(progress.outcomes)
    parts = [f"{60 * done / seconds:.0f}/min" if seconds > 1 else ""]
    failed = sum(1 for outcome in progress.outcomes if outcome.failure)
    parts.append(f"{failed} failed" if failed else "")
    parts.append(f"step {progress.step}" if progress.steps else "")
    parts.append("" if progress.reward is None else f"reward {progress.reward:.3f}")
    parts.append(progress.engine.lower().replace("_", " "))
    return "  ".join(filter(None, parts))


def print_report(report: Report, console: Console, others: Sequence[Report] = ()) -> None:
    """The steps as a table (every k-th of many), then what was sent, what failed and how long it took."""
    if report.steps:
        table = Table(box=None, header_style="bold", pad_edge=False)
        for column in ("step", "reward", "", "tokens/answer", "s/step", *(other.label for other in others)):
            table.add_column(column, justify="left" if column == "" else "right")
        beside = [{point.step: point.reward_mean for point in other.steps} for other in others]
        stride = max(1, -(-len(report.steps) // _MAX_ROWS))
        shown = [p for i, p in enumerate(report.steps) if i % stride == 0 or i == len(report.steps) - 1]
        low, high = min(p.reward_mean for p in shown), max(p.reward_mean for p in shown)
        for point in shown:
            table.add_row(
                str(point.step),
                f"{point.reward_mean:.3f}",
                bar(point.reward_mean, min(0.0, low), max(1.0, high)),
                _number(point.response_tokens, ".0f"),
                _number(point.seconds, ".1f"),
                *(_number(rewards.get(point.step), ".3f") for rewards in beside),
            )
        console.print(table)
    for line in summary(report):
        console.print(line, markup=False)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def bar(value: float, low: float, high: float, width: int = 24) -> str:
    """A bar whose length is where ``value`` lies between ``low`` and ``high``."""
    return "█" * round(width * (value - low) / (high - low)) if high > low else ""


def summary(report: Report) -> list[str]:
    """The report in a few lines."""
    lines = [
        f"{report.requests} requests in {report.seconds:.0f} s: {report.answered} answered, {report.failed} failed, "
        f"{report.cancelled} cancelled ({report.stopped_because})"
    ]
    if report.latency:
        lines.append(f"latency: p50 {report.latency.p50:.2f} s, p95 {report.latency.p95:.2f} s")
    lines += [f"  {one.count} x {kind}: {one.example}" for kind, one in report.failures.items()]
    first, last = report.mean_of_first(), report.mean_of_last()
    if first is not None and last is not None and len(report.steps) > 1:
        edge = f"first {report.edge} of {len(report.steps)} steps"
        lines.append(f"mean reward: {edge} {first:.3f}, last {report.edge} {last:.3f} ({last - first:+.3f})")
    return lines
