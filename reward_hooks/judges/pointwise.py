"""A pointwise judge: each answer alone against a rubric, one call per answer.

Source: G-Eval (Liu et al. 2023, arXiv:2303.16634): criteria in words, a score for each, and with log-probabilities the
mean of a score's distribution. Scores are whole numbers from 0 to 9, divided by 9.

Failure mode: similar answers get the same score, so many groups are uninformative (most of them without
log-probabilities), and a judge that is kind to all is useless. It has no position bias, and it is the only judge whose
rewards mean the same across groups. If the right answer is known, a verifiable reward is better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from pydantic import Field

from reward_hooks.contract import Candidate, HookContext, Reward
from reward_hooks.judges.judge import (
    HIGHEST,
    LOWEST,
    SCORE,
    TextJudge,
    Verdict,
    comparable,
    json_of,
    scores_of,
    shown_answer,
    strict_list,
    text_of,
)
from reward_hooks.judges.judge_client import Unparsable
from swarm.concurrency import all_of
from swarm.types import Task


class Pointwise(TextJudge):
    """Asks one question per answer; the reward is in [0, 1], its components are the criteria."""

    name = "pointwise"
    criteria: dict[str, str] = Field(
        default={"quality": "how well the answer meets the rubric"},
        min_length=1,
        description="name and description of each criterion; the reward is their mean",
    )

    async def judge(self, task: Task, answers: Sequence[Candidate], context: HookContext) -> list[Reward]:
        """The mean of each answer's criteria."""
        replies = await all_of([self._ask(task, answer) for answer in answers])
        scores = iter(comparable(verdict for verdicts, _ in replies for verdict in verdicts))
        rewards: list[Reward] = []
        for _, explanation in replies:
            components = {name: next(scores) / HIGHEST for name in self.criteria}
            rewards.append(Reward(value=fmean(components.values()), components=components, reason=explanation))
        return rewards

    async def _ask(self, task: Task, answer: Candidate) -> tuple[list[Verdict], str]:
        """The verdict by each criterion, and the explanation."""
        names, (explanation, explained) = list(self.criteria), self.explanation
        criteria = "\n".join(f"- {name}: {description}" for name, description in self.criteria.items())
        example = ", ".join(f'{{"criterion": "{name}", "score": 5}}' for name in names)
        ask = (
            f"Score the answer by each criterion with a whole number from {LOWEST} (useless) to {HIGHEST} (could not "
            f'be better):\n{criteria}\nReply with JSON only: {{{explanation}"scores": [{example}]}}'
        )
        entry = {"criterion": {"type": "string", "enum": names}, "score": SCORE}
        fields = {**explained, "scores": strict_list(len(names), entry)}
        return await self.asked(task, [("1", shown_answer(answer))], ask, fields, lambda choice: _read(choice, names))


def _read(choice: Mapping[str, Any], names: Sequence[str]) -> tuple[list[Verdict], str]:
    reply = json_of(text_of(choice))
    listed: Any = reply.get("scores")
    if not isinstance(listed, list) or sorted(str(entry.get("criterion")) for entry in listed) != sorted(names):
        raise Unparsable(f"it does not score each of {', '.join(names)} once")
    by_name = {str(entry["criterion"]): score for entry, score in zip(listed, scores_of(choice, listed), strict=True)}
    return [by_name[name] for name in names], str(reply.get("explanation") or "")
