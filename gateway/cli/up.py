"""``swarm-gateway up``: everything on one machine from one file; its events as lines for people or as JSON lines."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from gateway.cli.serve import LogFormat

if TYPE_CHECKING:
    from rich.progress import Progress

#: Lines shown of a dead engine's output.
_TAIL_LINES = 5


def up(
    config: Annotated[Path, typer.Argument(help="YAML file with the mappings job, swarm and gateway")],
    log_format: LogFormat = "text",
    as_json: Annotated[bool, typer.Option("--json", help="print events as lines of JSON")] = False,
) -> None:
    """Run swarm server, engine and gateway on this machine; one Ctrl-C stops them all."""
    from gateway.cli.sections import read_plan
    from gateway.up import run_up
    from gateway.watch import UpFailedError

    plan = replace(read_plan(config), log_format=log_format)
    with EventPrinter(as_json) as on_event:
        try:
            run_up(plan, on_event)
        except UpFailedError as exc:
            on_event("failed", {"message": exc.message, "last_lines": exc.last_lines, "log": str(exc.log)})
            raise typer.Exit(1) from None


class EventPrinter:
    """Called with each event; a context, because the spinner must leave the terminal as it was."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._began = time.monotonic()
        self._urls: dict[str, str] = {}
        self._spinner: Progress | None = None

    def __enter__(self) -> Self:
        if not self._as_json:
            from rich.console import Console
            from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            console = Console(highlight=False, soft_wrap=True)
            self._print = console.print
            if console.is_terminal:
                columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
                self._spinner = Progress(*columns, console=console, transient=True)
                self._spinner.add_task("starting", total=None)
                self._spinner.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._spinner:
            self._spinner.stop()

    def __call__(self, kind: str, values: dict[str, Any]) -> None:
        if self._as_json:
            from gateway.cli.output import print_json

            print_json({"event": kind, "at": round(time.monotonic() - self._began, 1), **values})
            return
        if kind == "listening":
            self._urls[values["name"]] = values["url"]
        line = self.line(kind, values)
        if line:
            # markup off: a log line with [brackets] is text
            self._print(f"{time.monotonic() - self._began:7.1f} s  {line}", markup=False)
        doing = self.doing(kind, values)
        if self._spinner and doing:
            (task,) = self._spinner.task_ids
            # a new state counts its own time; the stages of a boot share one count
            if kind == "state":
                self._spinner.reset(task, description=doing)
            else:
                self._spinner.update(task, description=doing)

    def line(self, kind: str, values: dict[str, Any]) -> str:
        """What people read of an event; empty for one that only the spinner shows."""
        match kind:
            case "listening":
                return f"{values['name']}: {values['url']}   (log: {values['log']})"
            case "starting":
                return f"engine: booting with {values['model']}   (log: {values['log']})"
            case "config":
                return f"engine: configuration as it runs: {values['path']}"
            case "continued":
                return f"engine: continues the run of this folder after step {values['step']}"
            case "warning":
                return f"WARNING: {values['message']}"
            case "boot":
                return f"engine: {values['detail'] or values['stage']}"
            case "ready":
                return (
                    f"ready after {values['seconds']:.0f} s: point your app at {self._urls.get('gateway', '')}/v1 "
                    f"(model {values['model']}); Ctrl-C stops everything"
                )
            case "restarting":
                tail = "".join(f"\n           | {line}" for line in values["last_lines"][-_TAIL_LINES:])
                return (
                    f"engine: DIED: {values['reason']}{tail}\n           starting it again in "
                    f"{values['in_seconds']:.0f} s ({values['attempt']} of {values['of']}); the gateway stays"
                )
            case "recovered":
                whence = (
                    f"the checkpoint of step {values['step']}"
                    if values["step"]
                    else "the job's model: there is no checkpoint (see job.save_freq)"
                )
                return f"engine: serves again after {values['seconds']:.0f} s; training goes on from {whence}"
            case "engine_stopped":
                return f"engine: {values['reason']}; not a crash, so it is left to whoever starts it"
            case "step":
                from gateway.tui.format import step_line
                from swarm.types import StepResult

                return step_line(StepResult.model_validate(values))
            case "finished":
                return f"the job is done after step {values['step']}"
            case "stopping":
                return f"stopping the {values['name']}"
            case "stopped":
                return "all stopped"
            case "failed":
                tail = "".join(f"\n           | {line}" for line in values["last_lines"])
                return f"FAILED: {values['message']}{tail}\n           full log: {values['log']}"
            case _:
                return ""

    @staticmethod
    def doing(kind: str, values: dict[str, Any]) -> str:
        """What the spinner says after an event; empty: as before."""
        match kind:
            case "boot":
                return f"booting: {values['detail'] or values['stage']}"
            case "state":
                return f"{values['state']} {values['detail']}"
            case "stopping":
                return f"stopping the {values['name']}"
            case _:
                return ""
