"""``swarm-gateway hooks``: try a reward hook before a model learns from it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Try reward hooks on recorded groups.", no_args_is_help=True)


@app.callback()
def hooks() -> None:
    """Keeps ``test`` a command of its own: a group with one command would take its place."""


@app.command("test")
def test_hooks(
    folder: Annotated[str, typer.Argument(help="hook folder, blend file, name, or module:attribute")],
    data: Annotated[Path, typer.Option("--data", "-d", help="jsonl file of groups: prompt, candidates, perhaps rank")],
    against: Annotated[str | None, typer.Option(help="another hook to compare the orders with")] = None,
    shuffles: Annotated[
        int, typer.Option(min=0, max=20, help="further scorings per group in shuffled order, for the flip rate")
    ] = 1,
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="groups at once")] = 8,
    timeout: Annotated[float, typer.Option(min=0.001, help="seconds one call of a hook may take")] = 60.0,
    limit: Annotated[int | None, typer.Option(min=1, help="only the first groups of the file")] = None,
    show: Annotated[int, typer.Option(min=0, help="groups to print in full")] = 5,
    seed: Annotated[int, typer.Option(help="of the shuffled orders")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print the report as JSON, no progress bar")] = False,
) -> None:
    """Rank recorded answers offline: ranking with reasons, Kendall's tau, order-flip rate, cost and time."""
    from gateway.cli.hook_report import print_hook_report, try_hooks
    from gateway.cli.output import print_json, stage_bars
    from reward_hooks.offline import OfflineConfig

    config = OfflineConfig(shuffles=shuffles, concurrency=concurrency, timeout=timeout, seed=seed)
    with stage_bars(visible=not as_json) as on_progress:
        report = try_hooks(folder, data, against, config, limit, on_progress)
    if as_json:
        print_json(report.model_dump(mode="json"))
    else:
        print_hook_report(report, show)
    if not report.scored:
        raise typer.Exit(1)
