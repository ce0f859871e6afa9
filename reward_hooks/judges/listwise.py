"""A listwise judge: all answers of a group in one question, scored side by side.

Source: RULER, "Relative Universal LLM-Elicited Rewards" (OpenPipe ART, 2025): scoring answers next to each other is
easier than scoring each alone, and GRPO needs only the differences. The conversation, which they share, is said once.
Scores are whole numbers from 0 to 9, replaced by the mean of their distribution where log-probabilities are offered
(G-Eval, arXiv:2303.16634), and divided by 9.

Failure mode: judges prefer places ("Large Language Models are not Fair Evaluators", Wang et al. 2023,
arXiv:2305.17926). The order is shuffled anew for each group, so that a preference is noise and no signal; what noise
remains flips answers whose quality differs by less than the preference. ``orders: 2`` asks again in reverse order and
takes the mean, which cancels a preference that grows evenly along the list. Also: a judge scores the style it likes
itself, and a policy that is trained on it for long learns to please it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from reward_hooks.contract import Candidate, HookContext, Reward
from reward_hooks.judges.client import JudgeClient, Unparsable
from reward_hooks.judges.judge import Judge, JudgeConfig, all_of, prompt, question, shown_answer, strict_object
from reward_hooks.judges.reading import DIGITS, HIGHEST, LOWEST, json_of, means, score_of, text_of
from swarm.types import Task

_Verdicts = list[tuple[float, float, str]]  # score, mean of its distribution, explanation


class ListwiseConfig(JudgeConfig):
    """One listwise judge."""

    kind: Literal["listwise"] = "listwise"
    orders: int = Field(default=1, ge=1, le=8, description="questions per group, each in another order; their mean")
    seed: int = Field(default=0, description="of the orders; with it, each group has an order of its own")


class Listwise(Judge):
    """Asks ``orders`` questions per group; the reward is in [0, 1]."""

    def __init__(self, config: ListwiseConfig, client: JudgeClient | None = None) -> None:
        super().__init__(client or JudgeClient(config.endpoint))
        self._config = config

    async def judge(self, task: Task, answers: Sequence[Candidate], context: HookContext) -> list[Reward]:
        """The mean of each answer's scores over the orders."""
        orders = self._orders(len(answers), context.group_id or task.task_id)
        asked = await all_of([self._ask(task, answers, order) for order in orders])
        return [_reward([verdicts[index] for verdicts in asked]) for index in range(len(answers))]

    def _orders(self, count: int, group: str) -> list[list[int]]:
        """A shuffled order turned to start at places that are evenly apart, each such order followed by its reverse."""
        first = random.Random(f"{self._config.seed}/{group}").sample(range(count), count)
        turns = (self._config.orders + 1) // 2
        starts = [count * turn // turns for turn in range(turns)]
        turned = [first[start:] + first[:start] for start in starts]
        return [order for one in turned for order in (one, one[::-1])][: self._config.orders]

    async def _ask(self, task: Task, answers: Sequence[Candidate], order: Sequence[int]) -> _Verdicts:
        labelled = [(str(place), shown_answer(answers[index])) for place, index in enumerate(order, 1)]
        fields: dict[str, Any] = {"answer": {"type": "integer", "minimum": 1, "maximum": len(order)}}
        if self._config.explain:
            fields["explanation"] = {"type": "string"}
        fields["score"] = {"type": "integer", "minimum": LOWEST, "maximum": HIGHEST}
        verdicts = {"type": "array", "items": strict_object(fields), "minItems": len(order), "maxItems": len(order)}
        body = question(
            self._config,
            prompt(task, self._config, labelled, _ask_for(len(order), self._config.explain)),
            strict_object({"verdicts": verdicts}),
        )
        by_place = await self.client.chat(body, lambda choice: _read(choice, len(order)), kind="listwise")
        found = {index: by_place[place] for place, index in enumerate(order)}
        return [found[index] for index in range(len(order))]


def _ask_for(count: int, explain: bool) -> str:
    explanation = '"explanation": "one sentence", ' if explain else ""
    return (
        f"Compare the {count} answers with each other and give each a whole score from {LOWEST} (useless) to {HIGHEST} "
        "(could not be better). Use the scale to tell them apart; equally good answers get equal scores. Reply with "
        f'JSON only: {{"verdicts": [{{"answer": 1, {explanation}"score": 5}}, ...]}}, one entry for each answer '
        f"from 1 to {count}."
    )


def _read(choice: Mapping[str, Any], count: int) -> _Verdicts:
    """The verdicts by place."""
    listed: Any = json_of(text_of(choice)).get("verdicts")
    if not isinstance(listed, list) or [type(one) for one in listed] != [dict] * count:
        raise Unparsable(f"it has not one verdict for each of the {count} answers")
    distribution = means(choice, "score", DIGITS, count)
    verdicts: dict[int, tuple[float, float, str]] = {}
    for number, entry in enumerate(listed):
        score = float(score_of(entry.get("score")))
        mean = distribution[number] if distribution is not None else score
        verdicts[int(entry.get("answer"))] = score, mean, str(entry.get("explanation") or "")
    if set(verdicts) != set(range(1, count + 1)):
        raise Unparsable(f"its verdicts are on the answers {sorted(verdicts)} of 1 to {count}")
    return [verdicts[place] for place in range(1, count + 1)]


def _reward(verdicts: _Verdicts) -> Reward:
    scores, mean_scores = [one[0] for one in verdicts], [one[1] for one in verdicts]
    components = {"score": sum(scores) / len(scores) / HIGHEST}
    if len(verdicts) > 1:
        components["spread"] = (max(mean_scores) - min(mean_scores)) / HIGHEST
    reason = " / ".join(dict.fromkeys(one[2] for one in verdicts if one[2]))
    return Reward(value=sum(mean_scores) / len(mean_scores) / HIGHEST, components=components, reason=reason)
