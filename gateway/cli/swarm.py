"""``swarm-gateway swarm``: the swarm server, its status, and the engine it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli.credentials import tokens
from gateway.cli.here import client_for
from gateway.cli.output import announce, tell
from gateway.cli.serve import LogFormat, log_to_stderr, stop_with_parent
from gateway.cli.target import AsJson, SwarmUrl, job_text
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
    load_attribute("swarm.server.app:run")(parsed, on_ready=announce("swarm server"))


@app.command()
def status(swarm_url: SwarmUrl = None, token: Token = None, as_json: AsJson = False) -> None:
    """State of the engine, progress of the batch, and the latest steps."""
    with connect(swarm_url, token) as client:
        current = client.status()
    tell(as_json, current.model_dump(mode="json"), *status_lines(current))


def status_lines(status: ServerStatus) -> list[str]:
    """The engine, its pool, who runs what, what went wrong, the last steps and a dead engine's last lines.

    Parts without content are left out.
    """
    from gateway.views.format import printable, text_lines
    from gateway.views.swarm_view import view
    from swarm.progress import step_line

    shown = view(status, ())
    lines = [f"{line.label:<6} {line.text}" for line in shown.head]
    for table in (shown.tables[key] for key in "ced"):
        if table.rows:
            lines += ["", *text_lines(table, _ROWS)]
    if status.log or status.steps:
        lines += ["", *(f"{entry.tag or 'log'}: {entry.message}" for entry in status.log[-_ROWS:])]
        lines += [step_line(step) for step in status.steps[-_ROWS:]]
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
    from swarm.states import EngineState

    with connect(swarm_url, token) as client:
        if job is not None:
            client.sync_train_config(job_text(job, client.server_url))
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
