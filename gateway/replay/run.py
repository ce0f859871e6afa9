"""The replay: a bounded number of requests at once, until the prompts, the steps, the time or the failures end it.

Invariant: every request is in the report as answered, failed or cancelled, whatever ends the replay.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from gateway.replay.senders import Outcome, Sender
from gateway.reports.report import Failure, Latency, Report, Score, StepPoint, points_of_steps
from swarm.client import AsyncSwarmClient
from swarm.data import epochs_of
from swarm.errors import ConfigError, SwarmGatewayError
from swarm.progress import DOING, batch_progress
from swarm.states import EngineState
from swarm.status import ServerStatus
from swarm.types import Model, StepResult, Task
from swarm.validation import validated

#: Why a replay ended that nothing cut short.
ALL_SENT = "all prompts sent"
_POLL = 1.0
#: More steps than a server does between two polls.
_FEW_STEPS = 5
_FAILURE_PAUSE = 0.5


class ReplayConfig(Model):
    """What to send and when to stop; times in seconds.

    ``epochs`` None sends the prompts again and again until ``steps`` or ``max_requests``; ``steps`` are training steps
    that the server does meanwhile.
    """

    data: str | Path = Field(description="as for swarm.data.read_tasks")
    target: str = Field(description="what people read in the report: the base_url or the command")
    model: str = ""
    label: str = "run"
    concurrency: int = Field(default=4, ge=1, le=1024)
    epochs: int | None = Field(default=1, ge=1)
    max_requests: int | None = Field(default=None, ge=1)
    steps: int | None = Field(default=None, ge=1)
    time_limit: float | None = Field(default=None, gt=0)
    max_failures_in_a_row: int = Field(default=50, ge=1)
    seed: int = 0
    no_train: bool = Field(default=False, description="the prompts are scored, and nothing is trained")

    @model_validator(mode="after")
    def _ends(self) -> ReplayConfig:
        if self.epochs is None and self.steps is None and self.max_requests is None:
            raise ValueError("the replay would never end: give epochs, requests or steps")
        return self


def make_config(**fields: Any) -> ReplayConfig:
    """A :class:`ReplayConfig`.

    Raises:
        ConfigError: a value out of range; names each.
    """
    return validated(ReplayConfig, fields, "replay")


@dataclass
class ReplayProgress:
    """What a progress bar shows; changed in place. ``step`` is the server's last one, 0 if there is none yet;
    ``batch``: how full its next batch is, or what it does."""

    total: int | None
    begun: int = 0
    outcomes: list[Outcome] = field(default_factory=list[Outcome])
    scores: list[Score] = field(default_factory=list[Score])
    cancelled: int = 0
    first_step: int | None = None
    step: int = 0
    steps: dict[int, StepResult] = field(default_factory=dict[int, StepResult])
    batch: str = ""

    def see(self, status: ServerStatus) -> None:
        """Take in a status; steps that were done before the first one belong to an earlier replay."""
        state = status.engine.engine_status
        self.batch = DOING[state]
        if state is EngineState.ROLLING and status.pool is not None and status.job is not None:
            self.batch = batch_progress(status.pool)[2]
        self.step = max((step.step for step in status.steps), default=0)
        if self.first_step is None:
            self.first_step = self.step
        self.steps |= {step.step: step for step in status.steps if step.step > self.first_step}

    @property
    def reward(self) -> float | None:
        """Mean reward of the latest answers that have one."""
        latest = [outcome.reward for outcome in self.outcomes[-20:] if outcome.reward is not None]
        return sum(latest) / len(latest) if latest else None


class _Ended(Exception):
    """Ends the replay before its prompts do; carries the reason."""


class _Failed(_Ended):
    """Too many requests failed in a row."""


async def replay(
    config: ReplayConfig,
    sender: Sender,
    swarm: AsyncSwarmClient | None = None,
    on_progress: Callable[[ReplayProgress], None] = lambda progress: None,
) -> Report:
    """Send the prompts of ``config.data`` through ``sender`` and report.

    Cancelling it (Ctrl-C under ``asyncio.run``) still returns the report, with ``interrupted`` set.

    Args:
        config: what to send and when to stop; ``steps`` needs ``swarm``.
        sender: sends one prompt.
        swarm: client of the swarm server, for the rewards by step.
        on_progress: called after each request and each poll of the server.

    Raises:
        ConfigError: the data cannot be read.
        SwarmGatewayError: the swarm server does not answer at the start.
    """
    prompts = itertools.islice(epochs_of(config.data, config.seed, config.epochs), config.max_requests)
    # it shows whether the data can be read
    first = await asyncio.to_thread(next, prompts)
    progress = ReplayProgress(config.max_requests)
    run = _Run(config, sender, swarm, progress, on_progress, itertools.chain([first], prompts))
    began = time.monotonic()
    because, interrupted, gave_up, unreadable = ALL_SENT, False, False, None
    try:
        async with asyncio.timeout(config.time_limit):
            await run.look()
            await run.all()
    except* TimeoutError:
        because = f"the time limit of {config.time_limit:.0f} s was reached"
    except* _Ended as endings:
        because, gave_up = str(endings.exceptions[0]), isinstance(endings.exceptions[0], _Failed)
    except* asyncio.CancelledError:
        because, interrupted = "interrupted", True
    except* ConfigError as errors:
        unreadable = errors.exceptions[0]
    if unreadable is not None:
        raise unreadable
    with contextlib.suppress(SwarmGatewayError, TimeoutError):
        async with asyncio.timeout(5.0):
            await run.look()
    outcomes = progress.outcomes
    steps = [progress.steps[step] for step in sorted(progress.steps)]
    return Report(
        label=config.label,
        data=Path(config.data).name,
        target=config.target,
        model=config.model,
        seed=config.seed,
        concurrency=config.concurrency,
        seconds=time.monotonic() - began,
        interrupted=interrupted,
        stopped_because=because,
        gave_up=gave_up,
        requests=progress.begun,
        answered=sum(1 for outcome in outcomes if not outcome.failure),
        cancelled=progress.cancelled,
        failures=failures_of(outcomes),
        untrained=dict(Counter(outcome.untrained for outcome in outcomes if outcome.untrained).most_common()),
        latency=latency_of(outcomes),
        steps=[] if config.no_train else points_of_steps(steps) if swarm else points_of_answers(outcomes),
        scores=progress.scores,
    )


@dataclass
class _Run:
    """One replay under way."""

    config: ReplayConfig
    sender: Sender
    swarm: AsyncSwarmClient | None
    progress: ReplayProgress
    on_progress: Callable[[ReplayProgress], None]
    prompts: Iterator[Task]
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def all(self) -> None:
        """Send all prompts.

        Raises:
            ExceptionGroup: of one ``_Ended``, where something else ended the replay, or of a ``ConfigError``.
        """
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(self.watch())
            await asyncio.wait([group.create_task(self.work()) for _ in range(self.config.concurrency)])
            watcher.cancel()

    async def take(self) -> Task | None:
        """The next prompt; in a thread, for it may come over a network."""
        async with self._reading:
            return await asyncio.to_thread(next, self.prompts, None)

    async def work(self) -> None:
        """Send one prompt after the other."""
        progress, most = self.progress, self.config.max_failures_in_a_row
        while (task := await self.take()) is not None:
            progress.begun += 1
            try:
                outcome = await self.sender.send(task)
            except asyncio.CancelledError:
                progress.cancelled += 1
                raise
            if self.config.no_train and not outcome.failure:
                version, answers = outcome.policy_version, list(outcome.answers)
                progress.scores.append(Score(messages=task.messages, policy_version=version, answers=answers))
            # the answers of a long replay would fill the memory
            progress.outcomes.append(replace(outcome, answers=()))
            self.on_progress(progress)
            if outcome.failure:
                latest = progress.outcomes[-most:]
                if len(latest) == most and all(outcome.failure for outcome in latest):
                    raise _Failed(f"the last {most} requests all failed, the latest with: {outcome.failure}")
                # do not hammer a server that is down
                await asyncio.sleep(max(_FAILURE_PAUSE, outcome.retry_after))

    async def watch(self) -> None:
        """Follow the training steps."""
        while self.swarm is not None:
            with contextlib.suppress(SwarmGatewayError):
                await self.look()
                self.on_progress(self.progress)
            if self.config.steps is not None and len(self.progress.steps) >= self.config.steps:
                raise _Ended(f"step {self.progress.step} is done")
            await asyncio.sleep(_POLL)

    async def look(self) -> None:
        """Ask the swarm server for its latest steps, and for all where it did more since the last look."""
        if self.swarm is None:
            return
        # all steps of a long run are megabytes, each second
        status = await self.swarm.status(episodes=0, steps=_FEW_STEPS)
        begins, progress = status.steps[0].step if status.steps else 0, self.progress
        if progress.first_step is not None and begins > progress.step + 1:
            status = await self.swarm.status(episodes=0)
        progress.see(status)


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


def points_of_answers(outcomes: Iterable[Outcome]) -> list[StepPoint]:
    """Rewards by the policy version that answered: weights of version v collect the batch of step v + 1."""
    by_step: dict[int, list[float]] = {}
    for outcome in outcomes:
        if outcome.reward is not None and outcome.policy_version is not None:
            by_step.setdefault(outcome.policy_version + 1, []).append(outcome.reward)
    return [StepPoint(step=step, reward_mean=statistics.fmean(values)) for step, values in sorted(by_step.items())]
