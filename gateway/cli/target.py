"""What commands of the control plane share: whom they command, ``--set``, and how they wait for an engine.

Invariant: a job goes to the server as it is written; only where that is this machine, a model folder beside the job's
file is sent as an absolute path.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, ParamSpec, TypeVar, get_type_hints

import typer

from gateway.cli.here import DEFAULT_URL, client_for
from swarm.errors import ConfigError

if TYPE_CHECKING:
    from swarm.client import SwarmClient

P = ParamSpec("P")
T = TypeVar("T", bound="ServerTarget")

SwarmUrl = Annotated[
    str | None,
    typer.Option(
        "--swarm-url",
        help=f"address of the swarm server; default: the one that `up` started in this folder, or {DEFAULT_URL}",
    ),
]
Set = Annotated[
    list[str] | None, typer.Option("--set", help="key=value: a field of the job, or verl's dotted key; wins over it")
]
ForceRestart = Annotated[
    bool, typer.Option("--force-restart", help="stop an engine that runs, and start it again: the run goes on")
]
Wait = Annotated[float, typer.Option(help="seconds to wait until the restarted engine serves; 0: do not wait")]
RunDir = Annotated[
    Path | None,
    typer.Option(
        "--run-dir",
        help="the swarm server's run folder (its `run_dir`); default: of the one that runs here, or runs/default",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


@dataclass(frozen=True)
class ServerTarget:
    """The swarm server that a command is for, by its options."""

    swarm_url: SwarmUrl
    gateway_url: Annotated[
        str | None, typer.Option("--gateway-url", help="address of a gateway, to command the swarm server behind it")
    ]
    route: Annotated[str | None, typer.Option("--route", help="route of that gateway, if it leads to several servers")]
    token: Annotated[str | None, typer.Option("--token", envvar="SWARM_TOKEN", help="admin token of the swarm server")]
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key", envvar="SWARM_GATEWAY_KEY", help="admin key of the gateway; where it has no keys: --token"
        ),
    ]

    @property
    def is_open(self) -> bool:
        """Whether no server is named."""
        return self.swarm_url is None and self.gateway_url is None

    def connect(self) -> SwarmClient:
        """A client that gives up on an absent server after seconds: somebody waits at the terminal.

        Raises:
            ConfigError: two servers are named, or a route of none; or none is named, and see
                :func:`gateway.cli.here.client_for`.
        """
        from urllib.parse import urlencode

        from swarm.client import RetryPolicy, SwarmClient

        # a change may first stop the engine
        policy = RetryPolicy(attempts=3, total=200.0)
        if self.gateway_url is None:
            if self.route is not None:
                raise ConfigError("--route goes with --gateway-url")
            return client_for(self.swarm_url, self.token, policy)
        if self.swarm_url is not None:
            raise ConfigError("give --swarm-url or --gateway-url, not both")
        base = self.gateway_url.rstrip("/").removesuffix("/v1")
        query = f"?{urlencode({'route': self.route})}" if self.route is not None else ""
        return SwarmClient(f"{base}/admin{query}", token=self.api_key or self.token or "", policy=policy)


def targeted(command: Callable[Concatenate[T, P], None]) -> Callable[..., None]:
    """``command`` as typer takes it: its first parameter, a :class:`ServerTarget`, becomes the options of its class."""
    first, *own = inspect.signature(command, eval_str=True).parameters.values()
    target: type[ServerTarget] = first.annotation
    options = get_type_hints(target, include_extras=True)
    kind = inspect.Parameter.KEYWORD_ONLY

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        call: Any = command
        call(target(**{name: arguments.pop(name) for name in options}), **arguments)

    typed: Any = run
    typed.__signature__ = inspect.Signature(
        [
            *(parameter.replace(kind=kind) for parameter in own),
            *(inspect.Parameter(name, kind, default=None, annotation=option) for name, option in options.items()),
        ]
    )
    return run


def parse_set(settings: list[str] | None) -> dict[str, Any]:
    """The values of ``--set``, read as YAML.

    Raises:
        ConfigError: one is not ``key=value``.
    """
    import yaml

    values: dict[str, Any] = {}
    for setting in settings or []:
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {setting!r}: write it as key=value")
        try:
            values[key.strip()] = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError) as exc:  # ValueError: a date that does not exist, say
            raise ConfigError(f"--set {setting!r}: {' '.join(str(exc).split())}") from exc
    return values


def job_text(path: Path, url: str) -> str:
    """The YAML of the job in a file, ours, AgentJet's or one for ``up``, for the server at ``url``.

    Raises:
        ConfigError: the file cannot be read.
    """
    from urllib.parse import urlsplit

    import yaml

    from gateway.cli.parts import part_of
    from swarm.http.client import is_loopback
    from swarm.validation import path_in, read_text

    part = part_of(path, "job")
    data = part.settings
    text = yaml.safe_dump(data, sort_keys=False) if part.section else read_text(path, "job")
    model = data.get("model")
    host = urlsplit(url if "://" in url else f"http://{url}").hostname or ""
    if isinstance(model, str) and is_loopback(host) and not Path(model).is_absolute():
        beside = path_in(path.parent, model)
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
