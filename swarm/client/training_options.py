"""What a training is asked for, and what it tells.

Invariant: they are values; :mod:`swarm.client.training_run` acts on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from swarm.client.throttling import Throttle
from swarm.types import Model, Task


class TrainReport(Model):
    """The outcome of a training: episodes, their mean reward, and the global steps at its start and end."""

    finished: int
    failed: int
    mean_reward: float | None
    first_step: int
    last_step: int


class EvaluationReport(Model):
    """One evaluation: the step whose weights it tried, episodes, their mean reward, and the share of successes of those
    that say so."""

    step: int
    finished: int
    failed: int
    mean_reward: float | None
    success_rate: float | None


@dataclass(frozen=True)
class Progress:
    """Where a training is."""

    step: int
    first_step: int
    last_step: int
    finished: int
    failed: int
    mean_reward: float | None
    evaluating: bool


@dataclass(frozen=True)
class Evaluation:
    """Tasks that eval episodes try before the first step, after every so many, and after the last.

    The last one needs an engine that still serves then: ``job.serve_after_training``.

    Args:
        dataset: gives the tasks, anew for each evaluation; it must end.
        every_steps: steps between two evaluations.
        samples: episodes of each task.
        on_done: called with each report, in the thread of the client's event loop.
    """

    dataset: Callable[[], Iterable[Task]]
    every_steps: int
    samples: int = 1
    on_done: Callable[[EvaluationReport], None] = lambda report: None


@dataclass(frozen=True)
class TrainOptions:
    """How to train. :func:`swarm.client.auto_train_with_dataset` explains the options that are not listed here.

    Args:
        evaluation: of the policy, by eval episodes.
        shuffle_rewards: permute the rewards of each task's episodes: a control run, which must not learn.
        patient: wait for an engine that is OFFLINE, because somebody starts it again.
        on_progress: called with each change, in the thread of the client's event loop.
    """

    num_repeat: int | None = None
    total_steps: int | None = None
    max_parallel: int | None = None
    auto_retry: bool | int = True
    throttle_policy: Throttle | None = None
    evaluation: Evaluation | None = None
    shuffle_rewards: bool = False
    patient: bool = False
    on_progress: Callable[[Progress], None] = lambda progress: None
