"""``swarm-gateway monitor``: what swarm servers and gateways do, live in the terminal or once as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli.output import print_json
from swarm.errors import ConfigError

if TYPE_CHECKING:
    from gateway.tui.targets import Target


def monitor(
    config: Annotated[
        Path | None, typer.Argument(help="file that an `up` or `train` runs; default: those that run in this folder")
    ] = None,
    swarm_url: Annotated[
        list[str] | None, typer.Option("--swarm-url", help="address of a swarm server; give it again for another one")
    ] = None,
    gateway_url: Annotated[
        list[str] | None, typer.Option("--gateway-url", help="address of a gateway; give it again for another one")
    ] = None,
    token: Annotated[
        str | None, typer.Option("--token", envvar="SWARM_TOKEN", help="token of the swarm servers")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="SWARM_GATEWAY_KEY", help="key of the gateways")
    ] = None,
    interval: Annotated[float, typer.Option(min=0.2, max=60, help="seconds between two looks")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="print one status of all as JSON and leave")] = False,
) -> None:
    """Watch swarm servers and gateways in the terminal; without an address those that `up` started in this folder.

    It changes nothing on a server. Press ? for the keys, q to leave. With --json the exit code is 2 unless all answer.
    """
    import asyncio
    import sys

    from gateway.tui.targets import make_targets, snapshot

    if not as_json and not (sys.stdin.isatty() and sys.stdout.isatty()):
        # as it is from `ajet-swarm overwatch`, which has no --json
        command = "`swarm-gateway monitor --json`"
        raise ConfigError(
            f"the monitor needs a terminal; for scripts there is {command}, which prints one status of all"
        )
    if swarm_url or gateway_url:
        if config is not None:
            raise ConfigError("give a file or addresses, not both")
        targets = make_targets(swarm_url or [], token, gateway_url or [], api_key)
    else:
        targets = _targets(config, token, api_key)
    if as_json:
        state, errors = asyncio.run(snapshot(targets))
        print_json(state)
        for error in errors:
            typer.echo(f"swarm-gateway: {error}", err=True)
        raise typer.Exit(2 if errors else 0)
    from gateway.tui.app import MonitorApp

    app = MonitorApp(targets, interval)
    app.run()
    # textual does not raise the error that ended it, and leaves with 0
    raise typer.Exit(app.return_code or 0)


def _targets(config: Path | None, token: str | None, api_key: str | None) -> list[Target]:
    """The servers of the runs of ``config``, or of this folder; else those at the usual addresses, if they are its."""
    import asyncio

    from gateway.cli.here import DEFAULT_URL, client_for, runs_of, token_for
    from gateway.tui.targets import Kind, make_targets, snapshot
    from swarm.client import RetryPolicy

    targets: list[Target] = []
    for run in runs_of(config):
        urls = [server.url for server in run.servers]
        targets += make_targets(urls, token_for(run, token), [run.gateway] if run.gateway else [], api_key)
    if targets:
        return targets
    if config is not None:
        raise ConfigError(f"no `up` or `train` of {config} runs; start it, or name the servers by their addresses")
    # raises unless the server there is of this folder
    client_for(None, token, RetryPolicy(attempts=1, total=5.0)).close()
    gateways = make_targets([], None, [Kind.GATEWAY.default_url], api_key)
    [about] = asyncio.run(snapshot(gateways))[0]["gateways"]
    routes = (about["status"] or {}).get("routes", {}).values()
    mine = any((route["swarm_url"] or "").rstrip("/") == DEFAULT_URL for route in routes)
    return [*make_targets([DEFAULT_URL], token, [], None), *(gateways if mine else [])]
