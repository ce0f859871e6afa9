"""``swarm-gateway swarm``: the swarm server, its status, and the engine it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from gateway.cli.credentials import tokens
from gateway.cli.here import client_for, run_folder
from gateway.cli.output import announce, print_json, stage_bars, tell
from gateway.cli.serve import LogFormat, log_to_stderr, stop_with_parent
from gateway.cli.target import AsJson, SwarmUrl, job_text
from swarm.errors import ConfigError
from swarm.importer import load_attribute

if TYPE_CHECKING:
    from swarm.client import SwarmClient
    from swarm.status import ServerStatus

app = typer.Typer(help="The swarm server and its engine.", no_args_is_help=True)
engine = typer.Typer(help="Start and stop the engine of a running swarm server.", no_args_is_help=True)
app.add_typer(engine, name="engine")
app.add_typer(tokens, name="tokens")

Token = Annotated[str | None, typer.Option("--token", envvar="SWARM_TOKEN", help="its token, if it has one")]

#: Rows of each kind that ``status`` prints.
_ROWS = 5


def connect(swarm_url: str | None, token: str | None) -> SwarmClient:
    """A client that gives up on an absent server after seconds: somebody waits at the terminal.

    Raises:
        ConfigError: see :func:`gateway.cli.here.client_for`.
    """
    from swarm.client import RetryPolicy

    return client_for(swarm_url, token, RetryPolicy(attempts=3, total=5.0))


@app.command()
def start(
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="YAML file of the server, or one for `up`; flags win over it")
    ] = None,
    host: Annotated[str | None, typer.Option(help="address to listen on")] = None,
    port: Annotated[int | None, typer.Option(help="port to listen on, 0: any free one")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="folder of logs, job and checkpoints")] = None,
    log_format: LogFormat = "text",
    stop_on_eof: Annotated[bool, typer.Option("--stop-on-eof", hidden=True)] = False,
) -> None:
    """Run the swarm server; the engine starts when a job is given to it."""
    from gateway.cli.sections import read_server

    flags = {"host": host, "port": port, "run_dir": str(run_dir) if run_dir else None}
    parsed = read_server(config, {name: value for name, value in flags.items() if value is not None})
    if stop_on_eof:
        stop_with_parent()
    log_to_stderr(log_format)
    load_attribute("swarm.server.run:run")(parsed, on_ready=announce("swarm server"))


@app.command()
def status(swarm_url: SwarmUrl = None, token: Token = None, as_json: AsJson = False) -> None:
    """State of the engine, progress of the batch, and the latest steps."""
    with connect(swarm_url, token) as client:
        current = client.status()
    if as_json:
        print_json(current.model_dump(mode="json"))
    else:
        typer.echo("\n".join(status_lines(current)))


def status_lines(status: ServerStatus, steps: int = _ROWS) -> list[str]:
    """The engine, its pool, who runs what, what went wrong, the last ``steps`` steps and a dead engine's last lines.

    Parts without content are left out.
    """
    from gateway.views.format import printable, text_lines
    from gateway.views.swarm_view import SortOrder, episodes, view
    from swarm.progress import step_line

    shown = view(status, ())
    lines = [f"{line.label:<6} {line.text}" for line in shown.head]
    for table in (shown.tables["c"], episodes(status, SortOrder.IDLE, ""), shown.tables["d"]):
        if table.rows:
            lines += ["", *text_lines(table, _ROWS)]
    if status.log or status.steps:
        lines += ["", *(f"{entry.tag or 'log'}: {entry.message}" for entry in status.log[-_ROWS:])]
        lines += [step_line(step) for step in status.steps[-steps:]]
    lines += [f"  | {line}" for line in status.last_lines]
    return [printable(line) for line in lines]


@engine.command("start")
def engine_start(
    job: Annotated[Path | None, typer.Argument(help="YAML file with the TrainJob; default: what was synced")] = None,
    swarm_url: SwarmUrl = None,
    token: Token = None,
    wait: Annotated[float, typer.Option(help="seconds to wait until the engine serves; 0: do not wait")] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Give the job, if one is named, to the swarm server and start the engine."""
    from gateway.cli.parts import part_of
    from swarm.states import EngineState

    part = part_of(job, "job") if job is not None else None
    with connect(swarm_url, token) as client:
        if part is not None:
            client.sync_train_config(job_text(part, client.server_url))
        client.start_engine(wait=False)
        current = client.wait_for_state(EngineState.ROLLING, wait_seconds=wait) if wait else client.status()
    line = f"{current.engine.engine_status} {current.engine.engine_status_detail}".rstrip()
    tell(as_json, current.engine.model_dump(mode="json"), line)


@engine.command("stop")
def engine_stop(swarm_url: SwarmUrl = None, token: Token = None, as_json: AsJson = False) -> None:
    """Stop the engine; the swarm server stays."""
    with connect(swarm_url, token) as client:
        client.stop_engine()
    tell(as_json, {"success": True}, "the engine is stopped")


@app.command()
def export(
    out: Annotated[Path, typer.Option("--out", "-o", help="file to write, .parquet or .jsonl; replaced if it exists")],
    run_dir: Annotated[
        Path | None,
        typer.Option(
            help="run folder of the swarm server, which may be running; default: of the one that runs here, or "
            "runs/default"
        ),
    ] = None,
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
    if tokenizer and not groups:
        raise ConfigError("--tokenizer goes with --groups: episodes are exported as tokens")
    journal = run_folder(run_dir) / "journal.db"
    decode = None
    if groups:
        model = tokenizer or load_attribute("swarm.server.journal.group_lines:model_of")(journal, run)
        decode = load_attribute("adapters.models:decoder")(model)
    with stage_bars(visible=not as_json) as on_progress:
        report = load_attribute("swarm.server.journal.export:export")(
            journal, out, state=state, run_id=run, progress=on_progress, decode=decode
        )
    if groups:
        left_out = (
            f"; {report.left_out} left out, which lack tokens or are no single answers" if report.left_out else ""
        )
        line = f"{report.path}: {report.groups} groups of {report.rows} episodes{left_out}"
    else:
        counts = f"{report.rows} episodes, {report.timelines} timelines, {report.tokens} response tokens"
        line = f"{report.path}: {counts}, {report.bytes / 1e6:.1f} MB"
    tell(as_json, report.model_dump(mode="json"), line)
