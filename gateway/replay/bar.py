"""The progress of a replay on stderr: a bar on a terminal, a line per training step on a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from gateway.replay.run import ReplayProgress
from swarm.progress import reward, step_line


@contextmanager
def replay_bar(visible: bool = True) -> Generator[Callable[[ReplayProgress], None]]:
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
    with Bars(*columns, console=console, disable=not (visible and console.file.isatty())) as bars:
        task = bars.add_task("", total=None)

        def show(progress: ReplayProgress) -> None:
            nonlocal printed
            line = describe(progress, time.monotonic() - began)
            bars.update(task, completed=len(progress.outcomes), total=progress.total, description=line)
            if visible and bars.disable and progress.step > printed:
                # whoever reads is gone, or the disk of a log is full: that costs no report. Not rich, which ends the
                # process then
                with suppress(OSError):
                    for number in sorted(step for step in progress.steps if step > printed):
                        print(step_line(progress.steps[number]), file=sys.stderr)
                printed = progress.step

        yield show


def describe(progress: ReplayProgress, seconds: float) -> str:
    """One line: rate, failures, step and reward."""
    done = len(progress.outcomes)
    parts = [f"{60 * done / seconds:.0f}/min" if seconds > 1 else ""]
    failed = sum(1 for outcome in progress.outcomes if outcome.failure)
    parts.append(f"{failed} failed" if failed else "")
    without = sum(outcome.untrained.endswith("hook_failed") for outcome in progress.outcomes)
    parts.append(f"the hook failed on {without}" if without else "")
    if progress.steps:
        parts.append(step_line(progress.steps[max(progress.steps)]))
    elif progress.reward is not None:
        parts.append(f"reward {reward(progress.reward)}")
    parts.append(progress.batch)
    return "  ".join(filter(None, parts))
