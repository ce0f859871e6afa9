"""A pointwise judge: each answer alone against a rubric, one call per answer.

Source: G-Eval (Liu et al. 2023, arXiv:2303.16634): criteria in words, a score for each, and with log-probabilities the
mean of a score's distribution. Scores are whole numbers from 0 to 9, divided by 9.

Failure mode: similar answers get the same score, so many groups are uninformative (most of them without
log-probabilities), and a judge that is kind to all is useless. It has no position bias, and it is the only judge whose
rewards mean the same across groups. If the right answer is known, a verifiable reward is better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from reward_hooks.contract import Candidate, HookContext, Reward
from reward_hooks.judges.judge import (
    DIGITS,
    HIGHEST,
    LOWEST,
    SCORE,
    Judge,
    JudgeConfig,
    json_of,
    means,
    question,
    score_of,
    shown_answer,
    strict_list,
    text_of,
)
from reward_hooks.judges.judge_client import Unparsable
from swarm.concurrency import all_of
from swarm.types import Task


class PointwiseConfig(JudgeConfig):
    """One pointwise judge."""

    kind: Literal["pointwise"] = "pointwise"
    criteria: dict[str, str] = Field(
        default={"quality": "how well the answer meets the rubric"},
        min_length=1,
        description="name and description of each criterion; the reward is their mean",
    )


class Pointwise(Judge[PointwiseConfig]):
    """Asks one question per answer; the reward is in [0, 1], its components are the criteria."""

    name = "pointwise"

    async def judge(self, task: Task, answers: Sequence[Candidate], context: HookContext) -> list[Reward]:
        """The mean of each answer's criteria."""
        replies = await all_of([self._ask(task, answer) for answer in answers])
        # rewards of means and of plain scores cannot be compared
        plain = any(reply.means is None for reply in replies)
        return [reply.reward(plain=plain) for reply in replies]

    async def _ask(self, task: Task, answer: Candidate) -> _Reply:
        names, (explanation, explained) = list(self._config.criteria), self._config.explanation
        criteria = "\n".join(f"- {name}: {description}" for name, description in self._config.criteria.items())
        example = ", ".join(f'{{"criterion": "{name}", "score": 5}}' for name in names)
        ask = (
            f"Score the answer by each criterion with a whole number from {LOWEST} (useless) to {HIGHEST} (could not "
            f'be better):\n{criteria}\nReply with JSON only: {{{explanation}"scores": [{example}]}}'
        )
        entry = {"criterion": {"type": "string", "enum": names}, "score": SCORE}
        fields = {**explained, "scores": strict_list(len(names), entry)}
        body = question(self._config, task, [("1", shown_answer(answer))], ask, fields)
        return await self.client.chat(body, lambda choice: _read(choice, names), kind="pointwise")


@dataclass(frozen=True, slots=True)
class _Reply:
    """Scores by criterion, and the means of their distributions, where the judge shows these."""

    scores: Mapping[str, float]
    means: Mapping[str, float] | None
    explanation: str

    def reward(self, *, plain: bool) -> Reward:
        values = self.scores if plain or self.means is None else self.means
        components = {name: value / HIGHEST for name, value in values.items()}
        value = sum(components.values()) / len(components)
        return Reward(value=value, components=components, reason=self.explanation)


def _read(choice: Mapping[str, Any], names: Sequence[str]) -> _Reply:
    reply = json_of(text_of(choice))
    listed: Any = reply.get("scores")
    if not isinstance(listed, list) or sorted(str(entry.get("criterion")) for entry in listed) != sorted(names):
        raise Unparsable(f"it does not score each of {', '.join(names)} once")
    scores = {str(entry["criterion"]): float(score_of(entry.get("score"))) for entry in listed}
    shown = means(choice, "score", DIGITS, len(listed))
    by_name = None if shown is None else dict(zip(scores, shown, strict=True))
    return _Reply(
        {name: scores[name] for name in names},
        None if by_name is None else {name: by_name[name] for name in names},
        str(reply.get("explanation") or ""),
    )
