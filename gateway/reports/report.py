"""The reports of a replay (requests, failures by kind, latency) and of a training, both with their training steps.

Invariant: a value that was not measured is absent, never zero.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from swarm.errors import ConfigError
from swarm.evidence.learning import HeldOut, learning, line_of
from swarm.measures import EVAL, EVAL_REWARD, LOGGED, REWARD, TRAIN
from swarm.types import EvalResult, Model, StepResult, TolerantModel
from swarm.validation import in_plain_words

REPORT_FILE = "report.json"
PLOT_FILE = "report.png"
#: of the intervals
CONFIDENCE = 0.95


class StepPoint(Model):
    """One training step or evaluation: means over its episodes, its ``groups`` and those of them whose rewards differ
    (``with_signal``), ``seconds`` of the step, and ``logged`` by name."""

    step: int
    reward_mean: float
    reward_std: float | None = None
    success_rate: float | None = None
    response_tokens: float | None = None
    calls: float | None = None
    episodes: int | None = None
    groups: int | None = None
    with_signal: int | None = None
    seconds: float | None = None
    logged: dict[str, float] = {}


class Failure(Model):
    """One kind of failure: how often it happened, and the message of the first one."""

    count: int
    example: str


class Latency(Model):
    """Seconds of the requests that were answered."""

    mean: float
    p50: float
    p95: float


class Curves(Model):
    """What a replay and a training have in common: training steps, and evaluations by policy version; ``control`` is
    ``shuffle`` where the rewards of each group were shuffled."""

    label: str
    data: str
    model: str
    seconds: float
    interrupted: bool = False
    stopped_because: str = ""
    control: str = "none"
    steps: list[StepPoint]
    evaluations: list[StepPoint] = []

    def learning(self, others: Sequence[Curves] = ()) -> str:
        """Whether the run learns, see :func:`swarm.evidence.learning.learning`; the first of ``others`` whose rewards
        were shuffled is its control."""
        run, *controls = (
            {point.step: point.reward_mean for point in curves.steps}
            for curves in (self, *(other for other in others if other.control == "shuffle"))
        )
        return learning(
            run,
            [
                HeldOut(each.step, each.reward_mean, each.reward_std, each.episodes)
                for each in self.evaluations
                if each.episodes and each.reward_std is not None
            ],
            control=controls[0] if controls else None,
            shuffled=self.control == "shuffle",
        )


class SavedAnswer(Model):
    """One answer as it is kept for a hook: its OpenAI message, how it ended, its completion tokens (0: not known)."""

    message: dict[str, Any]
    finish_reason: str = "stop"
    completion_tokens: int = 0


class Score(TolerantModel):
    """The answers to one untrained request, and the mean reward that a hook gave them, once it has judged them."""

    messages: list[dict[str, Any]]
    reward: float | None = None
    policy_version: int | None = None
    answers: list[SavedAnswer] = []


class Comparison(Model):
    """This replay against an ``earlier`` one on the prompts of both.

    Attributes:
        earlier: its label.
        prompts: that both have a reward for; ``left_out``: the others.
        before, after: mean rewards over these prompts.
        difference, low, high: the mean of the differences by prompt and its 95 % interval.
        verdict: in words.
    """

    earlier: str
    prompts: int
    left_out: int
    before: float | None = None
    after: float | None = None
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    verdict: str


class Report(Curves):
    """One replay. ``steps`` come from the swarm server, or else from the headers of the answers; of an untrained replay
    there are ``scores`` instead, and perhaps how they compare with those of an earlier one. ``untrained`` counts the
    answers on which nothing is trained, by why. ``gave_up``: it ended because too many requests in a row failed."""

    target: str
    seed: int
    concurrency: int
    requests: int
    gave_up: bool = False
    answered: int
    cancelled: int
    failures: dict[str, Failure]
    untrained: dict[str, int] = {}
    latency: Latency | None
    scores: list[Score] = []
    comparison: Comparison | None = None

    @property
    def failed(self) -> int:
        return sum(failure.count for failure in self.failures.values())

    @property
    def exit_code(self) -> int:
        """Of the command that sent the requests: 130 if it was interrupted, 1 if failures ended it or nothing was
        answered."""
        return 130 if self.interrupted else int(self.gave_up or (self.failed > 0 and not self.answered))


class TrainingReport(Curves):
    """One training on tasks; ``finished`` and ``failed`` are its train episodes."""

    workflow: str
    finished: int
    failed: int


_ANY: TypeAdapter[Report | TrainingReport] = TypeAdapter(Report | TrainingReport)


def points_of_steps(steps: Iterable[StepResult]) -> list[StepPoint]:
    """The steps that carry a reward, as the swarm server reports them, of the :func:`line_of` them."""
    return [
        _point(step.step, step.metrics, TRAIN).model_copy(update={"seconds": step.seconds})
        for step in line_of(steps)
        if REWARD in step.metrics
    ]


def points_of_evaluations(evaluations: Iterable[EvalResult]) -> list[StepPoint]:
    """The evaluations that have a reward, as the swarm server reports them."""
    return [
        _point(evaluation.step, {**evaluation.metrics, f"{EVAL}episodes": evaluation.episodes}, EVAL)
        for evaluation in evaluations
        if EVAL_REWARD in evaluation.metrics
    ]


def _point(step: int, metrics: Mapping[str, float], prefix: str) -> StepPoint:
    def count(name: str) -> int | None:
        return int(metrics[prefix + name]) if prefix + name in metrics else None

    logged = prefix + LOGGED
    return StepPoint(
        step=step,
        reward_mean=metrics[f"{prefix}reward_mean"],
        reward_std=metrics.get(f"{prefix}reward_std"),
        success_rate=metrics.get(f"{prefix}success_rate"),
        response_tokens=metrics.get(f"{prefix}response_tokens_mean"),
        calls=metrics.get(f"{prefix}calls_mean"),
        episodes=count("episodes"),
        groups=count("tasks"),
        with_signal=count("tasks_with_signal"),
        logged={name.removeprefix(logged): value for name, value in metrics.items() if name.startswith(logged)},
    )


def read_report(path: Path) -> Report | TrainingReport:
    """A report from its file, or from the folder that holds it.

    Raises:
        ConfigError: the file cannot be read, or is not a report.
    """
    file = path / REPORT_FILE if path.is_dir() else path
    try:
        return _ANY.validate_json(file.read_bytes())
    except OSError as exc:
        raise ConfigError(f"cannot read the report {file}: {exc.strerror or exc}") from exc
    except ValidationError as exc:
        raise ConfigError(
            f"{file} is not a report of `swarm-gateway replay` or `train`: {in_plain_words(exc.errors()[0])}"
        ) from exc


def versions(report: Report) -> str:
    """Which weights answered: ``policy version 6``; empty where the address does not say."""
    seen = sorted({score.policy_version for score in report.scores if score.policy_version is not None})
    if not seen:
        return ""
    return f"policy version {seen[0]}" if len(seen) == 1 else f"policy versions {seen[0]} to {seen[-1]}, mixed"


def by_prompt(scores: Sequence[Score]) -> dict[str, list[Score]]:
    """By the content of the prompt, whatever the order of the data."""
    scores_of: dict[str, list[Score]] = {}
    for score in scores:
        scores_of.setdefault(json.dumps(score.messages, sort_keys=True), []).append(score)
    return scores_of


def mean_of(scores: Sequence[Score]) -> float | None:
    """Their mean reward; None without one."""
    rewards = [score.reward for score in scores if score.reward is not None]
    return statistics.fmean(rewards) if rewards else None
