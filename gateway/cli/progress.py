"""Progress bars by stage for long commands; on a pipe one line per stage instead."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

#: ``(stage, done, total, unit)``; ``total`` is None where the amount of work is not known.
OnProgress = Callable[[str, int, int | None, str], None]


@contextmanager
def stage_bars(visible: bool = True) -> Generator[OnProgress]:
    """A callback that draws one bar per stage on stderr; nothing at all unless ``visible``."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    live = visible and console.is_terminal
    columns = (TextColumn("{task.description:<12}"), BarColumn(), TextColumn("{task.fields[amount]}"))
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=not live) as progress:

        def on_progress(stage: str, done: int, total: int | None, unit: str) -> None:
            if not visible:
                return
            if stage not in tasks:
                for task in tasks.values():
                    if not progress.tasks[task].finished:
                        progress.update(task, total=1, completed=1)
                tasks[stage] = progress.add_task(stage, total=total, amount="")
                if not live:
                    console.print(f"{stage} ...")
            progress.update(tasks[stage], completed=done, total=total, amount=amount(done, total, unit))

        yield on_progress
        for task in tasks.values():
            if not progress.tasks[task].finished:
                progress.update(task, total=1, completed=1)


def amount(done: int, total: int | None, unit: str) -> str:
    """``"12/93 MB"`` for bytes, ``"12/272 tensors"`` for counts, empty where the total is unknown."""
    if total is None:
        return ""
    if unit == "B":
        return f"{done / 1e6:.0f}/{total / 1e6:.0f} MB"
    return f"{done}/{total} {unit}"
