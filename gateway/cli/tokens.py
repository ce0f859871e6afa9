"""``swarm-gateway swarm tokens``: make, list and revoke the named tokens of a swarm server, running or not.

Invariant: a token is printed once, when it is made, alone on stdout; everything else about it goes to stderr.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from datetime import timedelta

app = typer.Typer(help="Tokens that open a swarm server, kept in its run folder as digests.", no_args_is_help=True)

_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


class Scope(StrEnum):
    """What typer offers for ``--scope``; the server's own list decides."""

    CLAIM = "claim"
    READ = "read"
    ADMIN = "admin"


RunDir = Annotated[Path, typer.Option("--run-dir", help="the swarm server's run folder (its `run_dir`)")]
AsJson = Annotated[bool, typer.Option("--json", help="print one line of JSON")]


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="who will use it; letters, digits, '.', '_', '-'")],
    scope: Annotated[
        list[Scope],
        typer.Option(
            help="claim: run episodes. read: status and metrics. admin: everything. Give it again for another one."
        ),
    ],
    expires: Annotated[str | None, typer.Option(help="lifetime such as 12h, 30d or 8w; default: for ever")] = None,
    run_dir: RunDir = Path("runs/default"),
    as_json: AsJson = False,
) -> None:
    """Make a token and print it, this once. A running server takes it at once."""
    from gateway.cli.output import print_json

    scopes = sorted({one.value for one in scope})
    file = _file(run_dir)
    first = not file.read()
    token = file.create(name, scopes, parse_lifetime(expires) if expires is not None else None)
    if as_json:
        print_json({"name": name, "token": token, "scopes": scopes})
    else:
        typer.echo(token)
        typer.echo("keep it now: it is stored as a digest and cannot be shown again", err=True)
        if first:
            typer.echo(
                "it is the first: a server on loopback that asked for none asks everyone from now on; give SWARM_TOKEN "
                "to its clients and gateways, and restart an `up` that runs in this folder",
                err=True,
            )


@app.command("list")
def list_tokens(run_dir: RunDir = Path("runs/default"), as_json: AsJson = False) -> None:
    """The tokens' names, scopes and states; the tokens themselves are not kept."""
    from datetime import UTC, datetime

    from gateway.cli.output import print_json

    now = datetime.now(UTC)
    tokens = _file(run_dir).read()
    if as_json:
        print_json(
            [token.model_dump(mode="json", exclude={"sha256"}) | {"state": token.state(now)} for token in tokens]
        )
        return
    for token in tokens:
        until = f"  until {token.expires:%Y-%m-%d %H:%M} UTC" if token.expires else ""
        typer.echo(f"{token.name:<24} {','.join(token.scopes):<16} {token.state(now)}{until}")


@app.command()
def revoke(
    name: Annotated[str, typer.Argument(help="its name in `list`")],
    run_dir: RunDir = Path("runs/default"),
    as_json: AsJson = False,
) -> None:
    """Refuse a token from now on; a running server does so at once."""
    from gateway.cli.output import print_json

    revoked = _file(run_dir).revoke(name)
    if as_json:
        print_json({"name": name, "revoked": revoked.revoked.isoformat()})
    else:
        typer.echo(f"{name} is revoked")


def parse_lifetime(text: str) -> timedelta:
    """``30d`` as a duration; the units are m, h, d and w.

    Raises:
        ConfigError: anything else.
    """
    from datetime import timedelta

    from swarm.errors import ConfigError

    number, unit = text[:-1], _UNITS.get(text[-1:])
    if unit is None or not number.isascii() or not number.isdigit() or not 0 < int(number) < 1_000_000:
        raise ConfigError(f"--expires {text!r}: give a number with its unit, such as 30m, 12h, 30d or 8w")
    return timedelta(**{unit: int(number)})


def _file(run_dir: Path) -> Any:
    from swarm.importer import load_attribute

    return load_attribute("swarm.server.auth.store:TokenFile")(run_dir)
