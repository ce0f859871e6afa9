"""``ajet-swarm``: the command by which AgentJet's client starts a swarm server (``auto_start_swarm_server``); here it
is ours.

Invariant: the line that the client waits for comes once a swarm server answers at the port, and only then.
"""

from __future__ import annotations

from typing import Annotated

import typer

from swarm.errors import ConfigError, SwarmGatewayError
from swarm.importer import load_attribute

app = typer.Typer(help="A swarm server for AgentJet's clients.", no_args_is_help=True)


def main() -> None:
    """Run the command line and leave the process with its exit code."""
    from gateway.cli import main as run

    run("gateway.cli.agentjet:app")


@app.callback()
def commands() -> None:
    """A swarm server for AgentJet's clients."""
    # a Typer of one command has no name for it without a callback


@app.command()
def start(
    swarm_port: Annotated[int, typer.Option("--swarm-port", help="port to listen on, 0: any free one")] = 10086,
    post_rolling_timeout: Annotated[
        float | None,
        typer.Option(help="seconds that a step waits for running episodes [default: as long as they may run]"),
    ] = None,
) -> None:
    """Run the swarm server on this machine's loopback; its run folder is ``runs/default``."""
    from gateway.cli.sections import parse_server
    from gateway.cli.serve import log_to_stderr

    settings = {"port": swarm_port, "post_rolling_timeout": post_rolling_timeout}
    config = parse_server({name: value for name, value in settings.items() if value is not None}, "flags", None)
    log_to_stderr("text")
    try:
        load_attribute("swarm.server.run:run")(config, on_ready=_announce)
    except ConfigError as exc:
        url = f"http://{config.host}:{swarm_port}"
        if exc.code != "port_in_use" or not _serves(url):
            raise
        _announce(url)


def _announce(url: str) -> None:
    print(f"Interchange server is running in blocking mode on {url}", flush=True)


def _serves(url: str) -> bool:
    """Whether a swarm server is there that AgentJet's client, which has no token, may use."""
    from swarm.client import RetryPolicy, SwarmClient

    try:
        with SwarmClient(url, request_timeout=5.0, policy=RetryPolicy(attempts=1)) as client:
            client.get_engine_status()
    except SwarmGatewayError:
        return False
    return True
