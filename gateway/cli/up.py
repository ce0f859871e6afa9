"""``swarm-gateway up``: everything on one machine from one file, told as it happens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.logs import LogFormat


def up(
    config: Annotated[Path, typer.Argument(help="YAML file with the mappings job, swarm and gateway")],
    log_format: LogFormat = "text",
    as_json: Annotated[bool, typer.Option("--json", help="print events as lines of JSON")] = False,
) -> None:
    """Run swarm server, engine and gateway on this machine; one Ctrl-C stops them all."""
    from gateway.cli.events import EventPrinter
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
