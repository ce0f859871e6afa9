"""``swarm-gateway keys``: make, list and revoke the virtual keys of a gateway, running or not.

Invariant: a key is printed once, when it is made, alone on stdout; everything else about it goes to stderr.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from gateway.config import GatewayConfig
    from gateway.keys import KeyFile

app = typer.Typer(help="Keys of applications, kept as digests; a running gateway takes them.", no_args_is_help=True)

File = Annotated[Path | None, typer.Option("--file", help="the file of keys (the gateway's `keys_file`)")]
Config = Annotated[Path | None, typer.Option("--config", "-c", help="the gateway's YAML file, which names the file")]
AsJson = Annotated[bool, typer.Option("--json", help="print one line of JSON")]


@app.command()
def create(
    label: Annotated[str, typer.Argument(help="whose it is, such as the application's name")],
    file: File = None,
    config: Config = None,
    route: Annotated[list[str] | None, typer.Option(help="a route it opens; again for another; default: all")] = None,
    requests_per_minute: Annotated[int | None, typer.Option("--rpm", help="requests it may send a minute")] = None,
    max_in_flight: Annotated[int | None, typer.Option(help="requests served at once; more of them wait")] = None,
    expires: Annotated[str | None, typer.Option(help="lifetime such as 12h, 30d or 8w; default: for ever")] = None,
    admin: Annotated[bool, typer.Option("--admin", help="opens /admin too, such as POST /admin/reload")] = False,
    as_json: AsJson = False,
) -> None:
    """Make a key and print it, this once. A running gateway takes it within about a second."""
    from gateway.cli.output import print_json
    from gateway.cli.tokens import parse_lifetime

    keys, settings = _open(file, config)
    if settings is not None and route:
        _check_routes(settings, route)
    key, text = keys.create(
        label,
        routes=route or None,
        admin=admin,
        requests_per_minute=requests_per_minute,
        max_in_flight=max_in_flight,
        lifetime=parse_lifetime(expires) if expires is not None else None,
    )
    if as_json:
        print_json(key.model_dump(mode="json", exclude={"sha256", "revoked"}) | {"key": text})
    else:
        typer.echo(text)
        typer.echo(f"keep it now: it is stored as a digest in {keys.path} and cannot be shown again", err=True)


@app.command("list")
def list_keys(file: File = None, config: Config = None, as_json: AsJson = False) -> None:
    """The keys' ids, labels, states, routes, limits and last uses; the keys themselves are not kept."""
    from datetime import UTC, datetime

    from gateway.cli.output import print_json

    keys, _ = _open(file, config)
    now, used = datetime.now(UTC), keys.last_used()
    if as_json:
        print_json(
            [
                key.model_dump(mode="json", exclude={"sha256"})
                | {"state": key.state(now), "last_used": used[key.id].isoformat() if key.id in used else None}
                for key in keys.read()
            ]
        )
        return
    for key in keys.read():
        parts = [f"{key.id}  {key.label:<24} {key.state(now):<8}", ",".join(key.routes or ["all routes"])]
        parts += ["admin"] if key.admin else []
        parts += [f"{key.requests_per_minute}/min"] if key.requests_per_minute else []
        parts += [f"{key.max_in_flight} at once"] if key.max_in_flight else []
        parts += [f"until {key.expires:%Y-%m-%d %H:%M} UTC"] if key.expires else []
        parts.append(f"used {used[key.id]:%Y-%m-%d %H:%M} UTC" if key.id in used else "never used")
        typer.echo("  ".join(parts))


@app.command()
def revoke(
    name: Annotated[str, typer.Argument(help="its id or its label in `list`")],
    file: File = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Refuse a key from now on; a running gateway does so within about a second."""
    from gateway.cli.output import print_json

    key = _open(file, config)[0].revoke(name)
    if as_json:
        print_json(key.model_dump(mode="json", include={"id", "label", "revoked"}))
    else:
        typer.echo(f"{key.label} ({key.id}) is revoked")


def _open(file: Path | None, config: Path | None) -> tuple[KeyFile, GatewayConfig | None]:
    from gateway.config import load_config
    from gateway.keys.store import KeyFile
    from swarm.errors import ConfigError

    if (file is None) == (config is None):
        raise ConfigError("say where the keys are, by --file or by --config (a gateway's YAML file with keys_file)")
    if file is not None:
        return KeyFile(file), None
    assert config is not None
    settings = load_config(config)
    if settings.keys_file is None:
        raise ConfigError(f"{config} has no keys_file: add one, such as `keys_file: keys.json`")
    return KeyFile(settings.keys_file), settings


def _check_routes(settings: GatewayConfig, routes: list[str]) -> None:
    from swarm.errors import ConfigError

    known = settings.route_names
    unknown = [name for name in routes if name not in known]
    if unknown:
        raise ConfigError(f"there is no route {unknown[0]!r}; there are: {', '.join(known)}")
