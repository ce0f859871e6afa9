"""The lab: trains one run on a swarm server, with an engine of its own, and has it evaluated when that is due.

Invariant: a run that its server still has goes on there; an evaluation runs a fresh copy of the code that the study
began with, in a process of its own, while no step is taken.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from swarm.client import RetryPolicy, SwarmClient
from swarm.client.wire import without_token
from swarm.concurrency import kill_group
from swarm.errors import AuthenticationError, ForbiddenError, SwarmGatewayError, UnavailableError
from swarm.evidence.learning import rewards_of
from swarm.importer import python_path
from swarm.job import TrainJob
from swarm.research import trees
from swarm.research.decisions import RunEnding, is_due, trouble
from swarm.research.episode_process import EpisodeOrder
from swarm.research.ledger import Run, State
from swarm.research.study import Study
from swarm.states import EngineState
from swarm.status import ServerStatus

#: Tries of one evaluation; each of its episodes has three of its own.
EVALUATIONS = 3
#: How long a server may be away: it is started again, or the line to it is down.
_AWAY_SECONDS = 60.0
_TICK = 0.5
_STOP_SECONDS = 180.0

#: The status of a server whose engine lives, see :func:`_alive`.
Alive = Callable[[], ServerStatus]
#: Called with the kind of an event and its values: those of the ledger, and ``doing``.
OnEvent = Callable[[str, Mapping[str, Any]], None]


class RunFailedError(SwarmGatewayError):
    """An attempt at a run failed; another may not."""


class _StoppedError(Exception):
    """``stopping`` came."""


class ServerGoneError(SwarmGatewayError):
    """A swarm server cannot be used: it does not answer, refuses the token, or runs somebody else's engine."""


@dataclass(frozen=True)
class Order:
    """A run for a server.

    Attributes:
        name: of the run at the server, the same whenever it is taken up.
        job: of the engine.
        measured: the steps that are measured already.
        on_step: told each step that the run has reached.
        measure: records the scores of the held-out tasks and the training rewards at a step; returns how the run ends,
            if it does.
    """

    run: Run
    name: str
    job: TrainJob
    settings: dict[str, Any]
    tree: trees.Tree
    shuffle: bool
    measured: frozenset[int]
    on_step: Callable[[int], None]
    measure: Callable[[int, list[float], dict[int, float]], RunEnding | None]


def project_of(state: State) -> str:
    """What the jobs of a study have as their ``project``."""
    return f"study-{state.study}"


class Lab:
    """Trains on swarm servers: one engine for each run, episodes in processes of their own.

    Args:
        folder: of the study; what the processes of a run print goes to its ``runs/logs``.
        state: of a study that has begun.
    """

    def __init__(self, study: Study, folder: Path, state: State, token: str | None, on_event: OnEvent) -> None:
        self._study, self._folder, self._digest, self._token = study, folder, state.code, token
        self._project = project_of(state)
        self._on_event = on_event
        self._logs = folder / trees.RUNS / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)

    def run(self, server: str, order: Order, stopping: threading.Event) -> RunEnding | None:
        """Do the run, or go on with it; how it ends, ``None`` if ``stopping`` came first.

        Raises:
            RunFailedError: this attempt failed.
            ServerGoneError: it cannot be done there.
        """
        policy = RetryPolicy(attempts=5, total=60.0)
        try:
            with SwarmClient(server, token=self._token, policy=policy) as client:
                alive = partial(_alive, client, stopping)
                self._boot(client, order, alive)
                return self._train(alive, server, order)
        except _StoppedError:
            return None
        except (UnavailableError, AuthenticationError, ForbiddenError) as exc:
            raise ServerGoneError(f"{without_token(server)}: {exc.message}") from exc
        except (RunFailedError, ServerGoneError):
            raise
        except SwarmGatewayError as exc:
            raise RunFailedError(exc.message) from exc

    def release(self, server: str) -> None:
        """Stop the engine there, which nothing needs any more."""
        try:
            with SwarmClient(server, token=self._token, policy=RetryPolicy(attempts=2, total=20.0)) as client:
                if self._is_ours(client.status()):  # another study may have it by now
                    client.stop_engine()
        except SwarmGatewayError as exc:
            self._on_event("doing", {"run": "", "words": f"{without_token(server)} was not released: {exc.message}"})

    def _is_ours(self, status: ServerStatus) -> bool:
        return status.job is not None and status.job.project == self._project

    def _boot(self, client: SwarmClient, order: Order, alive: Alive) -> None:
        """Let the engine of this run roll: the one that runs, or a new one."""
        status = client.status()
        offline = status.engine.engine_status is EngineState.OFFLINE
        if not offline and not self._is_ours(status):
            stop = f"swarm-gateway swarm engine stop --swarm-url {client.server_url}"
            raise ServerGoneError(
                f"{client.server_url} runs another job: stop its engine (`{stop}`), or name another server"
            )
        if offline and order.measured:
            raise RunFailedError("its engine is gone, and its weights with it")
        if offline or status.job is None or status.job.experiment != order.name:
            self._tell(order, "starts an engine")
            if not offline:
                client.stop_engine()
                client.wait_for_state(EngineState.OFFLINE, wait_seconds=_STOP_SECONDS)
            if packages := self._study.sync_packages:
                code = trees.packed(order.tree, packages)
                client.sync_train_code(code, revision=order.tree.digest[:12], message=f"run {order.name}")
            client.sync_train_config(order.job)
            client.start_engine(wait=False)
        else:
            self._tell(order, f"goes on at step {status.engine.global_step}")
        deadline = time.monotonic() + self._study.boot_seconds
        while alive().engine.engine_status is not EngineState.ROLLING:
            if time.monotonic() > deadline:
                raise RunFailedError(f"its engine does not roll after {self._study.boot_seconds:g} s")
            time.sleep(_TICK)

    def _train(self, alive: Alive, server: str, order: Order) -> RunEnding:
        study = self._study
        measured = set(order.measured)
        step, moved = -1, time.monotonic()
        with self._process("train", server, order, order.tree) as child:
            while True:
                line, status = child.next(_TICK), alive()
                if status.engine.global_step != step or line:
                    step, moved = status.engine.global_step, time.monotonic()
                    order.on_step(step)
                    self._tell(order, f"step {step} of {study.steps}")
                if end := trouble(study, order.run, status.steps):
                    return end
                if line and "due" in line:
                    if is_due(study, order.run, step) and step not in measured:
                        scores = self._evaluate(alive, server, order)
                        if isinstance(scores, RunEnding):
                            return scores
                        measured.add(step)
                        if end := order.measure(step, scores, rewards_of(status.steps)):
                            return end
                    child.go_on()
                    moved = time.monotonic()
                elif line is not None:
                    raise RunFailedError(line.get("failed", "") or f"its episodes ended at step {step} without a score")
                elif time.monotonic() - moved > study.early_stop.stall_seconds:
                    return RunEnding(
                        "failed", f"stalled: no step for {study.early_stop.stall_seconds:g} s after {step}"
                    )

    def _evaluate(self, alive: Alive, server: str, order: Order) -> list[float] | RunEnding:
        """The scores; an evaluation that fails is made again, while the weights wait for it."""
        evaluator, why = self._study.evaluator, ""
        for attempt in range(1, EVALUATIONS + 1):
            # a fresh copy for each evaluation, without bytecode: nothing that an experiment left there is imported
            tree = trees.kept(self._folder, self._digest, f"evaluator/{order.run.name}")
            self._tell(order, "evaluates")
            deadline = time.monotonic() + evaluator.seconds
            with self._process("evaluate", server, order, tree) as child:
                while (line := child.next(_TICK)) is None:
                    alive()
                    if time.monotonic() > deadline:
                        raise RunFailedError(f"the evaluation took longer than {evaluator.seconds:g} s")
            if "scores" in line:
                return line["scores"]
            # an engine that died is no fault of the evaluator
            alive()
            why = f"the evaluation failed {attempt} times: {line.get('failed', 'it ended')}"
            self._tell(order, why)
        return RunEnding("failed", why)

    def _process(self, what: str, server: str, order: Order, tree: trees.Tree) -> StudyProcess:
        episodes = EpisodeOrder(
            study=self._study,
            server=server,
            token=self._token,
            folder=str(tree.folder),
            settings=order.settings,
            seed=order.job.seed,
            shuffle=order.shuffle,
        )
        # of Python's own, which writes an infinity too
        return StudyProcess(what, json.dumps(episodes.model_dump()), self._logs / f"{order.name}.log")

    def _tell(self, order: Order, words: str) -> None:
        self._on_event("doing", {"run": order.run.name, "words": words})


def _alive(client: SwarmClient, stopping: threading.Event) -> ServerStatus:
    """The status of the server, whose engine is not OFFLINE; a server that is away has its time to come back.

    Raises:
        RunFailedError: the engine died.
        UnavailableError: the server is still away.
        _StoppedError: ``stopping`` came.
    """
    deadline = time.monotonic() + _AWAY_SECONDS
    while not stopping.is_set():
        try:
            status = client.status()
        except UnavailableError:
            if time.monotonic() > deadline:
                raise
        else:
            if status.engine.engine_status is EngineState.OFFLINE:
                words = [f"the engine died: {status.engine.engine_status_detail}", *status.last_lines]
                raise RunFailedError("\n".join(words))
            return status
    raise _StoppedError


class StudyProcess:
    """A process of :mod:`swarm.research.episode_process`; it ends with the block, and with this process."""

    def __init__(self, what: str, order: str, log: Path) -> None:
        self._lines: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-B", "-m", "swarm.research.episode_process", what],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                # what others print need not be UTF-8
                errors="replace",
                # Ctrl-C is for this process, which ends it
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": python_path()},
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in = self._process.stdin
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()
        self._say(order)

    def next(self, seconds: float) -> dict[str, Any] | None:
        """What it tells next, an empty mapping once it has ended; ``None`` if nothing comes in ``seconds``."""
        try:
            return self._lines.get(timeout=seconds)
        except queue.Empty:
            return None

    def go_on(self) -> None:
        """Answer it."""
        self._say("go on")

    def _say(self, line: str) -> None:
        try:
            self._in.write(line + "\n")
            self._in.flush()
        except OSError:
            pass  # it has ended, which `next` tells

    def _read(self, lines: IO[str]) -> None:
        for line in lines:
            # a process that is killed may leave half a line, and what Python imports at its start may print
            with contextlib.suppress(ValueError):
                if isinstance(news := json.loads(line), dict):
                    self._lines.put(news)
        self._lines.put({})

    def __enter__(self) -> StudyProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        # with all that it started
        kill_group(self._process.pid)
        self._reader.join()
        # what it never read cannot be flushed
        with contextlib.suppress(OSError), self._process:
            pass
