"""``swarm-gateway keys`` and ``swarm-gateway swarm tokens``: create, list and revoke keys of a gateway and tokens of a
swarm server, running or not.

Invariant: a secret is printed once, on its creation, alone on stdout; messages about it go to stderr.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from gateway.cli.here import run_folder, runs_of
from gateway.cli.output import print_json, tell
from gateway.cli.target import AsJson, RunDir
from swarm.errors import ConfigError

if TYPE_CHECKING:
    from gateway.config.gateway import GatewayConfig
    from gateway.keys.store import KeyFile
    from swarm.credentials import Credential

keys = typer.Typer(help="Keys of applications, kept as digests; a running gateway takes them.", no_args_is_help=True)
tokens = typer.Typer(help="Tokens that open a swarm server, kept in its run folder as digests.", no_args_is_help=True)

_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}

File = Annotated[Path | None, typer.Option("--file", help="the file of keys (the gateway's `keys_file`)")]
Config = Annotated[
    Path | None, typer.Option("--config", "-c", help="YAML file of the gateway, or one for `up`, which names it")
]
#: Typer takes no list of literals; the server's own list decides.
Scope = StrEnum("Scope", ["CLAIM", "READ", "ADMIN"])
Expires = Annotated[str | None, typer.Option(help="lifetime such as 12h, 30d or 8w; default: for ever")]


@keys.command("create")
def create_key(
    label: Annotated[str, typer.Argument(help="whose it is, such as the application's name")],
    file: File = None,
    config: Config = None,
    route: Annotated[list[str] | None, typer.Option(help="a route it opens; again for another; default: all")] = None,
    requests_per_minute: Annotated[int | None, typer.Option("--rpm", help="requests it may send a minute")] = None,
    max_in_flight: Annotated[int | None, typer.Option(help="requests served at once; more of them wait")] = None,
    train: Annotated[
        bool | None,
        typer.Option(
            "--train/--no-train",
            help="whether its requests may be kept and trained; default: as their route says (`data.consent`)",
            show_default=False,
        ),
    ] = None,
    side: Annotated[
        Literal["challenger", "incumbent"] | None,
        typer.Option(help="who answers its requests where a challenger has a share of them; default: drawn"),
    ] = None,
    expires: Expires = None,
    page: Annotated[
        Literal["look", "judge", "decide"] | None,
        typer.Option(help="what it opens of the page (`ui`): each also the ones before it; default: nothing"),
    ] = None,
    admin: Annotated[
        bool, typer.Option("--admin", help="opens /admin too, such as POST /admin/reload, and all of the page")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make a key and print it, this once. A running gateway takes it within about a second."""
    if "" in (route or ()):
        raise ConfigError("--route '': name a route, or leave it out for all of them")
    opened, settings = _open(file, config)
    if settings is not None and (unknown := [name for name in route or () if name not in settings.route_names]):
        raise ConfigError(f"there is no route {unknown[0]!r}; there are: {', '.join(settings.route_names)}")
    key, text = opened.create(
        label,
        routes=route or None,
        admin=admin,
        requests_per_minute=requests_per_minute,
        max_in_flight=max_in_flight,
        train=train,
        side=side,
        page=page,
        lifetime=parse_lifetime(expires),
    )
    if as_json:
        print_json(key.model_dump(mode="json", exclude={"sha256", "revoked"}) | {"key": text})
    else:
        typer.echo(text)
        typer.echo(f"keep it now: it is stored as a digest in {opened.path} and cannot be shown again", err=True)


@keys.command("list")
def list_keys(file: File = None, config: Config = None, as_json: AsJson = False) -> None:
    """The keys' ids, labels, states, routes, limits and last uses; the keys themselves are not kept."""
    opened, _ = _open(file, config)
    keys, used = opened.read(), opened.last_used()
    last = {name: moment.isoformat() for name, moment in used.items()}
    rows = [_row(key) | {"last_used": last.get(key.id)} for key in keys]
    lines: list[str] = []
    for key in keys:
        parts = [f"{key.id}  {key.label:<24} {key.state(datetime.now(UTC)):<8}", ",".join(key.routes or ["all routes"])]
        parts += ["admin"] if key.admin else []
        parts += [f"page: {key.page}"] if key.page else []
        parts += [f"{key.requests_per_minute}/min"] if key.requests_per_minute else []
        parts += [f"{key.max_in_flight} at once"] if key.max_in_flight else []
        parts += [] if key.train is None else ["trained" if key.train else "never trained"]
        parts += [] if key.side is None else [f"the {key.side}'s"]
        parts += _until(key)
        parts.append(f"used {_moment(used[key.id])}" if key.id in used else "never used")
        lines.append("  ".join(parts))
    tell(as_json, rows, *(lines or [f"there is no key in {opened.path}"]))


@keys.command("revoke")
def revoke_key(
    name: Annotated[str, typer.Argument(help="its id or its label in `list`")],
    file: File = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Refuse a key from now on; a running gateway does so within about a second."""
    key = _open(file, config)[0].revoke(name)
    gone = key.model_dump(mode="json", include={"id", "label", "revoked"})
    tell(as_json, gone, f"{key.label} ({key.id}) is revoked")


@tokens.command("create")
def create_token(
    name: Annotated[str, typer.Argument(help="who will use it; letters, digits, '.', '_', '-'")],
    scope: Annotated[
        list[Scope],
        typer.Option(
            help="claim: run episodes. read: status and metrics. admin: everything. Give it again for another one."
        ),
    ],
    expires: Expires = None,
    run_dir: RunDir = None,
    as_json: AsJson = False,
) -> None:
    """Make a token and print it, this once. A running server takes it at once."""
    from swarm.credentials import TokenFile

    file = TokenFile(run_folder(run_dir))
    scopes = sorted(set(map(str, scope)))
    first = not file.read()
    token = file.create(name, scopes, parse_lifetime(expires))
    if as_json:
        print_json({"name": name, "token": token, "scopes": scopes})
    else:
        typer.echo(token)
        typer.echo("keep it now: it is stored as a digest and cannot be shown again", err=True)
    if first:
        typer.echo(
            "it is the first: a server on loopback that needed no token asks everyone from now on; give SWARM_TOKEN to "
            "its clients and gateways, but for those of an `up`, which has a token of its own",
            err=True,
        )


@tokens.command("list")
def list_tokens(run_dir: RunDir = None, as_json: AsJson = False) -> None:
    """The tokens' names, scopes and states; the tokens themselves are not kept."""
    from swarm.credentials import TokenFile

    file = TokenFile(run_folder(run_dir))
    tokens = file.read()
    rows = [f"{token.name:<24} {','.join(token.scopes):<16} {token.state(datetime.now(UTC))}" for token in tokens]
    lines = ["  ".join([row, *_until(token)]) for row, token in zip(rows, tokens, strict=True)]
    tell(as_json, [_row(token) for token in tokens], *(lines or [f"there is no token in {file.path}"]))


@tokens.command("revoke")
def revoke_token(
    name: Annotated[str, typer.Argument(help="its name in `list`")],
    run_dir: RunDir = None,
    as_json: AsJson = False,
) -> None:
    """Refuse a token from now on; a running server does so at once."""
    from swarm.credentials import TokenFile

    token = TokenFile(run_folder(run_dir)).revoke(name)
    tell(as_json, token.model_dump(mode="json", include={"name", "revoked"}), f"{name} is revoked")


def parse_lifetime(text: str | None) -> timedelta | None:
    """``30d`` as a duration; the units are m, h, d and w. ``None``: for ever.

    Raises:
        ConfigError: anything else.
    """
    if text is None:
        return None
    number, unit = text[:-1], _UNITS.get(text[-1:])
    if unit is None or not number.isascii() or not number.isdigit() or not 0 < int(number) < 1_000_000:
        raise ConfigError(f"--expires {text!r}: give a number with its unit, such as 30m, 12h, 30d or 8w")
    return timedelta(**{unit: int(number)})


def _row(credential: Credential) -> dict[str, Any]:
    state = credential.state(datetime.now(UTC))
    return credential.model_dump(mode="json", exclude={"sha256"}) | {"state": state}


def _until(credential: Credential) -> list[str]:
    return [f"until {_moment(credential.expires)}"] if credential.expires else []


def _moment(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M} UTC"


def _open(file: Path | None, config: Path | None) -> tuple[KeyFile, GatewayConfig | None]:
    from gateway.cli.sections import read_gateway
    from gateway.keys.store import KeyFile

    if file is None and config is None:
        files = [run.file for run in runs_of() if run.file is not None and run.gateway]
        config = files[0] if len(files) == 1 else None
    if (file is None) == (config is None):
        raise ConfigError(
            "say where the keys are, by --file or by --config (the gateway's YAML file, or one for `up`, with "
            "keys_file), or run this where `up` runs"
        )
    if file is not None:
        return KeyFile(file), None
    assert config is not None
    settings = read_gateway(config)
    if settings.keys_file is None:
        raise ConfigError(
            f"{config} has no keys_file: add one to its gateway's settings, such as `keys_file: keys.json`"
        )
    return KeyFile(settings.keys_file), settings
