"""The report of a replay: requests, failures by kind, latency, and the reward by training step.

Invariant: a value that was not measured is absent, never zero.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import ValidationError

from gateway.replay.senders import Outcome
from swarm.errors import ConfigError
from swarm.types import Model, StepResult

REPORT_FILE = "report.json"
PLOT_FILE = "report.png"
_EDGE = 3


class StepPoint(Model):
    """One training step: rewards over all its episodes, sampled tokens per episode, seconds of the step."""

    step: int
    reward_mean: float
    reward_std: float | None = None
    response_tokens: float | None = None
    seconds: float | None = None


class Failure(Model):
    """One kind of failure: how often it happened, and the message of the first one."""

    count: int
    example: str


class Latency(Model):
    """Seconds of the requests that were answered."""

    mean: float
    p50: float
    p95: float


class Report(Model):
    """One replay. ``steps`` come from the swarm server, or else from the headers of the answers."""

    label: str
    data: str
    target: str
    model: str
    seed: int
    concurrency: int
    seconds: float
    interrupted: bool = False
    stopped_because: str = ""
    requests: int
    answered: int
    cancelled: int
    failures: dict[str, Failure]
    latency: Latency | None
    steps: list[StepPoint]

    @property
    def failed(self) -> int:
        return sum(failure.count for failure in self.failures.values())

    @property
    def edge(self) -> int:
        """How many steps are compared at either end: three, or fewer where they would overlap."""
        return min(_EDGE, max(1, len(self.steps) // 2))

    def mean_of_first(self) -> float | None:
        """Mean reward of the first :attr:`edge` steps; None without any step."""
        return _mean(self.steps[: self.edge])

    def mean_of_last(self) -> float | None:
        """Mean reward of the last :attr:`edge` steps; None without any step."""
        return _mean(self.steps[-self.edge :])


def _mean(points: Sequence[StepPoint]) -> float | None:
    return statistics.fmean(point.reward_mean for point in points) if points else None


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which ``share`` of the ``ordered`` values lie (nearest rank)."""
    # the subtraction takes back what binary fractions add: 0.95 * 20 is a little above 19
    return ordered[max(0, math.ceil(share * len(ordered) - 1e-9) - 1)]


def latency_of(outcomes: Iterable[Outcome]) -> Latency | None:
    """Latency of the answered requests; None if there are none."""
    seconds = sorted(outcome.seconds for outcome in outcomes if not outcome.failure)
    if not seconds:
        return None
    return Latency(mean=statistics.fmean(seconds), p50=percentile(seconds, 0.5), p95=percentile(seconds, 0.95))


def failures_of(outcomes: Iterable[Outcome]) -> dict[str, Failure]:
    """The failures by kind, the most frequent first."""
    by_kind: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.failure:
            by_kind.setdefault(outcome.failure, []).append(outcome.detail)
    ordered = sorted(by_kind.items(), key=lambda item: -len(item[1]))
    return {kind: Failure(count=len(details), example=details[0]) for kind, details in ordered}


def points_of_steps(steps: Iterable[StepResult]) -> list[StepPoint]:
    """The steps that carry a reward, as the swarm server reports them."""
    return [
        StepPoint(
            step=step.step,
            reward_mean=step.metrics["swarm/reward_mean"],
            reward_std=step.metrics.get("swarm/reward_std"),
            response_tokens=step.metrics.get("swarm/response_tokens_mean"),
            seconds=step.seconds,
        )
        for step in steps
        if "swarm/reward_mean" in step.metrics
    ]


def points_of_answers(outcomes: Iterable[Outcome]) -> list[StepPoint]:
    """Rewards by the policy version that answered: weights of version v collect the batch of step v + 1."""
    by_step: dict[int, list[float]] = {}
    for outcome in outcomes:
        if outcome.reward is not None and outcome.policy_version is not None:
            by_step.setdefault(outcome.policy_version + 1, []).append(outcome.reward)
    return [StepPoint(step=step, reward_mean=statistics.fmean(values)) for step, values in sorted(by_step.items())]


def read_report(path: Path) -> Report:
    """A report from its file, or from the folder that holds it.

    Raises:
        ConfigError: the file cannot be read, or is not a report.
    """
    file = path / REPORT_FILE if path.is_dir() else path
    try:
        return Report.model_validate_json(file.read_bytes())
    except OSError as exc:
        raise ConfigError(f"cannot read the report {file}: {exc.strerror or exc}") from exc
    except ValidationError as exc:
        raise ConfigError(f"{file} is not a report of `swarm-gateway replay`: {exc.errors()[0]['msg']}") from exc
