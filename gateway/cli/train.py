"""``swarm-gateway train``: tasks, a workflow and a job from one file, trained on this machine."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Annotated, NoReturn

import typer


def train(
    config: Annotated[
        Path, typer.Argument(help="YAML file: job, workflow, tasks and, if needed, eval, control, swarm")
    ],
    resume: Annotated[bool, typer.Option("--resume", help="go on from the last checkpoint of the run folder")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="a rehearsal: two steps, 4 tasks at each evaluation")] = False,
    report: Annotated[
        Path | None, typer.Option(help="folder for report.json and report.png; default: the run folder")
    ] = None,
    compare: Annotated[
        list[Path] | None, typer.Option(help="earlier report (folder or file) to draw beside this one")
    ] = None,
    label: Annotated[str, typer.Option(help="name of this run in the table and the plot")] = "run",
    as_json: Annotated[
        bool, typer.Option("--json", help="print events as lines of JSON, the last is the report")
    ] = False,
) -> None:
    """Train a workflow on tasks: start server and engine, run, evaluate, report; one Ctrl-C stops everything."""
    from gateway.cli.sections import read_train
    from gateway.cli.up import event_printer
    from gateway.replay.output import print_report, write_report
    from gateway.replay.report import read_report
    from gateway.train import Trainer, rehearsal, resumed
    from gateway.up import run_up
    from gateway.watch import UpFailedError
    from swarm.errors import ConfigError

    others = [read_report(path) for path in compare or []]
    plan = read_train(config)
    if quick:
        plan = rehearsal(plan)
    if resume:
        plan = resumed(plan)
    failed = False
    with event_printer(as_json) as on_event:
        work = Trainer(plan, on_event, label)
        try:
            run_up(plan.up, on_event, work)
        except UpFailedError as exc:
            on_event("failed", {"message": exc.message, "last_lines": exc.last_lines, "log": str(exc.log)})
            failed = True
        if work.report is not None:
            on_event("report", work.report.model_dump(mode="json"))
    if work.report is not None:
        folder = report or plan.server.run_dir
        try:
            write_report(work.report, folder, others)
        except ConfigError as exc:
            # the numbers are printed below in any case
            typer.echo(f"swarm-gateway: {exc.message}", err=True)
        if not as_json:
            print_report(work.report, others)
            typer.echo(f"report: {folder}")
    if failed:
        _leave(1)
    if work.report is None or work.report.interrupted:
        _leave(130)


def _leave(code: int) -> NoReturn:
    """End the process with ``code``, even while a workflow that was given up runs on: nothing ends a thread."""
    others = [one for one in threading.enumerate() if not one.daemon and one is not threading.current_thread()]
    if others:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise typer.Exit(code)
