"""``ajet-swarm``: AgentJet's command for servers and monitors, by which its client starts a server
(``auto_start_swarm_server``); here both are ours.

Invariant: the line that the client waits for comes once a swarm server answers at the port, and only then. Servers on
different ports have run folders of their own.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from swarm.errors import ConfigError, SwarmGatewayError
from swarm.importer import load_attribute

app = typer.Typer(help="A swarm server for AgentJet's clients, and its monitor.", no_args_is_help=True)
_OURS = ("gateway", "swarm", "adapters")


def main() -> None:
    """Run the command line and leave the process with its exit code."""
    from gateway.cli import main as run

    run("gateway.cli.agentjet:app")


@app.command()
def start(
    swarm_port: Annotated[
        int | None, typer.Option("--swarm-port", help="port to listen on, 0: any free one; default 10086")
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="address to listen on; beyond this machine's loopback with a token only")
    ] = None,
    conf: Annotated[
        Path | None,
        typer.Option("--conf", help="YAML file: the server's settings, or a job, AgentJet's or ours, for job defaults"),
    ] = None,
    kill: Annotated[str, typer.Option("--kill", help="taken, but nothing is killed by its name")] = "",
    autokill: Annotated[bool, typer.Option("--autokill", help="likewise")] = False,
    debug: Annotated[
        str, typer.Option("--debug", "--db", "--bp", "--breakpoint", help="log everything; its tags mean nothing here")
    ] = "",
    post_rolling_timeout: Annotated[
        float | None,
        typer.Option(help="seconds that a step waits for running episodes [default: as long as they may run]"),
    ] = None,
) -> None:
    """Run the swarm server on this machine; its run folder is ``runs/default``, or ``runs/PORT`` for another port."""
    from gateway.cli.sections import parse_server
    from gateway.cli.serve import log_to_stderr
    from swarm.client.child import run_folder
    from swarm.http.serve import url_of

    with tempfile.TemporaryDirectory(prefix="ajet-swarm-") as scratch:
        settings = _settings(conf, Path(scratch)) if conf else {}
        flags = {"host": host, "port": swarm_port, "post_rolling_timeout": post_rolling_timeout}
        settings |= {name: value for name, value in flags.items() if value is not None}
        config = parse_server(settings, str(conf or "flags"), conf.parent if conf else None)
        if "run_dir" not in settings:
            # relative to here, not to the file
            config = config.model_copy(update={"run_dir": Path(run_folder(config.port)).absolute()})
        log_to_stderr("text")
        if kill or autokill:
            typer.echo(
                "ajet-swarm: nothing is killed by its name: a server ends its own engine, and what an earlier one left "
                "behind, by its run folder",
                err=True,
            )
        if debug:
            for name in _OURS:
                logging.getLogger(name).setLevel(logging.DEBUG)
        try:
            load_attribute("swarm.server.app:run")(config, on_ready=_announce)
        except ConfigError as exc:
            url = url_of(config.host, config.port)
            if exc.code != "port_in_use" or not _serves(url):
                raise
            _announce(url)


@app.command("top", help="The same as overwatch.")
@app.command()
def overwatch(
    swarm_url: Annotated[
        str, typer.Option("--swarm-url", help="address of the swarm server")
    ] = "http://localhost:10086",
    refresh_interval: Annotated[float, typer.Option(min=0.2, max=60, help="seconds between two looks")] = 2.0,
    token: Annotated[str | None, typer.Option("--token", envvar="SWARM_TOKEN", help="its token, if it has one")] = None,
) -> None:
    """Watch a swarm server in the terminal: `swarm-gateway monitor`."""
    monitor = load_attribute("gateway.cli.monitor:monitor")
    monitor(swarm_url=[swarm_url], token=token, interval=refresh_interval)


def _settings(conf: Path, scratch: Path) -> dict[str, Any]:
    """The server's settings in ``conf``, or the job there as its ``job_defaults``."""
    import yaml

    from swarm.agentjet.yaml_job import convert
    from swarm.validation import read_mapping

    data = read_mapping(conf, "config")
    if data.keys() <= load_attribute("swarm.server.config:ServerConfig").model_fields.keys():
        return data
    if not isinstance(data.get("ajet"), Mapping):
        return {"job_defaults": str(conf.absolute())}
    job = cast("Mapping[str, Any]", data["ajet"])
    # defaults need no model
    fields = convert({**data, "ajet": {"model": {"path": "any"}, **job}}).job.model_dump(
        mode="json", exclude_unset=True
    )
    if "model" not in job:
        del fields["model"]
    converted = scratch / "job_defaults.yaml"
    converted.write_text(yaml.safe_dump(fields), encoding="utf-8")
    return {"job_defaults": str(converted)}


def _announce(url: str) -> None:
    print(f"Interchange server is running in blocking mode on {url}", flush=True)


def _serves(url: str) -> bool:
    """Whether a swarm server is there that this user's clients may use."""
    from swarm.client import RetryPolicy, SwarmClient

    try:
        with SwarmClient(url, request_timeout=5.0, policy=RetryPolicy(attempts=1)) as client:
            client.get_engine_status()
    except SwarmGatewayError:
        return False
    return True
