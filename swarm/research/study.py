"""``study.yaml``: the question, the base job, the evaluator, the budget and the rules, all declared before a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from os.path import normpath
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, JsonValue, model_validator

from swarm.client.wire import parse_server_query, parse_server_url
from swarm.errors import ConfigError
from swarm.job import SET, SPELLINGS, TrainJob, layered
from swarm.types import Model
from swarm.validation import read_mapping, validated

FILE = "study.yaml"
#: Begins the keys of a config delta that are settings of the workflow; the others are the job's, or verl's.
SETTINGS = "settings."
#: What the study decides for each run: an experiment that changed it would be measured by another rule than the others.
_OWN_FIELDS = frozenset(
    {
        "project",
        "experiment",
        "seed",
        "total_training_steps",
        "serve_after_training",
        "resume",
        "checkpoint_dir",
        "overrides",
        # they change the evaluator's answers too
        "max_prompt_length",
        "max_response_length",
        "tool_call_parser",
        "reasoning_parser",
    }
)
_OWN_KEYS = (
    "trainer.",
    "data.seed",
    "data.max_",
    *(f"actor_rollout_ref.rollout.{name}" for name in ("max_model_len", "prompt_length", "response_length")),
)


class Evaluator(Model):
    """How good a policy is: eval episodes of a workflow on held-out tasks; experiments cannot change it."""

    workflow: str = Field(description="module:function, as of `train`; its reward is the score")
    tasks: str = Field(description="held-out tasks, a source as of `train`")
    samples: int = Field(default=1, ge=1, description="episodes of each task")
    every_steps: int = Field(ge=1, description="steps between two evaluations; there is one before the first step too")
    metric: str = Field(default="reward", min_length=1, description="reward, or a name that the workflow logs")
    goal: Literal["maximize", "minimize"] = "maximize"
    seconds: float = Field(default=1800.0, gt=0, description="an evaluation that takes longer fails its run")


class StudyBudget(Model):
    """What the study may cost at most. Runs and steps of the confirmation are set aside from the start."""

    runs: int = Field(ge=1)
    steps: int | None = Field(default=None, ge=1, description="training steps of all runs together")
    hours: float | None = Field(default=None, gt=0, description="of engines, over all runs")


class StopRule(Model):
    """When no more experiments are proposed, before the budget says so."""

    experiments: int | None = Field(default=None, ge=1)
    patience: int | None = Field(default=None, ge=1, description="experiments in a row without a new best score")


class EarlyStop(Model):
    """When a run is not worth finishing."""

    stall_seconds: float = Field(default=1800.0, gt=0, description="without a training step or an evaluation")
    collapse: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="a first run whose reward in training has fallen by more than this share, and not by its scatter; "
        "1: never",
    )
    window: int = Field(default=3, ge=2, description="steps at either end whose means that compares")
    doubt: float = Field(
        default=0.001, gt=0, lt=0.5, description="beaten: at this level of doubt below the base run at the same step"
    )


class Decision(Model):
    """What counts as a win; see :mod:`swarm.research.decisions`."""

    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    min_effect: float = Field(default=0.0, ge=0, description="a smaller gain of the metric is none")
    seeds: int = Field(default=3, ge=3, description="runs of each arm when a winner is confirmed")
    winners: int = Field(default=1, ge=1, description="experiments to confirm at most, the best first")


class Range(Model):
    """A number between two others, drawn evenly, with ``log`` evenly in its logarithm."""

    low: float
    high: float
    log: bool = False

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if not self.low < self.high or (self.log and self.low <= 0):
            raise ValueError("needs low < high, and 0 < low where log")
        return self


_FINITE = ConfigDict(allow_inf_nan=False)


class Grid(Model):
    """Every combination of the values of each key of a config delta; the ledger has them as JSON."""

    model_config = _FINITE

    kind: Literal["grid"]
    space: dict[str, list[JsonValue]] = Field(min_length=1)


class Random(Model):
    """``count`` draws."""

    model_config = _FINITE

    kind: Literal["random"]
    space: dict[str, list[JsonValue] | Range] = Field(min_length=1)
    count: int = Field(ge=1)


class Halving(Random):
    """Draws that an evaluation ends early unless they are among the best; needs optuna."""

    kind: Literal["halving"]  # type: ignore[assignment]
    sampler: Literal["random", "tpe"] = "random"
    keep: int = Field(default=3, ge=2, description="at each rung one of so many goes on, to so many times the steps")


class Function(Model):
    """``module:function`` of the study's folder: gets the study's state, returns a proposal, or ``None`` at the end."""

    kind: Literal["function"]
    function: str


class Command(Model):
    """A command that reads the state as JSON and prints a proposal as JSON."""

    kind: Literal["command"]
    command: list[str] = Field(min_length=1)
    seconds: float = Field(default=600.0, gt=0)


Proposer = Annotated[Grid | Random | Halving | Function | Command, Field(discriminator="kind")]


class Study(Model):
    """The file."""

    question: str = Field(min_length=1)
    code: str = Field(default=".", description="folder of the code, data and evaluator; the paths below start there")
    job: dict[str, JsonValue]
    workflow: str = Field(description="what is trained: module:function, as of `train`")
    settings: dict[str, JsonValue] = Field(default={}, description="values for further parameters of the workflow")
    tasks: str
    control: Literal["none", "shuffle"] = Field(
        default="none", description="shuffle: every run has permuted rewards, so that there is nothing to find"
    )
    evaluator: Evaluator
    locked: list[str] = Field(
        min_length=1, description="files and folders that decide the score; so does every study.yaml"
    )
    patch_paths: list[str] = Field(default=[], description="files and folders that patches may change")
    sync_packages: list[str] = Field(default=[], description="packages of the folder that the engine imports")
    proposer: Proposer
    budget: StudyBudget
    stop: StopRule = StopRule()
    early_stop: EarlyStop = EarlyStop()
    decision: Decision = Decision()
    servers: list[str] = Field(default=["http://127.0.0.1:10086"], min_length=1)
    seed: int = Field(default=0, ge=0, lt=2**31)
    boot_seconds: float = Field(default=900.0, gt=0)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        named = {
            # a gateway leads to a server for each route
            (parse_server_url(server).replace("//localhost:", "//127.0.0.1:"), *parse_server_query(server).items())
            for server in self.servers
        }
        if len(named) < len(self.servers):
            raise ValueError("servers: one is named twice")
        if normpath(self.tasks) == normpath(self.evaluator.tasks):
            raise ValueError("tasks: those of the evaluator would be trained on; name others")
        needed = 2 + self.reserved_runs
        if self.budget.runs < needed:
            raise ValueError(f"budget.runs: {needed} are needed: the base, one experiment, and the confirmation")
        if self.budget.steps is not None and self.budget.steps < needed * self.steps:
            raise ValueError(f"budget.steps: {needed} runs of {self.steps} steps need {needed * self.steps}")
        for path in self.patch_paths:
            if self.is_locked(path) or any(inside(name, path) for name in self.locked):
                raise ValueError(f"patch_paths: {path} holds what is locked")
        return self

    @property
    def steps(self) -> int:
        """Training steps of each run."""
        return self.base_job.total_training_steps

    @property
    def base_job(self) -> TrainJob:
        """The job that experiments are compared with."""
        return layered(self.job).job

    @property
    def reserved_runs(self) -> int:
        """Runs that the confirmation may need: the base, and for each winner itself and its control."""
        return self.decision.seeds * (1 + 2 * self.decision.winners)

    def is_locked(self, name: str) -> bool:
        """Whether ``name``, relative to the code's folder, decides the score."""
        return name.rpartition("/")[2] == FILE or any(inside(name, top) for top in self.locked)

    def may_patch(self, name: str) -> bool:
        """Whether patches may change ``name``."""
        return not self.is_locked(name) and any(inside(name, top) for top in self.patch_paths)

    def with_delta(self, delta: Mapping[str, Any]) -> tuple[TrainJob, dict[str, Any]]:
        """The base job and the workflow's settings with a config delta.

        Raises:
            ConfigError: an unknown key, a value out of range, or a key that the study decides.
        """
        of_job = {key: value for key, value in delta.items() if not key.startswith(SETTINGS)}
        decided = [key for key in of_job if SPELLINGS.get(key, key) in _OWN_FIELDS] or [
            key
            for key, layer in layered(self.job, set_=of_job).overrides.items()
            if layer == SET and f"{key}.".startswith(_OWN_KEYS)
        ]
        if decided:
            raise ConfigError(f"set: {decided[0]} is decided by the study")
        settings = {key.removeprefix(SETTINGS): value for key, value in delta.items() if key.startswith(SETTINGS)}
        if unknown := [name for name in settings if name not in self.settings]:
            raise ConfigError(
                f"set: there is no setting {unknown[0]!r}; there are: {', '.join(self.settings) or 'none'}"
            )
        job = layered(self.job, set_=of_job).job
        if job.by_agreement:
            raise ConfigError(
                "collection: every batch would wait until somebody agrees, and nobody does in a study: name another"
            )
        return job, {**self.settings, **settings}


def read_study(folder: Path) -> Study:
    """The study in ``folder``.

    Raises:
        ConfigError: there is none, or a key or value is wrong; names each.
    """
    path = folder / FILE
    study = validated(Study, read_mapping(path, "study"), str(path))
    study.with_delta({})
    if isinstance(study.proposer, Grid | Random):
        for key, values in study.proposer.space.items():
            for value in (values.low, values.high) if isinstance(values, Range) else values:
                study.with_delta({key: value})
    return study


def rehearsal(study: Study) -> Study:
    """``study`` in its shortest form, which tries that everything works and judges nothing."""
    return study.model_copy(
        update={
            "job": {**study.job, "total_training_steps": 2},
            "evaluator": study.evaluator.model_copy(update={"every_steps": 2, "samples": 1}),
            "stop": StopRule(experiments=1),
            # no gain is large enough to be confirmed
            "decision": study.decision.model_copy(update={"min_effect": math.inf}),
        }
    )


def inside(name: str, top: str) -> bool:
    """Whether the path ``name`` is ``top`` or below it."""
    name, top = normpath(name), normpath(top)
    return top in (name, ".") or name.startswith(f"{top}/")
