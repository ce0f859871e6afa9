"""What ``up`` and ``train`` start, as read from their files and validated."""

from __future__ import annotations

import hashlib
import secrets
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from swarm.http.serve import url_of
from swarm.job import TrainJob
from swarm.kept_adapters import INCUMBENTS, adapter_folder, serves_kept

#: Starts our own command line.
COMMAND = (sys.executable, "-P", "-m", "gateway.cli")
#: What to do with the run that an earlier start left in the folder: go on with the same job; go on, although the job
#: has changed; keep it beside and begin anew; begin anew in its place.
EarlierRun = Literal["go_on", "resume", "fresh", "replace"]


@dataclass(frozen=True)
class ServerPlan:
    """A swarm server with its engine.

    Attributes:
        name: of its job; empty where there is one job.
        address: host and port on which it will listen; 0: any.
        swarm_section: what the server reads from a file.
        is_spared: whether users of some route before it are answered without its engine, by an upstream or by a model
            beside the engines: the engine's death ends nothing else.
    """

    job: TrainJob
    swarm_section: dict[str, Any]
    run_dir: Path
    name: str = ""
    address: tuple[str, int] = ("127.0.0.1", 0)
    token: str | None = None
    boot_timeout: float = 600.0
    is_spared: bool = False

    @property
    def url(self) -> str:
        """Of its address, see :func:`swarm.http.serve.url_of`."""
        return url_of(*self.address)

    def of(self, what: str) -> str:
        """``what`` with the name of its job, where there are several."""
        return f"{what} of {self.name}" if self.name else what


@dataclass(frozen=True)
class IncumbentPlan:
    """A model that answers users as it is, beside the engines.

    Attributes:
        model: its path, or the name of a hub's model.
        name: under which it is served.
        context_tokens: prompt and answer together, at most, as of the challenger's job.
        answer_tokens: at most, likewise.
        arguments: more of them for vLLM.
        routes: of the gateway, whose users it answers.
    """

    model: str
    name: str
    port: int
    context_tokens: int
    answer_tokens: int
    arguments: tuple[str, ...] = ()
    routes: tuple[str, ...] = ()

    def command(self, folder: Path) -> list[str]:
        """Arguments of our command line; vLLM may write into ``folder``."""
        options = {
            "name": self.name,
            "port": self.port,
            "max-model-len": self.context_tokens,
            "max-new-tokens": self.answer_tokens,
            "folder": folder,
        }
        flags = [f"--{name}={value}" for name, value in options.items()]
        return ["models", "serve", self.model, *flags, "--stop-on-eof", *self.arguments]


def export_command(run_dir: Path, step: int, out: Path, *, merged: bool) -> list[str]:
    """Arguments of our command line that write a kept version of ``run_dir`` as a model folder ``out``; ``merged``: of
    an adapter, with the weights below it."""
    flags = ["--step", str(step), "--out", str(out), "--run-dir", str(run_dir)]
    return ["models", "export", *flags, *(["--merged"] if merged else [])]


@dataclass(frozen=True)
class BesidePlan:
    """An incumbent that the job's own engine answers as, beside the newest version: ``name`` is as stages have it, and
    ``folder`` is that of its adapter."""

    route: str
    name: str
    folder: Path


@dataclass(frozen=True)
class SuccessionPlan:
    """A route whose promoted challengers become its incumbents.

    Attributes:
        route: of the gateway.
        server: of the job that trains them.
        name: under which they are served.
        first: the incumbent of the file, as stages name it.
        template: how they are served, but for model, name and port.
        lingers: seconds for which the last answers of an incumbent may go on once another one has its place.
    """

    route: str
    server: ServerPlan
    name: str
    first: str
    template: IncumbentPlan
    lingers: float

    @property
    def beside(self) -> bool:
        """Whether the job's own engine answers as a version, beside the newest."""
        return serves_kept(self.server.job)

    def folder(self, version: int) -> Path:
        """Where this version is written."""
        run_dir = self.server.run_dir
        return adapter_folder(run_dir, version) if self.beside else run_dir / INCUMBENTS / str(version)


@dataclass(frozen=True)
class UpPlan:
    """Everything that ``up`` starts, validated; each section is what its server reads from a file.

    Attributes:
        servers: at least one; several have names.
        gateway_section: its ``swarm_url``, and that of the route named like a server, default to the address of the
            server that ``up`` starts; ``None``: there is no gateway. Its log is in the run folder of the first server.
        incumbents: of routes whose incumbent is a model.
        successions: of routes that follow promotions.
        beside: incumbents that no process of their own answers as.
        gateway_address: host and port on which it will listen; 0: any.
        file: the user's, which the gateway reads again on a reload; hooks may be modules beside it.
        private_token: lets the processes reach each other, even if tokens are created or revoked meanwhile.
        earlier_run: what to do with a run that is in a run folder already.
        from_step: the saved step of that run to go back to; ``None``: it goes on from its last one.
    """

    servers: tuple[ServerPlan, ...]
    gateway_section: dict[str, Any] | None
    incumbents: tuple[IncumbentPlan, ...] = ()
    successions: tuple[SuccessionPlan, ...] = ()
    beside: tuple[BesidePlan, ...] = ()
    gateway_address: tuple[str, int] = ("127.0.0.1", 0)
    file: Path | None = None
    private_token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    restart_pause: float = 2.0
    log_format: Literal["text", "json"] = "text"
    earlier_run: EarlierRun = "go_on"
    from_step: int | None = None
    command: tuple[str, ...] = COMMAND

    @property
    def folder(self) -> Path:
        """Its run folder, of several the first."""
        return self.servers[0].run_dir

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Hosts and ports of all that listens."""
        gateway = [] if self.gateway_section is None else [self.gateway_address]
        models = [("127.0.0.1", incumbent.port) for incumbent in self.incumbents]
        return [*(server.address for server in self.servers), *gateway, *models]

    def server_of(self, route: str) -> ServerPlan:
        """The server that the gateway's ``route`` is before: of the job of this name, else the first."""
        return next((server for server in self.servers if server.name == route), self.servers[0])

    @property
    def client_name(self) -> str:
        """What asks the servers is called there so, gateway or work, at each start in this folder."""
        return f"up-{hashlib.sha256(str(self.folder).encode()).hexdigest()[:12]}"
