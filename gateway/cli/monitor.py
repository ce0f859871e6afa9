"""``swarm-gateway monitor``: what swarm servers and gateways do, live in the terminal or once as JSON."""

from __future__ import annotations

from typing import Annotated

import typer

from gateway.cli.output import print_json
from swarm.errors import ConfigError


def monitor(
    swarm_url: Annotated[
        list[str] | None, typer.Option("--swarm-url", help="address of a swarm server; give it again for another one")
    ] = None,
    gateway_url: Annotated[
        list[str] | None, typer.Option("--gateway-url", help="address of a gateway; give it again for another one")
    ] = None,
    token: Annotated[
        list[str] | None,
        typer.Option("--token", envvar="SWARM_TOKEN", help="token of the swarm servers; once, or once for each"),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option("--api-key", envvar="SWARM_GATEWAY_KEY", help="key of the gateways; once, or once for each"),
    ] = None,
    interval: Annotated[float, typer.Option(min=0.2, max=60, help="seconds between two looks")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="print one status of all as JSON and leave")] = False,
) -> None:
    """Watch swarm servers and gateways in the terminal; without an address those of `up` on this machine.

    It changes nothing on a server. Press ? for the keys, q to leave. With --json the exit code is 2 unless all answer.
    """
    import asyncio
    import sys

    from gateway.tui.client import make_targets, snapshot

    targets = make_targets(swarm_url or [], token or [], gateway_url or [], api_key or [])
    if as_json:
        found, errors = asyncio.run(snapshot(targets))
        print_json(found)
        for error in errors:
            typer.echo(f"swarm-gateway: {error}", err=True)
        raise typer.Exit(2 if errors else 0)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("the monitor needs a terminal; for scripts there is --json, which prints one status of all")
    from gateway.tui.app import MonitorApp

    app = MonitorApp(targets, interval)
    app.run()
    # textual does not raise the error that ended it, and leaves with 0
    raise typer.Exit(app.return_code or 0)
