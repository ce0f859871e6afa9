"""``up``: run swarm servers, their engines and a gateway on one machine from one file, and stop them all at the end;
with work beside them (``train``), until that is done.

The file has three mappings: ``job`` (``TrainJob``), ``swarm`` (``ServerConfig``) and ``gateway`` (``GatewayConfig``);
or ``jobs`` with several of the first two, by name, and ``gateway``. Relative paths start from its folder. A signal sets
a flag that every wait checks, so that no half-started child stays.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gateway.launch.children import FOLDER_VARIABLE, Child, end_left_behind, left_behind
from gateway.launch.disk import DiskWatch
from gateway.launch.incumbents import Incumbents
from gateway.launch.plan import UpPlan
from gateway.launch.run_folder import (
    RUN_FILE,
    RunServer,
    check_free,
    held,
    run_of_this_process,
    set_aside,
    write_run,
    write_section,
)
from gateway.launch.servers import (
    LISTENING,
    START_DEADLINE,
    TOKEN_VARIABLE,
    LastingProcess,
    Server,
    ended,
    with_servers,
)
from gateway.launch.watch import OnEvent, UpFailedError
from gateway.rollout.server import NAME_VARIABLE
from swarm.checkpoints import checkpoint_folder, saved_step
from swarm.client import SwarmClient
from swarm.concurrency import hangups, on_signals
from swarm.errors import ConfigError, UnavailableError, UpstreamError
from swarm.http.serve import bind
from swarm.importer import python_path

PRIVATE_TOKEN_VARIABLE = "SWARM_PRIVATE_TOKEN"
_POLL = 0.5
# one that was killed in a deletion writes its whole journal anew before it listens
_SERVER_START_DEADLINE = 300.0
_STOP_ENGINE_DEADLINE = 60.0
# the gateway's own bounds are 10 s for requests, 10 s for the hooks of sessions and 20 s for submissions under way; the
# rest is for a busy machine
_GATEWAY_GRACE, _SERVER_GRACE = 45.0, 60.0
_WORK_GRACE = 30.0
# an engine whose server was killed notices within 10 s, and ends what it started
_LEFT_GRACE = 30.0

#: Work beside the servers: it gets the swarm server's address and token, and an event that is set when it is to end.
Work = Callable[[str, str, threading.Event], None]


def _begun(name: str, work: Callable[[], None]) -> Future[None]:
    """``work`` in a thread for whose end no process waits."""
    future = Future[None]()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as exc:
            future.set_exception(exc)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def _wait(future: Future[None], seconds: float, hurry: threading.Event) -> None:
    """Return at its end, after ``seconds``, or once ``hurry`` is set."""
    deadline = time.monotonic() + seconds
    while not future.done() and not hurry.wait(0.1) and time.monotonic() < deadline:
        pass


def run_up(plan: UpPlan, on_event: OnEvent, work: Work | None = None) -> None:
    """Run until Ctrl-C or SIGTERM, or until the last step of all jobs; then stop gateway, engines and servers. SIGHUP
    goes on to the gateway, but for that of a terminal, which ends everything.

    :class:`EngineWatch` decides when a dead engine is started again; meanwhile the gateway answers through its
    ``upstream``, or with 503.

    Args:
        plan: what to run.
        on_event: called with ``listening``, ``starting``, ``stopping``, ``stopped`` and the events of
            :class:`EngineWatch`, and their values; of several jobs the engine's events have ``job``, its name.
        work: begins in a thread once the engines are ready, with the first server; its end, and not the job's, ends
            everything. It stops before the servers do, and what it raises is raised here.

    Raises:
        ConfigError: a port or a run folder is in use, or a folder cannot be written: nothing was started; or a folder
            holds a run that the job does not go on with: all is stopped, and the run is as it was.
        UpFailedError: a server ended by itself, or the engine never became ready or died for good; everything is
            stopped.
    """
    for server in plan.servers:
        check_free(server.run_dir)
    if left := left_behind(plan.folder):
        # held: what another one has just started, or starts meanwhile, would be killed as left behind
        with held(plan.folder):
            on_event("waiting", {"processes": len(left), "run_dir": str(plan.folder)})
            end_left_behind(plan.folder, _LEFT_GRACE, threading.Event())
    check_ports(plan)
    DiskWatch(plan, on_event).check()
    with ExitStack() as folders:
        if plan.earlier_run == "fresh":
            _set_aside(plan, on_event)
        for server in plan.servers:
            folders.enter_context(held(server.run_dir))
        _run(plan, on_event, work)


def _run(plan: UpPlan, on_event: OnEvent, work: Work | None) -> None:
    """:func:`run_up` in run folders that are held."""
    up = _Up(plan, on_event, work)

    def stop() -> None:
        (up.hurry if up.stopping.is_set() else up.stopping).set()

    with on_signals(stop, signal.SIGINT, signal.SIGTERM), on_signals(up.reload_gateway, *hangups()):
        try:
            up.start()
            up.watch()
        except (UnavailableError, UpstreamError) as exc:
            # one that is late or dies of a command is no mistake of the user's: another start may find it well
            log = plan.servers[0].run_dir / "logs" / "swarm.log"
            raise UpFailedError(f"a swarm server failed: {exc.message}", [], log) from exc
        finally:
            try:
                up.stop()
            finally:
                for server in plan.servers:
                    (server.run_dir / RUN_FILE).unlink(missing_ok=True)
    if up.working is not None and up.working.done():
        up.working.result()


def _set_aside(plan: UpPlan, on_event: OnEvent) -> None:
    """Keep the runs of earlier starts beside the new ones."""
    for server in plan.servers:
        if server.job.checkpoint_dir and saved_step(server.job, server.run_dir):
            raise ConfigError(
                f"--fresh: the checkpoints in {checkpoint_folder(server.job, server.run_dir)} would be written over: "
                "name another job.checkpoint_dir"
            )
    for server in plan.servers:
        if (kept := set_aside(server.run_dir)) is not None:
            on_event("set_aside", {"run_dir": str(server.run_dir), "kept": str(kept)})


def check_ports(plan: UpPlan) -> None:
    """Raise early, with one line, for what would make a child fail.

    Raises:
        ConfigError: a port is in use, or given twice.
    """
    ports: set[int] = set()
    with ExitStack() as bound:
        # bound together, so that a port given twice is an error as well
        for host, port in (address for address in plan.addresses if address[1]):
            try:
                bound.enter_context(closing(bind(host, port)))
            except ConfigError as exc:
                if port not in ports:
                    raise
                text = f"port {port} is given twice: gateway, swarm servers and incumbents need a port each"
                raise ConfigError(text, code=exc.code) from exc
            ports.add(port)


class _Up:
    """All that one ``up`` starts.

    Attributes:
        stopping: set by the first signal, or when all is over.
        hurry: set by a signal after that.
        working: the work beside the servers, once it has begun.
    """

    def __init__(self, plan: UpPlan, on_event: OnEvent, work: Work | None) -> None:
        self._plan = plan
        self._tell = on_event
        self._work = work
        self._work_stopping = threading.Event()
        self._servers: list[Server] = []
        self._gateway: LastingProcess | None = None
        self._incumbents = Incumbents(plan, on_event, self.reload_gateway, self._client)
        self._gateway_url, self._reload_due = "", False
        self._disks = DiskWatch(plan, on_event)
        self.working: Future[None] | None = None
        self.stopping, self.hurry = threading.Event(), threading.Event()

    def start(self) -> None:
        """Start incumbents, servers, gateway and engines, or as many of them as a signal lets."""
        plan = self._plan
        self._incumbents.start()
        for planned in plan.servers:
            env = {PRIVATE_TOKEN_VARIABLE: plan.private_token, "PYTHONPATH": python_path()}
            env |= {TOKEN_VARIABLE: planned.token} if planned.token else {}
            log = planned.run_dir / "logs" / "swarm.log"
            child = self._spawn(planned.of("swarm server"), ["swarm", "start"], planned.swarm_section, log, env)
            self._servers.append(Server(planned, child, self._tell, plan.restart_pause))
        urls: dict[str, str] = {}
        for server in self._servers:
            url = self._listening(server.child, _SERVER_START_DEADLINE)
            if url is None:
                return
            server.connect(url, plan.private_token, plan.client_name)
            # before the gateway starts: its first look at the server sees the job
            server.sync_job(plan.earlier_run, plan.from_step)
            server.give_back()
            urls[server.plan.name] = url
        if plan.gateway_section is not None:
            # hooks may be modules beside the user's file
            env = {"PYTHONPATH": python_path(*([plan.file.parent.resolve()] if plan.file else []))}
            env |= {PRIVATE_TOKEN_VARIABLE: plan.private_token, NAME_VARIABLE: plan.client_name}
            of_servers = [f"--server={name}={url}" for name, url in urls.items()]
            reads = ["--reload-from", str(plan.file), *of_servers] if plan.file else []
            reads += [f"--incumbents={self._incumbents.file}"] if plan.successions else []
            log = plan.servers[0].run_dir / "logs" / "gateway.log"
            section = with_servers(plan.gateway_section, urls, plan.private_token)

            def start() -> Child:
                for server in self._servers:
                    server.give_back()
                return self._spawn("gateway", ["serve", *reads], section, log, env)

            self._gateway = LastingProcess(start, self._tell, plan.restart_pause)
            if (url := self._listening(self._gateway.child, START_DEADLINE)) is None:
                return
            # one that is started again has the same address; written now, for a disk that is full by then
            self._gateway_url, address = url, urlsplit(url)
            self._gateway.address = (address.hostname or "", address.port or 0)
            section["port"] = address.port
            write_section(log.parent.parent / "gateway.yaml", section)
            self._reload()
        self._tell_where(urls)
        self._start_engines()

    def watch(self) -> None:
        """Report events, and restart engines that died, until a signal or the end of the work, else of all jobs."""
        servers = self._servers
        while not self.stopping.wait(_POLL):
            if self._work is None and all(server.watch.finished for server in servers):
                return
            # the last steps are reported before all ends
            over = self.working is not None and self.working.done()
            self._incumbents.look()
            if self._gateway is not None:
                self._gateway.look()
            self._reload()
            self._check()
            if self._work is not None and self.working is None and all(server.watch.was_ready for server in servers):
                client = servers[0].client
                assert client is not None
                ask = partial(self._work, client.server_url, self._plan.private_token, self._work_stopping)
                self.working = _begun("work", ask)
            self._disks.look()
            self._start_engines()
            for server in servers:
                if server.engine_asked:
                    server.look(restarts=not over)
            if over:
                return

    def stop(self) -> None:
        """Stop the gateway first, so that its requests can still end; then the engines; then the servers."""
        # from here on a signal means: hurry
        self.stopping.set()
        if self.working is not None:
            self._work_stopping.set()
            _wait(self.working, _WORK_GRACE, self.hurry)
        if self._gateway is not None:
            self._tell("stopping", {"name": self._gateway.child.name})
            self._gateway.child.stop(_GATEWAY_GRACE, self.hurry)
        self._incumbents.stop(self.hurry)
        stopping: list[Future[None]] = []
        for server in self._servers:
            if server.engine_asked and server.child.exit_code is None and server.client is not None:
                self._tell("stopping", {"name": server.plan.of("engine")})
                # in threads, so that a second signal need not wait; the servers' shutdown stops their engines in any
                # case
                stopping.append(_begun("stop-engine", server.client.stop_engine))
        deadline = time.monotonic() + _STOP_ENGINE_DEADLINE
        for stopped in stopping:
            _wait(stopped, deadline - time.monotonic(), self.hurry)
        for server in self._servers:
            self._tell("stopping", {"name": server.child.name})
        with ThreadPoolExecutor(max(1, len(self._servers))) as pool:  # all at once
            # this stops the engines too, in case the command failed
            ends = [pool.submit(server.child.stop, _SERVER_GRACE, self.hurry) for server in self._servers]
        for server in self._servers:
            if server.client is not None:
                server.client.close()
        for end in ends:
            end.result()
        end_left_behind(self._plan.folder, _LEFT_GRACE, self.hurry)
        # from one that is replaced each time, no start goes on
        for server in self._servers if self._plan.earlier_run != "replace" else []:
            server.tell_unsaved()
        self._tell("stopped", {})

    def _start_engines(self) -> None:
        """Start them once the incumbents answer: two vLLMs that start at once measure each other's memory."""
        if self._incumbents.serves:
            for server in self._servers:
                if not server.engine_asked:
                    server.start_engine()

    def _client(self, job: str) -> SwarmClient:
        [client] = [server.client for server in self._servers if server.plan.name == job and server.client is not None]
        return client

    def reload_gateway(self) -> None:
        """Have the gateway read its settings anew: at once, or once it listens, since it may have read them before."""
        self._reload_due = True
        self._reload()

    def _reload(self) -> None:
        gateway = self._gateway if self._gateway_url else None
        if self._reload_due and gateway is not None and gateway.serves and gateway.child.exit_code is None:
            self._reload_due = False
            os.kill(gateway.child.pid, signal.SIGHUP)

    def _spawn(self, name: str, arguments: list[str], section: dict[str, Any], log: Path, env: dict[str, str]) -> Child:
        file = log.parent.parent / f"{log.stem}.yaml"
        write_section(file, section)
        options = ["--config", str(file), "--log-format", self._plan.log_format, "--stop-on-eof"]
        env = env | {FOLDER_VARIABLE: str(self._plan.folder)}
        return Child(name, [*self._plan.command, *arguments, *options], log, env)

    def _listening(self, child: Child, seconds: float) -> str | None:
        """The address that the child prints once its port is bound; None if a signal arrives first."""
        deadline = time.monotonic() + seconds
        while not self.stopping.wait(0.1):
            self._check()
            if child.exit_code is not None:
                raise ended(child)
            if match := child.find(LISTENING):
                self._tell("listening", {"name": child.name, "url": match[1], "log": str(child.log)})
                return match[1]
            if time.monotonic() > deadline:
                raise UpFailedError(
                    f"the {child.name} did not start within {seconds:.0f} s", child.last_lines(), child.log
                )
        return None

    def _tell_where(self, urls: dict[str, str]) -> None:
        """Let other commands find the servers."""
        plan = self._plan
        servers = [RunServer(job=server.name, url=urls[server.name], run_dir=server.run_dir) for server in plan.servers]
        run = run_of_this_process(plan.file, servers, self._gateway_url, plan.private_token)
        try:
            write_run(run)
        except ConfigError as exc:
            # on a full disk all goes on
            self._tell("warning", {"message": f"{exc.message}: other commands need --swarm-url"})

    def _check(self) -> None:
        for server in self._servers:
            if server.child.exit_code is not None:
                raise ended(server.child)
