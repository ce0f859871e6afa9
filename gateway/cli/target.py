"""What commands of the control plane share: whom they command, ``--set``, and how they wait for an engine.

Invariant: a job goes to the server as it is written; only where that is this machine, a model folder beside the job's
file is sent as an absolute path.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarm.errors import ConfigError

if TYPE_CHECKING:
    from swarm.client import SwarmClient

DEFAULT_URL = "http://127.0.0.1:10086"

SwarmUrl = Annotated[
    str | None, typer.Option("--swarm-url", help=f"address of the swarm server; default {DEFAULT_URL}")
]
GatewayUrl = Annotated[
    str | None, typer.Option("--gateway-url", help="address of a gateway, to command the swarm server behind it")
]
Route = Annotated[str | None, typer.Option("--route", help="route of that gateway, if it leads to several servers")]
Token = Annotated[str | None, typer.Option("--token", envvar="SWARM_TOKEN", help="admin token of the swarm server")]
ApiKey = Annotated[
    str | None,
    typer.Option("--api-key", envvar="OPENAI_API_KEY", help="admin key of the gateway; without keys, --token counts"),
]
Set = Annotated[
    list[str] | None, typer.Option("--set", help="key=value: a field of the job, or verl's dotted key; wins over it")
]
ForceRestart = Annotated[
    bool, typer.Option("--force-restart", help="stop an engine that runs, and start it again: the run goes on")
]
Wait = Annotated[float, typer.Option(help="seconds to wait until the restarted engine serves; 0: do not wait")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


def connect(
    swarm_url: str | None, gateway_url: str | None, route: str | None, token: str | None, api_key: str | None
) -> SwarmClient:
    """A client that gives up on an absent server after seconds: somebody waits at the terminal.

    Raises:
        ConfigError: two servers are named, or a route of none.
    """
    from urllib.parse import urlencode

    from swarm.client import RetryPolicy, SwarmClient

    # a change may first stop the engine
    policy = RetryPolicy(attempts=3, total=200.0)
    if gateway_url is None:
        if route is not None:
            raise ConfigError("--route goes with --gateway-url")
        return SwarmClient(swarm_url or DEFAULT_URL, token=token, policy=policy)
    if swarm_url is not None:
        raise ConfigError("give --swarm-url or --gateway-url, not both")
    base = gateway_url.rstrip("/").removesuffix("/v1")
    query = f"?{urlencode({'route': route})}" if route is not None else ""
    return SwarmClient(f"{base}/admin{query}", token=api_key or token or "", policy=policy)


def parse_set(given: list[str] | None) -> dict[str, Any]:
    """The values of ``--set``, read as YAML.

    Raises:
        ConfigError: one is not ``key=value``.
    """
    import yaml

    values: dict[str, Any] = {}
    for one in given or []:
        key, found, text = one.partition("=")
        if not found or not key.strip():
            raise ConfigError(f"--set {one!r}: write it as key=value")
        try:
            values[key.strip()] = yaml.safe_load(text)
        except yaml.YAMLError as exc:
            raise ConfigError(f"--set {one!r}: {' '.join(str(exc).split())}") from exc
    return values


def job_text(path: Path, url: str) -> str:
    """The YAML of the job at ``path``, for the server at ``url``.

    Raises:
        ConfigError: it cannot be read, or is no mapping.
    """
    from urllib.parse import urlsplit

    import yaml

    from gateway.cli.output import read_mapping, read_text
    from swarm.http.client import is_loopback

    text, data = read_text(path, "job"), read_mapping(path, "job")
    model = data.get("model")
    host = urlsplit(url if "://" in url else f"http://{url}").hostname or ""
    if isinstance(model, str) and is_loopback(host) and not Path(model).is_absolute():
        beside = path.parent / Path(model).expanduser()
        if (beside / "config.json").is_file():
            return yaml.safe_dump({**data, "model": str(beside.resolve())}, sort_keys=False)
    return text


def wait_for_engine(client: SwarmClient, seconds: float) -> str:
    """Wait until the engine serves, if ``seconds`` is not 0; what state it is in.

    Raises:
        EngineError: it died while booting.
        UnavailableError: the time is over.
    """
    from swarm.states import EngineState

    status = client.wait_for_state(EngineState.ROLLING, wait_seconds=seconds) if seconds else client.status()
    return f"{status.engine.engine_status} {status.engine.engine_status_detail}".rstrip()
