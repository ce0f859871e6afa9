"""How a replay goes, on stderr: a bar on a terminal, a line per training step on a pipe."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from gateway.replay.run import Progress


class ReplayBar:
    """Shows a :class:`Progress`; ``console`` is where its report may be printed afterwards (stdout)."""

    def __init__(self, visible: bool) -> None:
        self.console = Console(highlight=False)
        self._visible = visible
        self._began = time.monotonic()
        self._told_step = 0
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
        if self._visible and not self._live and progress.step > self._told_step:
            self._told_step = progress.step
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
