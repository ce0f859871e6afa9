"""``Suite``: held-out prompts on which a challenger must be not worse; ``Examination``: asks both sides prompts drawn
from the suites of one route while its stage is in a trial.

What it proves: prompts are drawn with replacement, each by the number of its draw alone, and both sides answer a draw
anew. So the differences of one comparison are independent, each with the mean over the suite of what the challenger is
better by, and the e-process of :mod:`swarm.evidence.betting` holds for that mean. The incumbent's answer to a draw is
kept for the next version, with which it is compared as the first time: each comparison is valid by itself, and two of
them are not independent.

Invariant: nothing of it is trained or delivered. Draws are recorded in the order in which they were begun, and none is
passed over: a draw that fails is repeated until it is answered, and until then the suite proves nothing.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from adapters.dialects import ChatDialect, LLMRequest, SampledAnswer, to_json
from gateway.rollout.answering import Untrained, run_with_group
from gateway.rollout.group import GroupRun
from gateway.rollout.reference import Drawn
from gateway.rollout.server import Training
from gateway.takeover.shadow import Ask, Shadow, giving_way, whole_answer
from gateway.types import Caller, Incoming
from swarm.concurrency import backoff, first_of
from swarm.data import read_tasks, task_digest
from swarm.errors import ConfigError, RequestError, SwarmGatewayError, UnavailableError
from swarm.evidence.pairs import Pair
from swarm.evidence.stages import ServingStage
from swarm.importer import digest_of
from swarm.types import Task

logger = logging.getLogger(__name__)

#: Prompts of one suite, and the incumbent's answers to draws from it: all of them are held in memory.
MAX_PROMPTS = MAX_DRAWS = 10_000
#: Pauses after draws that failed.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 30.0


@dataclass(frozen=True, slots=True, eq=False)
class Suite:
    """Held-out prompts; ``key`` is its name with a digest of them."""

    key: str
    tasks: tuple[Task, ...]

    @classmethod
    def read(cls, name: str, source: str) -> Self:
        """The suite that ``source`` holds, see :func:`swarm.data.read_tasks`.

        Raises:
            ConfigError: it cannot be read, or holds no prompt, one that is no chat, or more than :data:`MAX_PROMPTS`.
        """
        tasks: list[Task] = []
        for task in read_tasks(source):
            tasks.append(task)
            try:
                _chat(task, name)
            except RequestError as exc:
                raise ConfigError(f"gate.suites.{name}: prompt {len(tasks)} of {source}: {exc.message}") from exc
            if len(tasks) > MAX_PROMPTS:
                raise ConfigError(f"gate.suites.{name}: {source} holds more than {MAX_PROMPTS} prompts")
        if not tasks:
            raise ConfigError(f"gate.suites.{name}: {source} holds no prompt")
        return cls(
            f"{name}@{digest_of(task_digest(task.model_dump(), source).encode() for task in tasks)}", tuple(tasks)
        )

    def drawn(self, number: int) -> Task:
        """The prompt of a draw: the same at every gateway and in every comparison."""
        return random.Random(f"{self.key} {number}").choice(self.tasks)


class Examination:
    """The suites of one route.

    Args:
        shadow: of the route; what is compared behind its users goes first.
        ask: asks the incumbent.
    """

    def __init__(self, suites: Sequence[Suite], shadow: Shadow, training: Training, ask: Ask) -> None:
        self._suites = suites
        self._shadow = shadow
        self._training = giving_way(training)
        self._ask = ask
        most = min(training.stage_rules.trial_requests, MAX_DRAWS)
        # in an order of its own, so that several gateways, or one that began again, rarely repeat each other's draws
        self._numbers = random.sample(range(most), most)
        #: the incumbent's, with their seconds, by suite and number of the draw
        self._answers: dict[tuple[str, int], tuple[SampledAnswer, float]] = {}

    async def run(self) -> None:
        """Draw in each trial, until cancelled."""
        heard = self._training.swarm.stages.heard
        while True:
            stage = self._stage
            if stage is None:
                await heard.wait()
            else:
                await first_of(self._examine(stage), self._left(stage))

    @property
    def _stage(self) -> ServingStage | None:
        """The stage now, if it is in a trial that draws of these suites decide."""
        stage = self._shadow.sides.stage
        ours = self._training.suites
        if stage is None or not stage.trial or stage.challenger is None or stage.rules.suites != ours:
            return None
        return stage

    async def _left(self, stage: ServingStage) -> None:
        """Return once another version, another share or no trial has come."""

        def over() -> bool:
            now = self._stage
            return now is None or (now.challenger, now.label) != (stage.challenger, stage.label)

        await self._training.swarm.stages.heard.until(over)

    async def _examine(self, stage: ServingStage) -> None:
        """Draw from the suites that are not decided, the one with the fewest draws first."""
        drawn, failures = dict.fromkeys(self._suites, 0), 0
        while True:
            if (suite := await self._next(stage, drawn)) is None:
                await self._training.swarm.stages.heard.wait()
                continue
            begun = drawn[suite]
            numbers = self._numbers[begun : begun + max(1, self._shadow.free)]
            outcomes = await asyncio.gather(
                *(self._pair(stage, suite, number) for number in numbers), return_exceptions=True
            )
            try:
                for outcome in outcomes:
                    if isinstance(outcome, BaseException):
                        raise outcome
                    await self._training.swarm.client.record_pair(outcome)
                    drawn[suite] += 1
                failures = 0
            except Exception as exc:  # nobody else begins to ask again
                failures += 1
                if failures == 1:
                    unknown = None if isinstance(exc, SwarmGatewayError) else exc
                    logger.warning("suite %s proves nothing until it is answered: %s", suite.key, exc, exc_info=unknown)
                await asyncio.sleep(backoff(failures, _FIRST_PAUSE, _LONGEST_PAUSE))

    async def _next(self, stage: ServingStage, drawn: dict[Suite, int]) -> Suite | None:
        report = await self._training.swarm.fresh_report()
        wanted = (*stage.key, stage.challenger, stage.label)
        decided = {
            name
            for status in (report.status.comparisons if report.status is not None else ())
            if (status.route, status.incumbent, status.challenger, status.stage) == wanted
            for name, finding in status.verdict.suites.items()
            if finding != "undecided"
        }
        left = [suite for suite in self._suites if suite.key not in decided and drawn[suite] < len(self._numbers)]
        return min(left, key=lambda suite: drawn[suite], default=None)

    async def _pair(self, stage: ServingStage, suite: Suite, number: int) -> Pair:
        """The pair of one draw."""
        training, prompt = self._training, suite.drawn(number)
        if (gone := training.swarm.gone_for(0.0)) is not None:
            raise gone
        assert training.settings.serve is not None, "only a route that serves has suites"
        name = f"suite {suite.key} {number}"
        call = _chat(prompt, training.settings.serve.incumbent.server.model)
        incoming = Incoming(call, {}, Caller(), ChatDialect.path, to_json(call.body), name)
        if (answer := self._answers.get((suite.key, number))) is None:
            answer = self._answers[suite.key, number] = await whole_answer(self._ask, incoming)

        async def use(run: GroupRun) -> Pair:
            submission = run.shaped.submission
            # the hook sees what the row has beside its prompt, such as the right answer
            metadata = {**prompt.metadata, **submission.task.metadata}
            task = submission.task.model_copy(update={"metadata": metadata})
            run.shaped = replace(run.shaped, submission=submission.model_copy(update={"task": task}))
            run.sample(range(len(run.shaped.bodies)))
            pair = await run.compared(self._shadow.reference(training, incoming, *answer, stage, Drawn()))
            if not run.samples and isinstance(failure := run.failure(), UnavailableError):
                raise failure
            return pair

        untrained = Untrained("suite", patient=False, passes=False)
        pair = await run_with_group(training, incoming, None, use, untrained=untrained)
        if pair.terms.challenger != stage.challenger:
            raise UnavailableError(f"version {pair.terms.challenger} answered, not {stage.challenger}", code="moved")
        # the same at every gateway, so that a draw counts once
        return pair.model_copy(update={"suite": suite.key, "group_id": f"{name} {pair.terms.digest}"})


def _chat(task: Task, model: str | None) -> LLMRequest:
    """One prompt as a request; raises :class:`RequestError` unless its messages are those of a chat."""
    return ChatDialect().parse({"model": model, "messages": task.messages})
