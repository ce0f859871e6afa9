"""A pointwise judge: each answer alone against a rubric, one call per answer.

Source: G-Eval (Liu et al. 2023, arXiv:2303.16634): criteria in words, a score for each, and with log-probabilities the
mean of a score's distribution. Scores are whole numbers from 0 to 9, divided by 9.

Failure mode: similar answers get the same score, so many groups are uninformative (most of them without
log-probabilities), and a judge that is kind to all is useless. It has no position bias, and it is the only judge whose
rewards mean the same across groups. If the right answer is known, a verifiable reward is better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from reward_hooks.contract import Candidate, HookContext, Reward
from reward_hooks.judges.judge import (
    HIGHEST,
    LOWEST,
    SCORE,
    Judge,
    JudgeConfig,
    json_of,
    question,
    scores_of,
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
        return await all_of([self._ask(task, answer) for answer in answers])

    async def _ask(self, task: Task, answer: Candidate) -> Reward:
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


def _read(choice: Mapping[str, Any], names: Sequence[str]) -> Reward:
    reply = json_of(text_of(choice))
    listed: Any = reply.get("scores")
    if not isinstance(listed, list) or sorted(str(entry.get("criterion")) for entry in listed) != sorted(names):
        raise Unparsable(f"it does not score each of {', '.join(names)} once")
    means = [mean / HIGHEST for _, mean in scores_of(choice, listed)]
    components = {str(entry["criterion"]): mean for entry, mean in zip(listed, means, strict=True)}
    return Reward(
        value=sum(means) / len(means),
        components={name: components[name] for name in names},
        reason=str(reply.get("explanation") or ""),
    )
