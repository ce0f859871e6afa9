"""Runs a study: takes the next action, gives runs to the swarm servers that are free, and records what they measure.

Invariant: the ledger has a claim before a server is touched, a score before the run goes on, and an end before the next
run is begun there. After a kill the engine that still has a run goes on with it; a run that has ended is never begun.
"""

from __future__ import annotations

import copy
import math
import threading
import uuid
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from swarm.client.wire import without_token
from swarm.data import located, read_tasks
from swarm.errors import ConfigError, SwarmGatewayError
from swarm.research import trees
from swarm.research.decisions import Propose, Record, RunEnding, ending, most_trained, next_action
from swarm.research.lab import Lab, OnEvent, Order, RunFailedError, ServerGoneError, project_of
from swarm.research.ledger import BASE, Ledger, Run
from swarm.research.proposing import ProposerError, propose, pruned
from swarm.research.study import Study
from swarm.types import Task

#: Attempts at a run whose engine or episodes fail.
ATTEMPTS = 3
#: Seconds before a proposer that failed is asked again: a model may say something else the next time.
PAUSES = (1.0, 5.0)
_TICK = 0.5


class StudyStoppedError(SwarmGatewayError):
    """The study cannot go on now; it can be resumed."""


def begin(study: Study, folder: Path, ledger: Ledger) -> None:
    """Begin a study, with the code that git tracks now.

    Raises:
        ConfigError: it has begun, its code is not under version control, or it trains on a held-out task.
    """
    if ledger.state.study:
        raise ConfigError(f"the study {folder} has begun: `swarm-gateway research resume {folder}` goes on with it")
    _check_held_out(study, folder / study.code)
    digest, locked, revision = trees.snapshot(study, folder)
    name = f"{folder.resolve().name}-{uuid.uuid4().hex[:6]}"
    ledger.append("begun", study=name, locked=locked, code=digest, revision=revision)


def _check_held_out(study: Study, folder: Path) -> None:
    """Check that no held-out task is trained on, under whatever id; what a function or a hub gives is not read."""
    held_out, trained = (located(path, folder) for path in (study.evaluator.tasks, study.tasks))
    if not (isinstance(held_out, Path) and isinstance(trained, Path)):
        return
    held_ids = {_content(task): task.task_id for task in read_tasks(held_out)}
    if twin := next((task for task in read_tasks(trained) if _content(task) in held_ids), None):
        raise ConfigError(
            f"{trained}: its task {twin.task_id!r} is the held-out task {held_ids[_content(twin)]!r} of {held_out}: "
            "leave it out of one of them"
        )


def _content(task: Task) -> str:
    return task.model_dump_json(exclude={"task_id"})


class Runner:
    """Runs the study in ``folder``, whose ``ledger`` is held, until its end or until ``stopping`` is set."""

    def __init__(self, study: Study, folder: Path, ledger: Ledger, lab: Lab, on_event: OnEvent) -> None:
        if not ledger.state.study:
            raise ConfigError(f"the study {folder} has not begun: `swarm-gateway research run {folder}`")
        trees.check_locked(study, folder, ledger.state.locked)
        self._study, self._folder, self._ledger, self._lab, self._on_event = study, folder, ledger, lab, on_event
        self._base = trees.kept(folder, ledger.state.code, "base")
        self._gone: dict[str, str] = {}
        #: run -> the step of its attempt; not there after a kill until a server tells it
        self._reached: dict[str, int] = {}

    def run(self, stopping: threading.Event) -> None:
        """See the class.

        Raises:
            StudyStoppedError: no server can be used.
            ProposerError: the proposer failed three times in a row.
        """
        study, state = self._study, self._ledger.state
        busy: dict[Future[None], tuple[str, str]] = {}
        with ThreadPoolExecutor(len(study.servers), "runs") as pool:
            try:
                while not stopping.is_set():
                    for done in [task for task in busy if task.done()]:
                        del busy[done]
                        done.result()
                    usable = [server for server in study.servers if server not in self._gone]
                    if not usable and not busy:
                        raise StudyStoppedError("no swarm server can be used: " + "; ".join(self._gone.values()))
                    taken = {server for server, _ in busy.values()}
                    free = [server for server in usable if server not in taken]
                    with self._ledger.lock:
                        action = next_action(study, state, frozenset(name for _, name in busy.values()))
                    if isinstance(action, Record):
                        self._record(action.event, **action.values)
                    elif isinstance(action, Propose) and free:
                        # a proposal that waits for a free server is made with the scores of the run before it
                        self._propose(action.experiment, stopping)
                    elif isinstance(action, Run) and free:
                        # the next action is decided with this claim
                        server, attempt = self._claim(action, free)
                        busy[pool.submit(self._do, action, server, attempt, stopping)] = (server, action.name)
                    elif action is None and not busy:
                        break
                    else:
                        wait(busy, _TICK, FIRST_COMPLETED)
            except BaseException:
                stopping.set()
                raise
        for done in busy:
            done.result()
        if state.finished is not None:
            for server in study.servers:
                self._lab.release(server)

    def _claim(self, run: Run, free: Sequence[str], *, again: bool = False) -> tuple[str, int]:
        """Record that a server takes ``run``: of those that are ``free`` the one that has it already, where it goes on
        unless it failed there (``again``). Returns the server and the number of the attempt."""
        claimed = self._ledger.state.runs.get(run.name)
        server = next((name for name in free if claimed and without_token(name) == claimed.server), free[0])
        address, attempt, lost, fresh = without_token(server), 1, 0, True
        if claimed is not None:
            fresh = again or claimed.server != address
            attempt, lost = (claimed.attempt + 1, self._trained(run)) if fresh else (claimed.attempt, 0)
        self._record("claimed", run=run.name, server=address, attempt=attempt, lost=lost, again=again)
        if fresh:
            self._reached[run.name] = 0
        return server, attempt

    def _trained(self, run: Run) -> int:
        """Steps that the attempt has trained; if nobody saw them, as many as it may have."""
        return self._reached.get(run.name, most_trained(self._study, self._ledger.state.runs[run.name]))

    def _record(self, event: str, **values: Any) -> None:
        self._ledger.append(event, **values)
        self._on_event(event, values)

    def _tell(self, run: str, words: str) -> None:
        self._on_event("doing", {"run": run, "words": words})

    def _propose(self, name: str, stopping: threading.Event) -> None:
        with self._ledger.lock:
            state = copy.deepcopy(self._ledger.state)
        pauses = iter(PAUSES)
        while True:
            try:
                proposal = propose(self._study, self._folder, self._base.folder, state)
                break
            except ProposerError as exc:
                pause = next(pauses, None)
                # Ctrl-C reaches a proposer's command as well
                if stopping.is_set():
                    return
                if pause is None:
                    raise
                self._tell(name, f"asked again, because {exc.message}")
                if stopping.wait(pause):
                    return
        if proposal.is_last:
            self._record("exhausted", why=proposal.done or "the proposer has no more")
            return
        refused, digest = "", self._base.digest
        try:
            self._study.with_delta(proposal.set)
            if proposal.patch:
                digest = trees.patched(self._study, self._folder, self._base.digest, proposal.patch)
        except (ConfigError, trees.RefusedError) as exc:
            refused = exc.message
        change = {"hypothesis": proposal.hypothesis, "delta": proposal.set, "patch": proposal.patch}
        self._record("proposed", experiment=name, **change, code=digest, refused=refused)

    # ------------------------------------------------------------------ one run, in a thread

    def _do(self, run: Run, server: str, attempt: int, stopping: threading.Event) -> None:
        # what was measured before a kill may have been the end
        end = self._ending(run)
        if end is not None:
            self._reached[run.name] = max(self._ledger.state.runs[run.name].scores)
        while end is None:
            try:
                end = self._lab.run(server, self._order(run, attempt), stopping)
                if end is None:
                    assert stopping.is_set(), f"run {run.name} has no end"
                    return
            except ServerGoneError as exc:
                self._gone[server] = exc.message
                self._tell(run.name, exc.message)
                return
            except RunFailedError as exc:
                if stopping.is_set():
                    return
                if attempt < ATTEMPTS:
                    _, attempt = self._claim(run, [server], again=True)
                    self._tell(run.name, f"again, because {exc.message}")
                else:
                    end = RunEnding("failed", exc.message)
        self._record("ended", run=run.name, outcome=end.outcome, why=end.why, step=self._trained(run))

    def _ending(self, run: Run) -> RunEnding | None:
        with self._ledger.lock:
            state = copy.deepcopy(self._ledger.state)
        return ending(self._study, state, run) or pruned(self._study, state, run)

    def _order(self, run: Run, attempt: int) -> Order:
        state, study = self._ledger.state, self._study
        experiment = state.experiments.get(run.experiment) if run.experiment != BASE else None
        job, settings = study.with_delta(experiment.delta if experiment else {})
        name = f"{run.name}.{attempt}"
        job = job.model_copy(
            update={
                "project": project_of(state),
                "experiment": name,
                "seed": study.seed + run.seed,
                "serve_after_training": True,
                # another run's weights are no beginning, and no step may fall into an evaluation
                "resume": False,
                # a run is measured while its engine serves, and never gone on with
                "save_freq": -1,
                "serving": "between_steps",
            }
        )

        def on_step(step: int) -> None:
            self._reached[run.name] = step

        def measure(step: int, scores: list[float], rewards: dict[int, float]) -> RunEnding | None:
            if not all(map(math.isfinite, scores)):
                return RunEnding("failed", f"a score of step {step} is not a finite number")
            self._record("measured", run=run.name, step=step, scores=scores, rewards=rewards)
            return self._ending(run)

        tree = trees.kept(self._folder, experiment.code if experiment else self._base.digest, f"run/{run.name}")
        held_out = tree.folder / study.evaluator.tasks
        if held_out.resolve().is_relative_to(tree.folder.resolve()) and held_out.is_file():
            held_out.unlink()  # no patch trains by mistake on what the run is measured with
        measured = frozenset(state.runs[run.name].scores)
        shuffle = study.control == "shuffle" or run.arm == "control"
        return Order(run, name, job, settings, tree, shuffle, measured, on_step, measure)
