"""``up``: run swarm servers, their engines and a gateway on one machine from one file, and stop them all at the end;
with work beside them (``train``), until that is done.

The file has three mappings: ``job`` (``TrainJob``), ``swarm`` (``ServerConfig``) and ``gateway`` (``GatewayConfig``);
or ``jobs`` with several of the first two, by name, and ``gateway``. Relative paths start from its folder. A signal sets
a flag that every wait checks, so that no half-started child stays.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import yaml

from gateway.children import Child
from gateway.watch import EngineWatch, OnEvent, UpFailedError
from swarm.client import RetryPolicy, SwarmClient
from swarm.errors import (
    ConfigError,
    ConflictError,
    RequestError,
    UnavailableError,
    UpstreamError,
)
from swarm.http.serve import bind
from swarm.importer import python_path
from swarm.job import TrainJob
from swarm.status import ServerStatus

TOKEN_VARIABLE = "SWARM_TOKEN"
PRIVATE_TOKEN_VARIABLE = "SWARM_PRIVATE_TOKEN"
LISTENING = r"listening on (https?://\S+)"
_POLL = 0.5
_START_DEADLINE = 60.0
_STOP_ENGINE_DEADLINE = 60.0
# the gateway's own bounds are 10 s for requests and 15 s for submissions under way; the rest is for a busy machine
_GATEWAY_GRACE, _SERVER_GRACE = 35.0, 60.0
_WORK_GRACE = 30.0


@dataclass(frozen=True)
class ServerPlan:
    """A swarm server with its engine.

    Attributes:
        name: of its job; empty where there is one job.
        swarm_section: what the server reads from a file.
    """

    job: TrainJob
    swarm_section: dict[str, Any]
    run_dir: Path
    name: str = ""
    token: str | None = None
    boot_timeout: float = 600.0

    def of(self, what: str) -> str:
        """``what`` with the name of its job, where there are several."""
        return f"{what} of {self.name}" if self.name else what


@dataclass(frozen=True)
class UpPlan:
    """Everything that ``up`` starts, validated; each section is what its server reads from a file.

    Attributes:
        servers: at least one; several have names.
        gateway_section: its ``swarm_url``, and that of the route named like a server, default to the address of the
            server that ``up`` starts; ``None``: there is no gateway. Its log is in the run folder of the first server.
        addresses: hosts and ports that the servers will listen on.
        module_folder: the folder of the user's file; hooks may be modules in it.
        private_token: lets the processes reach each other, even if tokens are created or revoked meanwhile.
    """

    servers: tuple[ServerPlan, ...]
    gateway_section: dict[str, Any] | None
    addresses: tuple[tuple[str, int], ...] = ()
    module_folder: Path | None = None
    private_token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    restart_pause: float = 2.0
    log_format: Literal["text", "json"] = "text"
    command: tuple[str, ...] = field(default=(sys.executable, "-P", "-m", "gateway.cli"))


#: Work beside the servers: it gets the swarm server's address and token, and an event that is set when it is to end.
Work = Callable[[str, str, threading.Event], None]


class _Working:
    """Work in a thread; ``error`` is what it raised."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self.error: Exception | None = None

        def run() -> None:
            try:
                work()
            except Exception as exc:
                self.error = exc

        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, seconds: float, hurry: threading.Event) -> None:
        """Return at its end, after ``seconds``, or once ``hurry`` is set."""
        deadline = time.monotonic() + seconds
        while not self.over and not hurry.is_set() and time.monotonic() < deadline:
            self._thread.join(0.1)


class _Server:
    """A swarm server that was started, and the watch over its engine."""

    def __init__(self, plan: ServerPlan, child: Child, on_event: OnEvent, restart_pause: float) -> None:
        self.plan = plan
        self.child = child
        self.client: SwarmClient | None = None
        self.engine_asked = False
        self.tell: OnEvent = on_event
        if plan.name:
            self.tell = lambda kind, values: on_event(kind, {"job": plan.name, **values})
        self.watch = EngineWatch(plan.job, plan.boot_timeout, plan.run_dir, self.tell, restart_pause=restart_pause)
        self._silent_since: float | None = None

    def connect(self, url: str, token: str) -> None:
        # one attempt per call: the loops here repeat calls, and a signal must not wait for retries
        policy = RetryPolicy(attempts=1, total=10.0)
        self.client = SwarmClient(url, token=token, request_timeout=10.0, policy=policy)

    def sync_job(self) -> None:
        assert self.client is not None
        self.client.sync_train_config(self.plan.job)

    def start_engine(self) -> None:
        assert self.client is not None
        self.engine_asked = True
        self.client.start_engine(wait=False)
        self.tell("starting", {"name": "engine", "model": self.plan.job.model, "log": str(self.engine_log)})

    @property
    def engine_log(self) -> Path:
        return self.plan.run_dir / "engine.log"

    def look(self, restarts: bool) -> None:
        """Report what is new; start a dead engine again if it ``restarts``.

        Raises:
            UpFailedError: the server does not answer, or the engine is given up; the message names the job.
        """
        assert self.client is not None
        try:
            status = self.client.status()
        except UnavailableError:
            # a busy server answers late; _check notices a dead one
            self._silent_since = self._silent_since or time.monotonic()
            if time.monotonic() - self._silent_since > _START_DEADLINE:
                message = f"the {self.child.name} has not answered for {_START_DEADLINE:.0f} s"
                raise UpFailedError(message, self.child.last_lines(), self.child.log) from None
            return
        self._silent_since = None
        try:
            self.watch.see(status)
            if self.watch.restart_due and restarts:
                self._restart(self.client, status)
        except UpFailedError as exc:
            if self.plan.name:
                raise UpFailedError(f"{self.plan.name}: {exc.message}", exc.last_lines, exc.log) from exc
            raise

    def _restart(self, client: SwarmClient, status: ServerStatus) -> None:
        """Start the engine again; the swarm server first waits for the end of all processes of the dead one."""
        try:
            client.start_engine(wait=False)
        except (ConflictError, UnavailableError, UpstreamError):
            pass  # the next status shows the outcome
        except RequestError as exc:
            self.watch.give_up(status, f"it cannot be started again: {exc.message}")


def run_up(plan: UpPlan, on_event: OnEvent, work: Work | None = None) -> None:
    """Run until Ctrl-C or SIGTERM, or until the last step of all jobs; then stop gateway, engines and servers.

    :class:`EngineWatch` decides when a dead engine is started again; meanwhile the gateway answers through its
    ``upstream``, or with 503.

    Args:
        plan: what to run.
        on_event: called with ``listening``, ``starting``, ``stopping``, ``stopped`` and the events of
            :class:`EngineWatch`, and their values; of several jobs the engine's events have ``job``, its name.
        work: begins in a thread once the engines are ready, with the first server; its end, and not the job's, ends
            everything. It stops before the servers do, and what it raises is raised here.

    Raises:
        ConfigError: a port is in use or the run folder cannot be written; nothing was started.
        UpFailedError: a server ended by itself, or the engine never became ready or died for good; everything is
            stopped.
    """
    _check_place(plan)
    up = _Up(plan, on_event, work)

    def on_signal(number: int, frame: FrameType | None) -> None:
        (up.hurry if up.stopping.is_set() else up.stopping).set()

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        up.start()
        up.watch()
    finally:
        try:
            up.stop()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
    if up.working is not None and up.working.error is not None:
        raise up.working.error


def _check_place(plan: UpPlan) -> None:
    """Raise early, with one line, for what would make a child fail."""
    for folder in (server.run_dir for server in plan.servers):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as exc:
            reason = exc.strerror or exc
            raise ConfigError(f"the run folder {folder} cannot be written ({reason}); set swarm.run_dir") from exc
    with ExitStack() as bound:
        # bound together, so that a port given twice is an error as well
        for host, port in plan.addresses:
            if port:
                bound.enter_context(closing(bind(host, port)))


class _Up:
    """All that one ``up`` starts.

    Attributes:
        stopping: set by the first signal, or when all is over.
        hurry: set by a signal after that.
        working: the work beside the servers, once it has begun.
    """

    def __init__(self, plan: UpPlan, on_event: OnEvent, work: Work | None) -> None:
        self._plan = plan
        self._on_event = on_event
        self._work = work
        self._work_stopping = threading.Event()
        self._servers: list[_Server] = []
        self._gateway: Child | None = None
        self.working: _Working | None = None
        self.stopping, self.hurry = threading.Event(), threading.Event()

    def start(self) -> None:
        """Start servers, gateway and engines, or as many of them as a signal lets."""
        plan = self._plan
        for one in plan.servers:
            env = {PRIVATE_TOKEN_VARIABLE: plan.private_token, "PYTHONPATH": python_path()}
            env |= {TOKEN_VARIABLE: one.token} if one.token else {}
            log = one.run_dir / "logs" / "swarm.log"
            child = self._spawn(one.of("swarm server"), ["swarm", "start"], one.swarm_section, log, env)
            self._servers.append(_Server(one, child, self._on_event, plan.restart_pause))
        urls: dict[str, str] = {}
        for server in self._servers:
            url = self._listening(server.child)
            if url is None:
                return
            server.connect(url, plan.private_token)
            # before the gateway starts: its first look at the server sees the job
            server.sync_job()
            urls[server.plan.name] = url
        if plan.gateway_section is not None:
            # hooks may be modules beside the user's file
            env = {"PYTHONPATH": python_path(*([plan.module_folder] if plan.module_folder else []))}
            log = plan.servers[0].run_dir / "logs" / "gateway.log"
            section = with_servers(plan.gateway_section, urls, plan.private_token)
            self._gateway = self._spawn("gateway", ["serve"], section, log, env)
            if self._listening(self._gateway) is None:
                return
        for server in self._servers:
            server.start_engine()

    def watch(self) -> None:
        """Report events, and restart engines that died, until a signal or the end of the work, else of all jobs."""
        servers = self._servers
        while not self.stopping.wait(_POLL):
            if self._work is None and all(server.watch.finished for server in servers):
                return
            # the last steps are reported before all ends
            over = self.working is not None and self.working.over
            self._check()
            if self._work is not None and self.working is None and all(server.watch.was_ready for server in servers):
                client = servers[0].client
                assert client is not None
                ask = partial(self._work, client.server_url, self._plan.private_token, self._work_stopping)
                self.working = _Working("work", ask)
            for server in servers:
                server.look(restarts=not over)
            if over:
                return

    def stop(self) -> None:
        """Stop the gateway first, so that its requests can still end; then the engines; then the servers."""
        # from here on a signal means: hurry
        self.stopping.set()
        if self.working is not None:
            self._work_stopping.set()
            self.working.wait(_WORK_GRACE, self.hurry)
        if self._gateway is not None:
            self._on_event("stopping", {"name": self._gateway.name})
            self._gateway.stop(_GATEWAY_GRACE, self.hurry)
        stopping: list[_Working] = []
        for server in self._servers:
            if server.engine_asked and server.child.exit_code is None and server.client is not None:
                self._on_event("stopping", {"name": server.plan.of("engine")})
                # in threads, so that a second signal need not wait; the servers' shutdown stops their engines in any
                # case
                stopping.append(_Working("stop-engine", server.client.stop_engine))
        deadline = time.monotonic() + _STOP_ENGINE_DEADLINE
        for one in stopping:
            one.wait(deadline - time.monotonic(), self.hurry)
        with ThreadPoolExecutor(max(1, len(self._servers))) as pool:  # all at once
            ends: list[Future[bool]] = []
            for server in self._servers:
                self._on_event("stopping", {"name": server.child.name})
                # this stops the engine too, in case the command failed
                ends.append(pool.submit(server.child.stop, _SERVER_GRACE, self.hurry))
        for server in self._servers:
            if server.client is not None:
                server.client.close()
        for end in ends:
            end.result()
        self._on_event("stopped", {})

    def _spawn(self, name: str, arguments: list[str], section: dict[str, Any], log: Path, env: dict[str, str]) -> Child:
        file = log.parent.parent / f"{log.stem}.yaml"
        # it may hold keys and tokens
        with open(file, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as writer:
            yaml.safe_dump(section, writer)
        options = ["--config", str(file), "--log-format", self._plan.log_format, "--stop-on-eof"]
        return Child(name, [*self._plan.command, *arguments, *options], log, env)

    def _listening(self, child: Child) -> str | None:
        """The address that the child prints once its port is bound; None if a signal arrives first."""
        deadline = time.monotonic() + _START_DEADLINE
        while not self.stopping.wait(0.1):
            self._check()
            if match := child.find(LISTENING):
                self._on_event("listening", {"name": child.name, "url": match[1], "log": str(child.log)})
                return match[1]
            if time.monotonic() > deadline:
                raise UpFailedError(
                    f"the {child.name} did not start within {_START_DEADLINE:.0f} s", child.last_lines(), child.log
                )
        return None

    def _check(self) -> None:
        for child in [*(one.child for one in self._servers), *([self._gateway] if self._gateway else [])]:
            if child.exit_code is not None:
                lines = child.last_lines()
                raise UpFailedError(f"the {child.name} ended with exit code {child.exit_code}", lines, child.log)


def with_servers(section: dict[str, Any], urls: dict[str, str], token: str) -> dict[str, Any]:
    """The gateway's ``section`` with the servers at ``urls`` and their ``token`` where it names no other server, which
    never sees that token."""
    own = {"swarm_url": next(iter(urls.values())), "swarm_token": token}
    gateway = section if "swarm_url" in section else section | own
    if "routes" not in section:
        return gateway
    routes: list[dict[str, Any]] = []
    for route in section["routes"]:
        if "swarm_url" in route:
            routes.append({"swarm_token": os.environ.get(TOKEN_VARIABLE, ""), **route})
        elif route["name"] in urls:
            routes.append(route | {"swarm_url": urls[route["name"]], "swarm_token": token})
        else:
            routes.append(route)
    return gateway | {"routes": routes}
