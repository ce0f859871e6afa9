"""``Reference``: an answer that is judged beside a group's and never trained; and the pair that both make.

Invariant: what the hook gave the reference never reaches the trainer as a reward, and a reward in a pair is one that
the hook gave, within its declared bounds; whatever else happens, the pair says that nobody judged.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple, cast

from gateway.rollout.sampling import Sample, Shaped
from gateway.rollout.server import Training
from gateway.rollout.submission import refuses
from reward_hooks import Candidate, GroupScore, HookContext
from reward_hooks.contract import NO_USAGE, sendable, texts_of
from swarm.errors import HookError, SwarmGatewayError
from swarm.evidence.pairs import MAX_NAME, Pair, Side, SideResult, Terms
from swarm.types import Task


class Drawn(NamedTuple):
    """Who answered the user of a request; names as of :class:`swarm.evidence.pairs.Pair`."""

    side: Side = "incumbent"
    position: float | None = None
    begun: tuple[int, int] = (0, 0)


@dataclass(eq=False)
class Reference:
    """The answer of an incumbent to the request of one group.

    Attributes:
        candidate: its answer, with any index; ``source`` says whose it is. Its place among the group's is drawn.
        tokens: of the answer; ``None``: its server does not say.
        terms: under which both are compared, but for what only the group knows.
        drawn: who answered the user, and what else a pair has of that.
        training: of the route.
    """

    candidate: Candidate
    tokens: int | None
    terms: Terms
    drawn: Drawn
    training: Training
    _ours: Sequence[float] = ()
    _theirs: float | None = None
    _failure: str = "nothing was judged"

    async def score(self, task: Task, candidates: Sequence[Candidate], context: HookContext) -> GroupScore:
        """The rewards of ``candidates`` alone, which train; the reference is judged with them, apart, or by the gate.

        Raises:
            HookError: the hook gives none. Where the reference is judged apart or by the gate, only the pair's reward
                may be missing.
        """
        if self.training.gate is None:
            return await self.judge(task, candidates, context)
        with suppress(HookError):
            await self.judge(task, candidates, context)
        return await self.training.hooks.score(task, candidates, context)

    async def judge(self, task: Task, candidates: Sequence[Candidate], context: HookContext) -> GroupScore:
        """The rewards of ``candidates`` in the pair, by the gate if there is one.

        Raises:
            HookError: there are none.
        """
        judge = self.training.judge
        self._ours, self._theirs, self._failure = (), None, "the hook failed"
        like = {"session": candidates[0].session}
        if self.terms.rules.reference:
            # by chance, so that a judge that prefers a place prefers no side
            number = random.Random(context.group_id).randint(0, len(candidates))
            mixed = [*candidates[:number], self.candidate.model_copy(update=like), *candidates[number:]]
            mixed = [each.model_copy(update={"index": index}) for index, each in enumerate(mixed)]
            try:
                rewards = (await judge.score(task, mixed, context)).rewards
                theirs = rewards.pop(number).value
                score = GroupScore(rewards=rewards)
            except HookError as exc:
                if exc.code != NO_USAGE:
                    raise
                # an incumbent's server may tell no usage of any stream: the group trains all the same
                self._failure = f"the hook failed on the incumbent's answer: {exc.code}"
                score, theirs = await judge.score(task, candidates, context), None
        else:
            score, theirs = await judge.score(task, candidates, context), None
            try:
                alone = self.candidate.model_copy(update={"index": 0, **like})
                theirs = (await judge.score(task, [alone], context)).values[0]
            except HookError as exc:
                self._failure = f"the hook failed on the incumbent's answer: {exc.code or exc.type}"
        self._ours, self._theirs = score.values, theirs
        return score

    def pair(self, shaped: Shaped, outcomes: Sequence[Sample | SwarmGatewayError | None]) -> Pair:
        """What both sides did, as far as the group has come; ``outcomes`` as of a group."""
        rules = self.terms.rules
        # what was cancelled because others were enough did not fail
        failed = sum(isinstance(outcome, SwarmGatewayError) for outcome in outcomes)
        samples = [outcome for outcome in outcomes if isinstance(outcome, Sample)]
        ours = [rules.scaled(value) for value in self._ours]
        theirs = None if self._theirs is None else rules.scaled(self._theirs)
        rewards = [value for value in ours if value is not None]
        why = ""
        if failed:
            why = f"{failed} of {len(outcomes)} answers failed"
        elif not self._ours or self._theirs is None:
            why = self._failure
        elif len(rewards) < len(ours) or theirs is None:
            why = f"a reward is not within the bounds {list(rules.bounds)}"
        versions = [sample.policy_version for sample in samples if sample.policy_version is not None]
        return Pair(
            group_id=shaped.group_id,
            terms=self.terms.model_copy(
                update={
                    # of a group that a sync of weights parted, none of the later version's alone
                    "challenger": min(versions, default=shaped.context.policy_version),
                    "num_repeat": len(outcomes),
                }
            ),
            challenger=self._side(samples, len(outcomes), failed, None if why else fmean(rewards)),
            incumbent=SideResult(
                reward=None if why else theirs,
                refused=self._refuses(self.candidate.message, self.candidate.finish_reason),
                characters=_characters(self.candidate.message),
                tokens=self.tokens,
                finish=sendable(self.candidate.finish_reason)[:MAX_NAME],
            ),
            side=self.drawn.side,
            position=self.drawn.position,
            begun=self.drawn.begun,
            unjudged=why[:MAX_NAME],
        )

    def _side(self, samples: Sequence[Sample], answers: int, failed: int, reward: float | None) -> SideResult:
        def mean(amount: Callable[[Sample], float]) -> float | None:
            return fmean(map(amount, samples)) if samples else None

        return SideResult(
            answers=answers,
            reward=reward,
            failed=failed / answers if answers else 1.0,
            refused=mean(lambda sample: self._refuses(sample.answer.message, sample.answer.finish_reason)) or 0.0,
            slowest_seconds=max((sample.latency for sample in samples), default=None),
            characters=mean(lambda sample: _characters(sample.answer.message)),
            tokens=mean(lambda sample: int(sample.answer.usage.get("completion_tokens") or 0)),
            finish=sendable(",".join(sorted({sample.answer.finish_reason for sample in samples})))[:MAX_NAME],
        )

    def _refuses(self, message: Mapping[str, Any], finish: str) -> bool:
        return refuses(message, finish, self.training.settings.refusal_openings)


def _characters(message: Mapping[str, Any]) -> int:
    calls = cast("list[dict[str, Any]]", message.get("tool_calls") or [])
    written = [(call.get("function") or {}).get("arguments") for call in calls]
    return sum(len(text) for text in [*texts_of(message), *written] if isinstance(text, str))
