"""The ledger: what happened in a study, one JSON line per event, each on disk before anything depends on it.

Invariant: the state is a fold of the lines, and a line that the state does not allow is never written: no experiment is
proposed twice, no run claimed after its end or ended twice. A line that a kill cut off is not there.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, Self

from swarm.errors import ConfigError, StateError
from swarm.files import flush

FILE = "ledger.jsonl"
#: What experiments are compared with.
BASE = "base"
Arm = Literal["first", "seed", "control"]
Outcome = Literal["done", "stopped", "failed"]


@dataclass(frozen=True)
class Run:
    """One training: of an experiment, in an arm: its ``first`` one, another ``seed``, or the shuffled-reward
    ``control`` with that seed."""

    experiment: str
    arm: Arm = "first"
    seed: int = 0

    @property
    def name(self) -> str:
        """Unique in the study."""
        return self.experiment if self.arm == "first" else f"{self.experiment}.{self.arm}{self.seed}"

    @classmethod
    def named(cls, name: str) -> Self:
        """The run with this :attr:`name`."""
        experiment, dot, rest = name.partition(".")
        arm: Arm = "first" if not dot else "control" if rest.startswith("control") else "seed"
        return cls(experiment, arm, int(rest.removeprefix(arm)) if dot else 0)


@dataclass
class RunState:
    """What is known of a run that was claimed: of its latest attempt, but for what the ones before it cost
    (``lost_steps``, ``lost_seconds``).

    ``scores`` are by step, one per held-out task; ``rewards`` are by training step; ``trained`` is the last step, once
    the run has ended. Between ``began`` and ``last`` (Unix seconds) its engine was in use.
    """

    server: str
    attempt: int
    began: float
    last: float
    lost_steps: int = 0
    lost_seconds: float = 0.0
    trained: int = 0
    scores: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    rewards: dict[int, float] = field(default_factory=dict[int, float])
    outcome: Outcome | None = None
    why: str = ""

    @property
    def seconds(self) -> float:
        """Of an engine, for the latest attempt."""
        return self.last - self.began

    @property
    def steps(self) -> int:
        """Training steps of all attempts."""
        return self.lost_steps + max(self.trained, *self.scores, 0)

    @property
    def means(self) -> dict[int, float]:
        """The mean score by step, in order."""
        return {step: fmean(self.scores[step]) for step in sorted(self.scores)}


def words_of(delta: Mapping[str, Any]) -> list[str]:
    """What a config delta sets, for people."""
    return [f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in delta.items()]


@dataclass
class Experiment:
    """A hypothesis with its config delta or patch; ``refused`` says why it was not run."""

    name: str
    hypothesis: str
    delta: dict[str, Any]
    patch: str
    code: str
    refused: str = ""
    verdict: str = ""
    interval: tuple[float, float] | None = None
    why: str = ""


@dataclass
class State:
    """All that the ledger says."""

    study: str = ""
    locked: str = ""
    code: str = ""
    revision: str = ""
    experiments: dict[str, Experiment] = field(default_factory=dict[str, Experiment])
    runs: dict[str, RunState] = field(default_factory=dict[str, RunState])
    exhausted: str | None = None
    chosen: list[str] | None = None
    finished: str | None = None

    @property
    def hours(self) -> float:
        """Of engines, as far as the ledger knows."""
        return sum(run.lost_seconds + run.seconds for run in self.runs.values()) / 3600

    @property
    def kept(self) -> list[str]:
        """Experiments that are wins."""
        return [experiment.name for experiment in self.experiments.values() if experiment.verdict == "kept"]

    def apply(self, event: Mapping[str, Any]) -> None:
        """Take in one event.

        Raises:
            StateError: it cannot happen now.
        """
        kind = event["event"]
        if (kind == "begun") == bool(self.study) or self.finished is not None:
            raise StateError(f"the ledger allows no {kind!r} here")
        getattr(self, f"_{kind}")(event)

    def _begun(self, event: Mapping[str, Any]) -> None:
        self.study, self.locked = event["study"], event["locked"]
        self.code, self.revision = event["code"], event["revision"]

    def _proposed(self, event: Mapping[str, Any]) -> None:
        name = event["experiment"]
        if name in self.experiments or self.exhausted is not None or self.chosen is not None:
            raise StateError(f"experiment {name} cannot be proposed")
        fields = ("hypothesis", "delta", "patch", "code", "refused")
        self.experiments[name] = Experiment(name, *(event[field] for field in fields))

    def _exhausted(self, event: Mapping[str, Any]) -> None:
        if self.exhausted is not None:
            raise StateError("there are no more proposals already")
        self.exhausted = event["why"]

    def _claimed(self, event: Mapping[str, Any]) -> None:
        name, run = event["run"], Run.named(event["run"])
        claimed = self.runs.get(name)
        if claimed is not None and claimed.outcome is not None:
            raise StateError(f"run {name} is over")
        if run.experiment != BASE and (
            run.experiment not in self.experiments or self.experiments[run.experiment].refused
        ):
            raise StateError(f"run {name} is of no experiment")
        if run.arm != "first" and (self.chosen is None or run.experiment not in (BASE, *self.chosen)):
            raise StateError(f"run {name} confirms what was not chosen")
        at = event["at"]
        if claimed is None:
            self.runs[name] = RunState(event["server"], event["attempt"], at, at)
            return
        # while nobody ran the study, no engine was used; `again`: it failed just now
        idle = 0.0 if event["again"] else at - claimed.last
        if event["attempt"] > claimed.attempt:
            # the weights of an earlier attempt are lost, and so is what was measured of them
            steps, seconds = claimed.lost_steps + event["lost"], claimed.lost_seconds + at - idle - claimed.began
            self.runs[name] = RunState(event["server"], event["attempt"], at, at, steps, seconds)
        else:
            claimed.server, claimed.began, claimed.last = event["server"], claimed.began + idle, at

    def _measured(self, event: Mapping[str, Any]) -> None:
        run = self._open(event)
        if event["step"] in run.scores:
            raise StateError(f"step {event['step']} of run {event['run']} is measured already")
        if not event["scores"] or not all(math.isfinite(score) for score in event["scores"]):
            raise StateError(f"step {event['step']} of run {event['run']} has no finite score")
        run.scores[event["step"]] = list(event["scores"])
        run.rewards |= {int(step): reward for step, reward in event["rewards"].items()}

    def _ended(self, event: Mapping[str, Any]) -> None:
        run = self._open(event)
        run.outcome, run.why, run.trained = event["outcome"], event["why"], event["step"]

    def _chosen(self, event: Mapping[str, Any]) -> None:
        unknown = [name for name in event["experiments"] if name not in self.experiments]
        if self.chosen is not None or self.open_runs() or unknown:
            raise StateError("nothing can be chosen now")
        self.chosen = list(event["experiments"])

    def _verdict(self, event: Mapping[str, Any]) -> None:
        experiment = self.experiments[event["experiment"]]
        if self.chosen is None or experiment.verdict or self.open_runs():
            raise StateError(f"experiment {experiment.name} cannot be judged now")
        experiment.verdict, experiment.why = event["verdict"], event["why"]
        experiment.interval = event["interval"] and (event["interval"][0], event["interval"][1])

    def _finished(self, event: Mapping[str, Any]) -> None:
        if self.open_runs() or any(not experiment.verdict for experiment in self.experiments.values()):
            raise StateError("the study is not over")
        self.finished = event["why"]

    def open_runs(self) -> list[str]:
        """Runs that were claimed and have not ended."""
        return [name for name, run in self.runs.items() if run.outcome is None]

    def _open(self, event: Mapping[str, Any]) -> RunState:
        run = self.runs.get(event["run"])
        if run is None or run.outcome is not None:
            raise StateError(f"run {event['run']} does not run")
        run.last = event["at"]
        return run


def fold(events: Iterable[Mapping[str, Any]]) -> State:
    """The state after ``events``."""
    state = State()
    for event in events:
        state.apply(event)
    return state


def read(folder: Path) -> State:
    """The state of the study in ``folder``, as it is now.

    Raises:
        ConfigError: the ledger is damaged.
    """
    path = folder / FILE
    return _folded(path, path.read_bytes()) if path.exists() else State()


def _folded(path: Path, content: bytes) -> State:
    try:
        # what is behind the last newline was cut off by a kill
        return fold(json.loads(line) for line in content.split(b"\n")[:-1])
    except (StateError, ValueError, LookupError, TypeError, AttributeError) as exc:
        raise ConfigError(f"{path} is damaged: {exc}") from exc


class Ledger:
    """The ledger of the study in ``folder``, held by this process alone; any of its threads may write.

    Raises:
        ConfigError: another process has it, or it is damaged.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / FILE
        try:
            self._file = path.open("a+b", buffering=0)
        except OSError as exc:
            raise ConfigError(f"cannot write {path}: {exc.strerror}") from exc
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as exc:
                raise ConfigError(f"another process runs the study {folder}") from exc
            self._file.seek(0)
            content = self._file.readall()
            self.state = _folded(path, content)
            whole = content.rfind(b"\n") + 1
            if whole < len(content):
                self._file.truncate(whole)
            flush(folder)
        except BaseException:
            self._file.close()
            raise
        self.lock = threading.RLock()

    def append(self, event: str, **values: Any) -> None:
        """Write an event; it is on disk when this returns.

        Raises:
            StateError: it cannot happen now; nothing was written.
            OSError: the disk is full; it did not happen, and nothing more will be written, for that would depend on it.
        """
        with self.lock:
            fields = {"event": event, "at": round(time.time(), 3), **values}
            line = json.dumps(fields, ensure_ascii=False, allow_nan=False).encode() + b"\n"
            if self._file.closed:
                raise OSError(errno.EIO, "an earlier event was not written", self._file.name)
            self.state.apply(json.loads(line))
            try:
                if self._file.write(line) < len(line):
                    raise OSError(errno.ENOSPC, "the disk is full", self._file.name)
                os.fsync(self._file.fileno())
            except OSError:
                self._file.close()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()
