"""A swarm server under ``up``: its job, the run that it goes on with, its engine; and the gateway before the servers.

Invariant: a dead engine or gateway is started again as often in a row as :data:`MAX_RESTARTS` says; a run that was
saved is never trained over, or mixed with another job, unless the user says so.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from gateway.launch.children import Child
from gateway.launch.plan import EarlierRun, ServerPlan
from gateway.launch.watch import EngineWatch, OnEvent, UpFailedError
from gateway.stats import HOOK_FAILS
from swarm.checkpoints import check_kept, checkpoint_folder, saved_step
from swarm.client import RetryPolicy, SwarmClient
from swarm.client.control import differences
from swarm.errors import ConfigError, ConflictError, RequestError, SwarmGatewayError, UnavailableError, UpstreamError
from swarm.importer import load_attribute
from swarm.job import TrainJob
from swarm.status import MAX_RESTARTS, EngineFailure, ServerStatus

TOKEN_VARIABLE = "SWARM_TOKEN"
LISTENING = r"listening on (https?://\S+)"
START_DEADLINE = 60.0
_HOOK_FAILS = re.compile(re.escape(HOOK_FAILS) + r": (?P<code>[^:]+): (?P<sentence>.*)")
#: A line of our logs that tells no failure, in both of their forms.
_NO_CAUSE = re.compile(r'\S+ \S+ (DEBUG|INFO|WARNING) |\{.*"level": "(debug|info|warning)"')
#: A gateway that has lived for so long does not die of its start.
_LASTING_SECONDS = 60.0
_START_PAUSE = 2.0
_MOST_EPISODES = 10_000
#: More than an engine does between two looks.
_LATEST_STEPS = 100


class Server:
    """A swarm server that was started, and the watch over its engine."""

    def __init__(self, plan: ServerPlan, child: Child, on_event: OnEvent, restart_pause: float) -> None:
        self.plan = plan
        self.child = child
        self.client: SwarmClient | None = None
        self.engine_asked = False
        self.tell: OnEvent = on_event
        if plan.name:
            self.tell = lambda kind, values: on_event(kind, {"job": plan.name, **values})
        self.watch = EngineWatch(plan, self.tell, restart_pause)
        self._silent_since: float | None = None
        #: `engine_changes` of the last status with steps
        self._changes: int | None = None

    def connect(self, url: str, token: str, client_name: str) -> None:
        # one attempt per call: the loops here repeat calls, and a signal must not wait for retries
        policy = RetryPolicy(attempts=1, total=10.0)
        self.client = SwarmClient(url, token, client_name, request_timeout=10.0, policy=policy)

    def give_back(self) -> None:
        """End the episodes of a client of this name that died: nobody else does, and each holds a place of the pool for
        minutes."""
        assert self.client is not None
        with suppress(SwarmGatewayError):  # they then end by their own timeouts
            running = self.client.status(episodes=_MOST_EPISODES).running
            mine = [episode.episode_uuid for episode in running if episode.client_uuid == self.client.client_uuid]
            self.client.abort(mine, "client_died")

    def sync_job(self, earlier_run: EarlierRun, from_step: int | None = None) -> None:
        """Hand the job over; it goes on with the run that is in the folder, as far as that is saved, or from a saved
        step before that.

        Raises:
            ConfigError: the folder holds the run of another job, or a finished one; or ``from_step`` is not kept.
        """
        assert self.client is not None
        status, job = self.client.status(), self.plan.job
        checkpoints = checkpoint_folder(job, self.plan.run_dir)
        if from_step is not None:
            check_kept(checkpoints, from_step)
        saved = from_step or saved_step(job, self.plan.run_dir)
        done = max(saved, status.steps[-1].step if status.steps else 0)
        if done and earlier_run != "replace":
            changes_allowed = earlier_run == "resume"
            check_earlier(self.plan, status.job, done, saved, changes_allowed=changes_allowed)
            values = {"step": done, "saved": saved, "run_dir": str(self.plan.run_dir)}
            if from_step is None:
                self.tell("going_on", values)
            else:
                kept = load_attribute("adapters.verl.checkpoints:roll_back")(checkpoints, from_step)
                self.tell("rolled_back", values | {"kept": str(kept) if kept else None})
            job = job.model_copy(update={"resume": saved > 0})
        self.client.sync_train_config(job, from_step=from_step)

    def tell_unsaved(self) -> None:
        """Report the steps that the next start will not find in a checkpoint."""
        done, saved = self.watch.last_step, saved_step(self.plan.job, self.plan.run_dir)
        if done > saved:
            self.tell("unsaved", {"step": done, "saved": saved})

    def start_engine(self) -> None:
        """Start it, unless somebody has done so; of a server that answers late, it is asked again at the next call.

        Raises:
            UpFailedError: the server has not answered for :data:`START_DEADLINE`.
        """
        assert self.client is not None
        try:
            self.client.start_engine(wait=False)
        except ConflictError:
            pass  # the next status shows who was faster
        except (UnavailableError, UpstreamError) as exc:
            self._bear_silence(exc)
            return
        self.engine_asked, self._silent_since = True, None
        self.watch.begin()
        log = self.plan.run_dir / "engine.log"
        self.tell("starting", {"name": "engine", "model": self.plan.job.model, "log": str(log)})

    def look(self, restarts: bool) -> None:
        """Report what is new; start a dead engine again if it ``restarts``.

        Raises:
            UpFailedError: the server does not answer, or the engine is given up; the message names the job.
        """
        assert self.client is not None
        try:
            status = self._status(self.client)
        except (UnavailableError, UpstreamError) as exc:
            self._bear_silence(exc)
            return
        self._silent_since = None
        self.watch.see(status)
        if self.watch.restart_due and restarts:
            self._restart(self.client, status)

    def _bear_silence(self, error: SwarmGatewayError) -> None:
        """A busy server answers late, or once with an error of its own; a dead one is noticed elsewhere."""
        self._silent_since = self._silent_since or time.monotonic()
        if time.monotonic() - self._silent_since > START_DEADLINE:
            message = f"the {self.child.name} has given no answer for {START_DEADLINE:.0f} s: {error.message}"
            raise UpFailedError(message, self.child.last_lines(), self.child.log)

    def _status(self, client: SwarmClient) -> ServerStatus:
        """With steps, and evaluations, only where the engine has changed: of a long run they are a megabyte."""
        if self._changes is not None:
            status = client.status(episodes=0, steps=0)
            if status.engine_changes == self._changes:
                return status
        status = client.status(episodes=0, steps=_LATEST_STEPS)
        self._changes = status.engine_changes
        return status

    def _restart(self, client: SwarmClient, status: ServerStatus) -> None:
        """Start the engine again; the swarm server first waits for the end of all processes of the dead one."""
        try:
            client.start_engine(wait=False)
        except (ConflictError, UnavailableError, UpstreamError):
            pass  # the next status shows the outcome
        except RequestError as exc:
            self.watch.give_up(status, f"it cannot be started again: {exc.message}")


def check_earlier(plan: ServerPlan, ran: TrainJob | None, done: int, saved: int, *, changes_allowed: bool) -> None:
    """Refuse to go on with the run of another job, or with a finished one.

    Args:
        plan: what is to run.
        ran: the job of the run in the folder, if that is known.
        done: steps of that run.
        saved: the step of the checkpoint with which it would go on; 0: there is none.
        changes_allowed: another job may go on with it.

    Raises:
        ConfigError: names the fields that differ, or the steps, and what to do.
    """
    job = plan.job
    run = f"the run folder {plan.run_dir} holds a run that has done {done} steps"
    resume = f"--resume goes on from its checkpoint of step {saved}" if saved else "none of them is saved"
    fresh = "--fresh begins anew and keeps that run beside"
    if ran is None:
        raise ConfigError(
            f"{checkpoint_folder(plan.job, plan.run_dir)} holds checkpoints, and no {plan.run_dir / 'journal.db'} says "
            "of which job and model: restore it from a copy, name another job.checkpoint_dir, or move them away"
        )
    if saved >= job.total_training_steps and not job.serve_after_training:
        raise ConfigError(
            f"{run}, its last checkpoint is of step {saved}, and total_training_steps is {job.total_training_steps}: "
            f"raise it and add --resume to train on; {fresh}"
        )
    changed = [name for name in differences(job, ran) if name != "resume"]
    if changed and not changes_allowed:
        raise ConfigError(f"{run}; the job differs in {', '.join(changed)}: {resume}, {fresh}")
    if "model" in changed and saved:
        raise ConfigError(f"{run}; its weights would replace those of the job's model, {job.model_name!r}: {fresh}")
    # verl would find no part of it for some rank, or put an adapter into one of another shape or weight
    if saved and (other := next((name for name in ("lora", "n_gpu", "nnodes") if name in changed), "")):
        raise ConfigError(f"{run}; its checkpoint goes on with the same job.{other} only: {fresh}")


class LastingProcess:
    """A process that answers at one address, started again where it dies, as a dead engine is.

    Args:
        start: it.
        on_event: called with ``{kind}_restarting`` and ``{kind}_recovered``.
        kind: of process.
        boot_seconds: within which it listens.

    Attributes:
        address: host and port, once it listens.
        serves: whether it listened when last looked at; set it to ``False`` to be told when it first does.
    """

    address: tuple[str, int] = ("", 0)

    def __init__(
        self,
        start: Callable[[], Child],
        on_event: OnEvent,
        restart_pause: float,
        kind: str = "gateway",
        boot_seconds: float = _LASTING_SECONDS,
    ) -> None:
        self.child = start()
        self._start = start
        self._kind = kind
        self._boot_seconds = boot_seconds
        self._on_event = on_event
        self._restart_pause = restart_pause
        self._deaths = 0
        self._started_at = time.monotonic()
        self._restart_at: float | None = None
        self.serves, self._warned_of = True, ""

    def look(self) -> None:
        """Report its death and its return, and the first of each kind of failure of its hooks; start it again when
        that is due.

        Raises:
            UpFailedError: it died too often in a row.
        """
        now = time.monotonic()
        if self._restart_at is not None:
            if now >= self._restart_at:
                try:
                    self.child, self._started_at, self._restart_at = self._start(), now, None
                except OSError as exc:
                    # the disk is full, say: that is no death
                    self._restart_at = now + _START_PAUSE
                    self._say(
                        f"the {self.child.name} cannot be started ({exc}); it is tried again every {_START_PAUSE:.0f} s"
                    )
            return
        for line in self.child.new_lines():
            if HOOK_FAILS in line and (failure := _HOOK_FAILS.search(_message(line))):
                self._on_event("hook_failed", failure.groupdict())
        if self.child.exit_code is None:
            if not self.serves and listens(self.address):
                self.serves = True
                values = {"name": self.child.name, "seconds": round(now - self._started_at, 1)}
                self._on_event(f"{self._kind}_recovered", values)
            elif now - self._started_at > self._boot_seconds:
                if self.serves:
                    self._deaths = 0
                else:
                    name, seconds = self.child.name, self._boot_seconds
                    self._say(f"the {name} has not listened for {seconds:.0f} s since its start: it is ended")
                    self.child.stop(0.0)
            return
        self._deaths, self.serves = self._deaths + 1, False
        # what it started goes with it
        self.child.stop(0.0)
        death = ended(self.child)
        if self._deaths > MAX_RESTARTS:
            raise death
        pause = EngineFailure(reason=death.message, count=self._deaths).pause(self._restart_pause)
        self._restart_at, self._warned_of = now + pause, ""
        values = {"attempt": self._deaths, "of": MAX_RESTARTS, "in_seconds": round(pause, 1)}
        values |= {"name": self.child.name, "reason": death.message, "last_lines": death.last_lines}
        self._on_event(f"{self._kind}_restarting", values)

    def _say(self, text: str) -> None:
        if text != self._warned_of:
            self._warned_of = text
            self._on_event("warning", {"message": text})


def _message(line: str) -> str:
    """The message of a line of our log, in either form."""
    try:
        return str(json.loads(line)["message"]) if line.startswith("{") else line
    except (ValueError, LookupError):
        return line


def listens(address: tuple[str, int]) -> bool:
    """Whether somebody listens there: a log on a full disk does not tell."""
    try:
        socket.create_connection(address, timeout=0.2).close()
    except OSError:
        return False
    return True


def ended(child: Child) -> UpFailedError:
    """How it ended, with those of its last lines that may say why."""
    code = child.exit_code
    how = f"ended with exit code {code}"
    if code is not None and -code in set(signal.Signals):
        how = f"was killed by {signal.Signals(-code).name}"
    lines = [line for line in child.last_lines() if not _NO_CAUSE.match(line)]
    return UpFailedError(f"the {child.name} {how}", lines, child.log)


def with_servers(section: dict[str, Any], urls: dict[str, str], token: str) -> dict[str, Any]:
    """The gateway's ``section`` with the servers at ``urls`` and their ``token`` where it names no other server, which
    never sees that token."""
    own = {"swarm_url": next(iter(urls.values())), "swarm_token": token}
    gateway = section if "swarm_url" in section else section | own
    mine = section.get("swarm_token", os.environ.get(TOKEN_VARIABLE, ""))

    def before(route: Any) -> Any:
        match route:
            case {"swarm_url": _}:
                return {"swarm_token": mine, **route}
            case {"name": str(name)} if name in urls:
                return route | {"swarm_url": urls[name], "swarm_token": token}
            case _:
                return route  # the gateway's own check says what is wrong

    match section:
        case {"routes": list(routes)}:
            return gateway | {"routes": [before(route) for route in routes]}
        case _:
            return gateway
