"""Where experiments come from: a grid, draws, successive halving, a Python function, or a command.

Invariant: a proposal depends on the declared proposer and the ledger alone, but for those of functions and commands.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import subprocess
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from swarm.errors import ConfigError, SwarmGatewayError
from swarm.importer import SourceFolder, load_attribute, python_path
from swarm.research.decisions import RunEnding, last_gain
from swarm.research.ledger import BASE, Run, State, words_of
from swarm.research.study import Command, Function, Grid, Halving, Random, Range, Study
from swarm.types import Model
from swarm.validation import describe_validation

_SHOWN = 500


class Proposal(Model):
    """What a proposer answers; an answer without ``set`` and ``patch`` says that it has no more, and why."""

    hypothesis: str = Field(default="", max_length=10_000)
    set: dict[str, Any] = Field(default={}, description="a config delta: fields of the job, verl's keys, settings.NAME")
    patch: str = Field(default="", max_length=1_000_000, description="unified diff as of `git diff`")
    done: str = ""

    @property
    def is_last(self) -> bool:
        """There is none."""
        return not self.set and not self.patch


class ProposerError(SwarmGatewayError):
    """A proposer failed; the study can be resumed with it mended."""


def propose(study: Study, folder: Path, code: Path, state: State) -> Proposal:
    """The next proposal; ``code`` holds the base code, for proposers that write patches.

    Raises:
        ProposerError: it failed, or answers something else.
        ConfigError: optuna is needed and is not installed.
    """
    match study.proposer:
        case Random(count=count) if len(state.experiments) >= count:
            return Proposal(done=f"{count} draws are done")
        case Halving() as halving:
            optuna = _optuna()
            replayed, _ = _replayed(optuna, halving, study, state)
            trial = replayed.ask(_distributions(optuna, halving))
            return _of({key: _chosen(halving, key, value) for key, value in trial.params.items()})
        case Grid() as grid:
            rows = itertools.product(*grid.space.values())
            row = next(itertools.islice(rows, len(state.experiments), None), None)
            return Proposal(done="the grid is done") if row is None else _of(dict(zip(grid.space, row, strict=True)))
        case Random() as drawn:
            draw = random.Random(f"{study.seed}/{len(state.experiments)}")
            return _of({key: _drawn(draw, values) for key, values in drawn.space.items()})
        case Function() as proposer:
            return _called(proposer, folder, described(study, code, state))
        case Command() as proposer:
            return _commanded(proposer, folder, described(study, code, state))


def described(study: Study, code: Path, state: State) -> dict[str, Any]:
    """The state for functions and commands, in JSON's types; scores are means by step."""
    experiments: list[dict[str, Any]] = []
    for experiment in state.experiments.values():
        run, interval = state.runs.get(experiment.name), last_gain(study, state, experiment.name)
        experiments.append(
            {
                "name": experiment.name,
                "hypothesis": experiment.hypothesis,
                "set": experiment.delta,
                "patch": experiment.patch,
                "refused": experiment.refused,
                "outcome": run.outcome if run else None,
                "why": run.why if run else "",
                "scores": run.means if run else {},
                "rewards": run.rewards if run else {},
                "gain": {"mean": interval.mean, "low": interval.low, "high": interval.high}
                if interval and math.isfinite(interval.low)
                else None,
            }
        )
    base = state.runs.get(BASE)
    return {
        "question": study.question,
        "metric": study.evaluator.metric,
        "goal": study.evaluator.goal,
        "base": {
            "job": study.job,
            "settings": study.settings,
            "scores": base.means if base else {},
        },
        "code": str(code),
        "patch_paths": study.patch_paths,
        "steps": study.steps,
        "runs_left": study.budget.runs - len(state.runs) - study.reserved_runs,
        "experiments": experiments,
    }


def _of(delta: Mapping[str, Any]) -> Proposal:
    return Proposal(hypothesis=f"{', '.join(words_of(delta))} is better than the base", set=dict(delta))


def _drawn(draw: random.Random, values: list[Any] | Range) -> Any:
    if not isinstance(values, Range):
        return draw.choice(values)
    if values.log:
        return math.exp(draw.uniform(math.log(values.low), math.log(values.high)))
    return draw.uniform(values.low, values.high)


def _parsed(answer: object, whose: str) -> Proposal:
    try:
        proposal = Proposal.model_validate({} if answer is None else answer)
        json.dumps(proposal.set, allow_nan=False)
    except ValidationError as exc:
        raise ProposerError(describe_validation(exc, whose, Proposal).message) from exc
    except (TypeError, ValueError) as exc:
        raise ProposerError(f"{whose}: `set` cannot be written as JSON: {exc}") from exc
    return proposal


def _called(proposer: Function, folder: Path, state: dict[str, Any]) -> Proposal:
    files = SourceFolder(folder)
    try:
        answer = load_attribute(proposer.function, beside=files)(state)
    except Exception as exc:
        raise ProposerError(f"{proposer.function} failed: {type(exc).__name__}: {exc}") from exc
    finally:
        files.forget()
    return _parsed(answer, f"what {proposer.function} returned")


def _commanded(proposer: Command, folder: Path, state: dict[str, Any]) -> Proposal:
    name = proposer.command[0]
    try:
        done = subprocess.run(
            proposer.command,
            cwd=folder,
            input=json.dumps(state),
            capture_output=True,
            text=True,
            timeout=proposer.seconds,
            env={**os.environ, "PYTHONPATH": python_path()},
            check=False,
        )
        if done.returncode:
            raise ProposerError(f"{name} ended with {done.returncode}: {done.stderr.strip()[-_SHOWN:]}")
        answer = json.loads(done.stdout)
    except subprocess.TimeoutExpired as exc:
        raise ProposerError(f"{name} took longer than {proposer.seconds:g} s") from exc
    except OSError as exc:
        raise ProposerError(f"{name} cannot be run: {exc.strerror or exc}") from exc
    except ValueError as exc:
        raise ProposerError(f"{name} printed no JSON: {exc}") from exc
    return _parsed(answer, f"what {name} printed")


# ---------------------------------------------------------------------- successive halving


def pruned(study: Study, state: State, run: Run) -> RunEnding | None:
    """Whether successive halving ends ``run`` where it was measured last.

    Asynchronous successive halving (Li et al., "A System for Massively Parallel Hyperparameter Tuning", MLSys 2020), as
    optuna's ``SuccessiveHalvingPruner`` does it, on rungs of the evaluator's ``every_steps`` times powers of ``keep``.
    """
    halving = study.proposer
    if not isinstance(halving, Halving) or run.arm != "first" or run.experiment == BASE:
        return None
    _, trials = _replayed(_optuna(), halving, study, state, undecided=run.experiment)
    step = max(state.runs[run.name].scores, default=0)
    if step and trials[run.experiment].should_prune():
        return RunEnding("stopped", f"halving: not among the best 1 of {halving.keep} at step {step}")
    return None


def _optuna() -> Any:
    try:
        optuna = import_module("optuna")
    except ImportError as exc:
        raise ConfigError("the proposer `halving` needs optuna: pip install '.[research]' in a clone") from exc
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def _distributions(optuna: Any, halving: Halving) -> dict[str, Any]:
    # choices by their place: optuna takes no lists or mappings as choices
    kinds = optuna.distributions
    return {
        key: kinds.FloatDistribution(values.low, values.high, log=values.log)
        if isinstance(values, Range)
        else kinds.CategoricalDistribution(list(range(len(values))))
        for key, values in halving.space.items()
    }


def _chosen(halving: Halving, key: str, value: Any) -> Any:
    values = halving.space[key]
    return value if isinstance(values, Range) else values[value]


def _placed(halving: Halving, key: str, value: Any) -> Any:
    values = halving.space[key]
    return value if isinstance(values, Range) else values.index(value)


def _replayed(
    optuna: Any, halving: Halving, study: Study, state: State, undecided: str = ""
) -> tuple[Any, dict[str, Any]]:
    """An optuna study in memory with what the ledger knows, and its trials by experiment; whether the ``undecided`` one
    goes on from its last score is still to be asked."""
    # numpy, by which optuna draws, takes no more than 32 bits
    seed = (study.seed * 100_003 + len(state.experiments)) % 2**32
    samplers = optuna.samplers
    made = optuna.create_study(
        direction=study.evaluator.goal,
        sampler=samplers.TPESampler(seed=seed) if halving.sampler == "tpe" else samplers.RandomSampler(seed=seed),
        pruner=optuna.pruners.SuccessiveHalvingPruner(
            min_resource=study.evaluator.every_steps, reduction_factor=halving.keep
        ),
    )
    states, space = optuna.trial.TrialState, _distributions(optuna, halving)
    trials: dict[str, Any] = {}
    for experiment in state.experiments.values():
        made.enqueue_trial({key: _placed(halving, key, value) for key, value in experiment.delta.items()})
        trial = trials[experiment.name] = made.ask(space)
        run = state.runs.get(experiment.name)
        if experiment.refused:
            made.tell(trial, state=states.FAIL)
        if run is None:
            continue
        for step, score in run.means.items():
            trial.report(score, step)
            if experiment.name != undecided or step < max(run.scores):
                # the pruner notes the rungs that a trial passes only as it is asked
                trial.should_prune()
        if run.outcome is not None:
            ended = states.COMPLETE if run.outcome == "done" else states.PRUNED if run.scores else states.FAIL
            made.tell(trial, [*run.means.values()][-1] if ended is states.COMPLETE else None, state=ended)
    return made, trials
