"""``up``: run a swarm server, an engine and a gateway on one machine from one file, and stop them all at the end; with
work beside them (``train``), until that is done.

The file has three mappings: ``job`` (``TrainJob``), ``swarm`` (``ServerConfig``) and ``gateway`` (``GatewayConfig``).
Relative paths start from its folder. A signal sets a flag that every wait checks, so that no half-started child stays.
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
class UpPlan:
    """Everything that ``up`` starts, validated; each section is what its server reads from a file.

    Attributes:
        gateway_section: its ``swarm_url`` defaults to the address of the server that ``up`` starts; ``None``: there is
            no gateway.
        addresses: hosts and ports that the servers will listen on.
        module_folder: the folder of the user's file; hooks may be modules in it.
        private_token: lets the processes reach each other, even if tokens are created or revoked meanwhile.
    """

    job: TrainJob
    swarm_section: dict[str, Any]
    gateway_section: dict[str, Any] | None
    run_dir: Path
    addresses: tuple[tuple[str, int], ...] = ()
    module_folder: Path | None = None
    token: str | None = None
    private_token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    boot_timeout: float = 600.0
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


@dataclass
class _Started:
    children: list[Child] = field(default_factory=list)
    client: SwarmClient | None = None
    engine_asked: bool = False
    working: _Working | None = None
    work_stopping: threading.Event = field(default_factory=threading.Event)


def run_up(plan: UpPlan, on_event: OnEvent, work: Work | None = None) -> None:
    """Run until Ctrl-C or SIGTERM, or until the job's last step; then stop the gateway, the engine and the server.

    :class:`EngineWatch` decides when a dead engine is started again; meanwhile the gateway answers through its
    ``upstream``, or with 503.

    Args:
        plan: what to run.
        on_event: called with ``listening``, ``starting``, ``stopping``, ``stopped`` and the events of
            :class:`EngineWatch`, and their values.
        work: begins in a thread once the engine is ready; its end, and not the job's, ends everything. It stops
            before the servers do, and what it raises is raised here.

    Raises:
        ConfigError: a port is in use or the run folder cannot be written; nothing was started.
        UpFailedError: a server ended by itself, or the engine never became ready or died for good; everything is
            stopped.
    """
    _check_place(plan)
    stopping = threading.Event()
    hurry = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if stopping.is_set():
            hurry.set()
        stopping.set()

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    started = _Started()
    try:
        _start(plan, started, stopping, on_event)
        _watch(plan, started, stopping, on_event, work)
    finally:
        stopping.set()  # from here on a signal means: hurry
        try:
            _stop(started, hurry, on_event)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
    if started.working is not None and started.working.error is not None:
        raise started.working.error


def _check_place(plan: UpPlan) -> None:
    """Raise early, with one line, for what would make a child fail."""
    try:
        plan.run_dir.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=plan.run_dir).close()
    except OSError as exc:
        reason = exc.strerror or exc
        raise ConfigError(f"the run folder {plan.run_dir} cannot be written ({reason}); set swarm.run_dir") from exc
    with ExitStack() as bound:
        # bound together, so that a port given twice is an error as well
        for host, port in plan.addresses:
            if port:
                bound.enter_context(closing(bind(host, port)))


def _start(plan: UpPlan, started: _Started, stopping: threading.Event, on_event: OnEvent) -> None:
    logs = plan.run_dir / "logs"
    env = {PRIVATE_TOKEN_VARIABLE: plan.private_token, "PYTHONPATH": python_path()}
    env |= {TOKEN_VARIABLE: plan.token} if plan.token else {}
    server = _spawn(plan, started, "swarm server", ["swarm", "start"], plan.swarm_section, logs / "swarm.log", env)
    swarm_url = _listening(server, started, stopping)
    if swarm_url is None:
        return
    on_event("listening", {"name": server.name, "url": swarm_url, "log": str(server.log)})
    # one attempt per call: the loops here repeat calls, and a signal must not wait for retries
    started.client = SwarmClient(
        swarm_url, token=plan.private_token, request_timeout=10.0, policy=RetryPolicy(attempts=1, total=10.0)
    )
    if plan.gateway_section is not None and not _start_gateway(
        plan, plan.gateway_section, swarm_url, started, stopping, on_event
    ):
        return
    started.client.sync_train_config(plan.job)
    started.engine_asked = True
    started.client.start_engine(wait=False)
    engine_log = plan.run_dir / "engine.log"
    on_event("starting", {"name": "engine", "model": plan.job.model, "log": str(engine_log)})


def _start_gateway(
    plan: UpPlan,
    section: dict[str, Any],
    swarm_url: str,
    started: _Started,
    stopping: threading.Event,
    on_event: OnEvent,
) -> bool:
    """Whether it listens; False if a signal arrives first."""
    gateway_section = {"swarm_url": swarm_url, **section}
    # for another server, named in the file, the gateway uses the environment's token
    own = {} if "swarm_url" in section else {TOKEN_VARIABLE: plan.private_token}
    # hooks may be modules beside the user's file
    gateway_env = own | {"PYTHONPATH": python_path(*([plan.module_folder] if plan.module_folder else []))}
    log = plan.run_dir / "logs" / "gateway.log"
    gateway = _spawn(plan, started, "gateway", ["serve"], gateway_section, log, gateway_env)
    gateway_url = _listening(gateway, started, stopping)
    if gateway_url is None:
        return False
    on_event("listening", {"name": gateway.name, "url": gateway_url, "log": str(gateway.log)})
    return True


def _spawn(
    plan: UpPlan,
    started: _Started,
    name: str,
    arguments: list[str],
    section: dict[str, Any],
    log: Path,
    env: dict[str, str],
) -> Child:
    file = plan.run_dir / f"{log.stem}.yaml"
    # it may hold keys and tokens
    with open(file, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as writer:
        yaml.safe_dump(section, writer)
    options = ["--config", str(file), "--log-format", plan.log_format, "--stop-on-eof"]
    child = Child(name, [*plan.command, *arguments, *options], log, env)
    started.children.append(child)
    return child


def _listening(child: Child, started: _Started, stopping: threading.Event) -> str | None:
    """The address that the child prints once its port is bound; None if a signal arrives first."""
    deadline = time.monotonic() + _START_DEADLINE
    while not stopping.wait(0.1):
        _check(started)
        if match := child.find(LISTENING):
            return match[1]
        if time.monotonic() > deadline:
            raise UpFailedError(
                f"the {child.name} did not start within {_START_DEADLINE:.0f} s", child.last_lines(), child.log
            )
    return None


def _check(started: _Started) -> None:
    for child in started.children:
        if child.exit_code is not None:
            lines = child.last_lines()
            raise UpFailedError(f"the {child.name} ended with exit code {child.exit_code}", lines, child.log)


def _watch(plan: UpPlan, started: _Started, stopping: threading.Event, on_event: OnEvent, work: Work | None) -> None:
    """Report events, and restart an engine that died, until a signal or the end of the work, else of the job."""
    watch = EngineWatch(plan.job, plan.boot_timeout, plan.run_dir, on_event, restart_pause=plan.restart_pause)
    silent_since: float | None = None
    while not stopping.wait(_POLL):
        if work is None and watch.finished:
            return
        # the last steps are reported before all ends
        over = started.working is not None and started.working.over
        _check(started)
        assert started.client is not None
        if work is not None and started.working is None and watch.was_ready:
            ask = partial(work, started.client.server_url, plan.private_token, started.work_stopping)
            started.working = _Working("work", ask)
        try:
            status = started.client.status()
        except UnavailableError:
            # a busy server answers late; _check notices a dead one
            silent_since = silent_since or time.monotonic()
            if time.monotonic() - silent_since > _START_DEADLINE:
                server = started.children[0]
                message = f"the swarm server has not answered for {_START_DEADLINE:.0f} s"
                raise UpFailedError(message, server.last_lines(), server.log) from None
        else:
            silent_since = None
            watch.see(status)
            if watch.restart_due and not over:
                _restart(started.client, watch, status)
        if over:
            return


def _restart(client: SwarmClient, watch: EngineWatch, status: ServerStatus) -> None:
    """Start the engine again; the swarm server first waits for the end of all processes of the dead one.

    Raises:
        UpFailedError: the job can no longer be started.
    """
    try:
        client.start_engine(wait=False)
    except (ConflictError, UnavailableError, UpstreamError):
        pass  # the next status shows the outcome
    except RequestError as exc:
        watch.give_up(status, f"it cannot be started again: {exc.message}")


def _stop(started: _Started, hurry: threading.Event, on_event: OnEvent) -> None:
    """Stop the gateway first, so that its requests can still end; then the engine; then the server."""
    if started.working is not None:
        started.work_stopping.set()
        started.working.wait(_WORK_GRACE, hurry)
    server, gateway = (*started.children, None, None)[:2]
    if gateway is not None:
        on_event("stopping", {"name": gateway.name})
        gateway.stop(_GATEWAY_GRACE, hurry)
    if started.client is not None and started.engine_asked and server is not None and server.exit_code is None:
        on_event("stopping", {"name": "engine"})
        # in a thread, so that a second signal need not wait for it; the server's shutdown stops the engine in any case
        _Working("stop-engine", started.client.stop_engine).wait(_STOP_ENGINE_DEADLINE, hurry)
    if server is not None:
        on_event("stopping", {"name": server.name})
        # this stops the engine too, in case the command failed
        server.stop(_SERVER_GRACE, hurry)
    if started.client is not None:
        started.client.close()
    on_event("stopped", {})
