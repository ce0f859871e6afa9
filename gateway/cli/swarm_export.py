"""``swarm-gateway swarm export``: the episodes of a run folder as a file, or their groups in words."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from gateway.cli.here import run_folder
from gateway.cli.output import stage_bars, tell
from gateway.cli.target import AsJson, RunDir
from swarm.errors import ConfigError
from swarm.importer import load_attribute


def export(
    out: Annotated[Path, typer.Option("--out", "-o", help="file to write, .parquet or .jsonl; replaced if it exists")],
    run_dir: RunDir = None,
    state: Annotated[
        Literal["trained", "waiting", "dropped", "all"],
        typer.Option(help="which episodes; all: also eval episodes and those that were aborted or timed out"),
    ] = "trained",
    run: Annotated[str | None, typer.Option(help="only episodes of this run_id; default: all runs")] = None,
    groups: Annotated[
        bool, typer.Option("--groups", help="one line per group, in words: what `hooks test --data` reads")
    ] = False,
    tokenizer: Annotated[
        str | None, typer.Option(help="with --groups: model whose tokenizer reads the tokens; default: the run's own")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write one row per episode (task, reward, output, policy versions, how it ended, timelines), or one per group."""
    from swarm.concurrency import ends_by_signals

    if tokenizer and not groups:
        raise ConfigError("--tokenizer goes with --groups: episodes are exported as tokens")
    journal = run_folder(run_dir) / "journal.db"
    decode = None
    if groups:
        model = tokenizer or load_attribute("swarm.server.journal.export:model_of")(journal, run)
        decode = load_attribute("adapters.models:decoder")(model)
    write = load_attribute("swarm.server.journal.export:export")
    with ends_by_signals(), stage_bars(visible=not as_json) as on_progress:
        report = write(journal, out, state=state, run_id=run, progress=on_progress, decode=decode)
    if groups:
        line = f"{report.path}: {report.groups} groups of {report.rows} episodes"
        if report.left_out:
            line += f"; {report.left_out} left out, which lack tokens or are no single answers"
    else:
        counts = f"{report.rows} episodes, {report.timelines} timelines, {report.tokens} response tokens"
        line = f"{report.path}: {counts}, {report.bytes / 1e6:.1f} MB"
    tell(as_json, report.model_dump(mode="json"), line)
