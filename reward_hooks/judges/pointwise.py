"""A pointwise judge: each answer alone against a rubric, one call per answer.

Source: G-Eval (Liu et al. 2023, arXiv:2303.16634): criteria in words, a score for each, and the mean of a score's
distribution where log-probabilities are offered. Scores are whole numbers from 0 to 9, divided by 9.

Failure mode: answers that are close get the same score, so that many groups are uninformative (without
log-probabilities most are), and a judge that is kind to all is of no use. It has no preference of place, and it is the
one judge whose rewards mean the same across groups. With the whole truth known, a verifiable reward is better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from reward_hooks.contract import Candidate, HookContext, Reward
from reward_hooks.judges.client import JudgeClient, Unparsable
from reward_hooks.judges.judge import (
    DIGITS,
    HIGHEST,
    LOWEST,
    Judge,
    JudgeConfig,
    all_of,
    json_of,
    means,
    prompt,
    question,
    score_of,
    shown_answer,
    strict_object,
    text_of,
)
from swarm.types import Task


class PointwiseConfig(JudgeConfig):
    """One pointwise judge."""

    kind: Literal["pointwise"] = "pointwise"
    criteria: dict[str, str] = Field(
        default={"quality": "how well the answer meets the rubric"},
        min_length=1,
        description="name and description of each thing that is scored; the reward is their mean",
    )


class Pointwise(Judge):
    """Asks one question per answer; the reward is in [0, 1], its components are the criteria."""

    def __init__(self, config: PointwiseConfig, client: JudgeClient | None = None) -> None:
        super().__init__(client or JudgeClient(config.endpoint))
        self._config = config

    async def judge(self, task: Task, answers: Sequence[Candidate], context: HookContext) -> list[Reward]:
        """The mean of each answer's criteria."""
        return await all_of([self._ask(task, answer) for answer in answers])

    async def _ask(self, task: Task, answer: Candidate) -> Reward:
        names = list(self._config.criteria)
        criteria = "\n".join(f"- {name}: {description}" for name, description in self._config.criteria.items())
        example = ", ".join(f'{{"criterion": "{name}", "score": 5}}' for name in names)
        explanation = '"explanation": "one sentence", ' if self._config.explain else ""
        ask = (
            f"Score the answer by each criterion with a whole number from {LOWEST} (useless) to {HIGHEST} (could not "
            f'be better):\n{criteria}\nReply with JSON only: {{{explanation}"scores": [{example}]}}'
        )
        score = {"type": "integer", "minimum": LOWEST, "maximum": HIGHEST}
        entry = strict_object({"criterion": {"type": "string", "enum": names}, "score": score})
        scores = {"type": "array", "items": entry, "minItems": len(names), "maxItems": len(names)}
        fields: dict[str, Any] = {"explanation": {"type": "string"}} if self._config.explain else {}
        messages = prompt(task, self._config, [("1", shown_answer(answer))], ask)
        body = question(self._config, messages, strict_object({**fields, "scores": scores}))
        return await self.client.chat(body, lambda choice: _read(choice, names), kind="pointwise")


def _read(choice: Mapping[str, Any], names: Sequence[str]) -> Reward:
    reply = json_of(text_of(choice))
    listed: Any = reply.get("scores")
    if not isinstance(listed, list) or sorted(str(one.get("criterion")) for one in listed) != sorted(names):
        raise Unparsable(f"it does not score each of {', '.join(names)} once")
    distribution = means(choice, "score", DIGITS, len(names))
    components: dict[str, float] = {}
    for number, entry in enumerate(listed):
        plain = score_of(entry.get("score"))
        components[str(entry["criterion"])] = (distribution[number] if distribution is not None else plain) / HIGHEST
    return Reward(
        value=sum(components.values()) / len(components),
        components={name: components[name] for name in names},
        reason=str(reply.get("explanation") or ""),
    )
