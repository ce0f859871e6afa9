"""A report, and several side by side, as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gateway.replay.report import Report

if TYPE_CHECKING:
    from rich.console import Console

_MAX_ROWS = 30


def print_report(report: Report, console: Console, others: Sequence[Report] = ()) -> None:
    """The steps as a table (every k-th of many), then what was sent, what failed and how long it took."""
    from rich.table import Table

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
