"""Output of a replay: progress on stderr (a bar on a terminal, a line per training step on a pipe), and its report."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.bar import Bar
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from gateway.replay.plot import draw
from gateway.replay.report import PLOT_FILE, REPORT_FILE, Report
from gateway.replay.run import Progress
from swarm.errors import ConfigError

#: Rows of the table of steps.
_MAX_ROWS = 30


@contextmanager
def replay_bar(visible: bool = True) -> Generator[Callable[[Progress], None]]:
    """A callback that draws progress on stderr; nothing at all unless ``visible``."""
    console = Console(stderr=True, highlight=False)
    began, printed = time.monotonic(), 0
    columns = (
        SpinnerColumn(),
        TimeElapsedColumn(),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
    )
    with Bars(*columns, console=console, disable=not (visible and console.is_terminal)) as bars:
        task = bars.add_task("", total=None)

        def show(progress: Progress) -> None:
            nonlocal printed
            line = describe(progress, time.monotonic() - began)
            bars.update(task, completed=len(progress.outcomes), total=progress.total, description=line)
            if visible and bars.disable and progress.step > printed:
                printed = progress.step
                console.print(f"{len(progress.outcomes)} requests  {line}", markup=False)

        yield show


def describe(progress: Progress, seconds: float) -> str:
    """One line: rate, failures, step and reward."""
    done = len(progress.outcomes)
    parts = [f"{60 * done / seconds:.0f}/min" if seconds > 1 else ""]
    failed = sum(1 for outcome in progress.outcomes if outcome.failure)
    parts.append(f"{failed} failed" if failed else "")
    parts.append(f"step {progress.step}" if progress.steps else "")
    parts.append("" if progress.reward is None else f"reward {progress.reward:.3f}")
    parts.append(progress.engine.lower().replace("_", " "))
    return "  ".join(filter(None, parts))


def print_report(report: Report, others: Sequence[Report] = (), console: Console | None = None) -> None:
    """Print the steps as a table (every k-th of many), then the requests, the latency and the failures.

    Args:
        report: of the run.
        others: their rewards stand beside it.
        console: default: stdout.
    """
    console = console or Console(highlight=False)
    if report.steps:
        table = Table(box=None, header_style="bold", pad_edge=False)
        for column in ("step", "reward", "", "tokens/answer", "s/step", *(other.label for other in others)):
            table.add_column(column, justify="left" if column == "" else "right")
        beside = [{point.step: point.reward_mean for point in other.steps} for other in others]
        stride = max(1, -(-len(report.steps) // _MAX_ROWS))
        shown = [p for i, p in enumerate(report.steps) if i % stride == 0 or i == len(report.steps) - 1]
        low, high = min(0.0, *(p.reward_mean for p in shown)), max(1.0, *(p.reward_mean for p in shown))
        for point in shown:
            table.add_row(
                str(point.step),
                f"{point.reward_mean:.3f}",
                Bar(high - low, 0, point.reward_mean - low, width=24),
                _number(point.response_tokens, ".0f"),
                _number(point.seconds, ".1f"),
                *(_number(rewards.get(point.step), ".3f") for rewards in beside),
            )
        console.print(table)
    for line in summary(report):
        console.print(line, markup=False)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def summary(report: Report) -> list[str]:
    """Requests, latency, failures and the change of the reward, a line each."""
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


def write_report(report: Report, folder: Path, others: Sequence[Report] = ()) -> None:
    """Write ``report.json`` and, if there are steps, ``report.png`` to ``folder``, with ``others`` for comparison.

    Raises:
        ConfigError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / REPORT_FILE).write_text(report.model_dump_json(indent=1) + "\n")
        if report.steps:
            draw([report, *others], folder / PLOT_FILE)
    except OSError as exc:
        raise ConfigError(f"cannot write the report to {folder}: {exc.strerror or exc}") from exc
