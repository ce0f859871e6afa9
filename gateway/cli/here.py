"""The servers that a command is for where no address is given: those that ``up`` or ``train`` started in this folder.

Invariant: another folder's servers are never taken for this one's; a token goes to the server of its run only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from swarm.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from gateway.launch.run_folder import RunFile, RunServer
    from swarm.client import RetryPolicy, SwarmClient

DEFAULT_URL = "http://127.0.0.1:10086"
#: How deep below a folder its run folders may lie: ``opencode_build_NAME/runs/NAME``.
_DEPTH = 3
_NOT_RUNS = frozenset({"node_modules", "__pycache__", "checkpoints", "logs"})


def runs_of(file: Path | None = None) -> list[RunFile]:
    """The runs that are alive of the user's ``file``; without one, all in and below the working directory.

    Raises:
        ConfigError: the file cannot be read.
    """
    from gateway.launch.run_folder import living_run

    runs: dict[int, RunFile] = {}
    for folder in _folders(file):
        if (run := living_run(folder)) is not None:
            runs[run.pid] = run
    return list(runs.values())


def _folders(file: Path | None) -> Iterator[Path]:
    from gateway.cli.parts import run_dirs

    if file is not None:
        for folder in run_dirs(file):
            yield from (folder, folder / "quick")
        return
    yield from _below(Path.cwd(), _DEPTH)
    for path in sorted(Path.cwd().glob("*.y*ml")):
        try:
            yield from run_dirs(path)
        except ConfigError:
            continue  # the command has not named it


def _below(folder: Path, depth: int) -> Iterator[Path]:
    yield folder
    if depth == 0:
        return
    try:
        inside = [entry for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return
    for entry in inside:
        if not entry.name.startswith(".") and entry.name not in _NOT_RUNS:
            yield from _below(Path(entry.path), depth - 1)


def only_server(option: str = "--swarm-url") -> tuple[RunFile, RunServer] | None:
    """The only swarm server of the only run here; ``None`` if nothing runs.

    Raises:
        ConfigError: there are several; says that ``option`` names one, an address or a run folder.
    """
    servers = [(run, server) for run in runs_of() for server in run.servers]
    if len(servers) > 1:
        shown = (f"{server.url} ({server.job or server.run_dir})" for _, server in servers)
        if option == "--run-dir":
            shown = (str(server.run_dir) for _, server in servers)
        raise ConfigError(
            f"several swarm servers run in this folder; say by {option} which one is meant: {', '.join(shown)}"
        )
    return servers[0] if servers else None


def plain_address(url: str) -> str:
    """One form for the addresses of one server of this machine."""
    return url.rstrip("/").replace("//localhost:", "//127.0.0.1:")


def gateway_run(base_url: str | None) -> RunFile | None:
    """The run here whose gateway is at ``base_url``, without one the only run here that has a gateway; ``None`` if
    there is none.

    Raises:
        ConfigError: there are several.
    """
    wanted = base_url and plain_address(base_url)
    runs = [run for run in runs_of() if run.gateway and wanted in (None, plain_address(f"{run.gateway}/v1"))]
    if len(runs) > 1:
        urls = ", ".join(f"{run.gateway}/v1" for run in runs)
        raise ConfigError(f"several gateways run in this folder; say by --base-url which one is meant: {urls}")
    return runs[0] if runs else None


#: The run folder of a start that names none.
DEFAULT_RUN = Path("runs/default")


def run_folder(folder: Path | None) -> Path:
    """The ``folder`` run folder, else that of the server that runs here, else the one of a server without a file.

    Raises:
        ConfigError: several servers run here.
    """
    if folder is not None:
        return folder
    run_and_server = only_server("--run-dir")
    return run_and_server[1].run_dir if run_and_server else DEFAULT_RUN


def explicit_token(token: str | None) -> str | None:
    """``token`` if the command line names it; that of the environment gives way to one in a server's address."""
    return None if token in ("", os.environ.get("SWARM_TOKEN")) else token


def token_for(run: RunFile, token: str | None) -> str:
    """What opens the servers of ``run``: its own token, unless the command line names another; the environment's is for
    servers elsewhere."""
    return explicit_token(token) or run.token


def token_of(swarm_url: str, token: str | None) -> str | None:
    """What opens the server at ``swarm_url``: :func:`token_for` the run here that has it, else the
    :func:`explicit_token`."""
    mine = [run for run in runs_of() if any(server.url == swarm_url.rstrip("/") for server in run.servers)]
    return token_for(mine[0], token) if mine else explicit_token(token)


def client_for(swarm_url: str | None, token: str | None, policy: RetryPolicy) -> SwarmClient:
    """A client of the server at ``swarm_url``, else of the one that runs here, else of the one at the usual address if
    its run folder is here.

    Raises:
        ConfigError: there is none, there are several, or the one at the usual address is another folder's.
    """
    from swarm.client import SwarmClient

    if swarm_url is not None:
        return SwarmClient(swarm_url, token=token_of(swarm_url, token), policy=policy)
    if (run_and_server := only_server()) is not None:
        run, server = run_and_server
        return SwarmClient(server.url, token=token_for(run, token), policy=policy)
    here = Path.cwd()
    nothing = f"nothing that `up` started runs in {here}"
    with ExitStack() as refused:
        client = SwarmClient(DEFAULT_URL, token=token, policy=policy)
        refused.callback(client.close)
        try:
            owner = client.status().run_dir
        except UnavailableError as exc:
            raise ConfigError(
                f"{nothing}, and no swarm server answers at {DEFAULT_URL}: start one (`swarm-gateway up FILE`), go to "
                "the folder of one that runs, or name it by --swarm-url"
            ) from exc
        if not owner or not (here in Path(owner).parents or Path(owner) in (here, *here.parents)):
            whose = f"of the run folder {owner}" if owner else "that does not say whose it is"
            raise ConfigError(
                f"{nothing}; at {DEFAULT_URL} there is a swarm server {whose}: if that is meant, add --swarm-url "
                f"{DEFAULT_URL}"
            )
        refused.pop_all()
    return client
