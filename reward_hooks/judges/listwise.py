"""A listwise judge: all answers of a group in one question, scored side by side.

Source: RULER, "Relative Universal LLM-Elicited Rewards" (OpenPipe ART, 2025): scoring answers next to each other is
easier than scoring each alone, and GRPO needs only the differences. The conversation, which they share, is said once.
Scores are whole numbers from 0 to 9, replaced by the mean of their distribution where log-probabilities are offered
(G-Eval, arXiv:2303.16634), and divided by 9.

Failure mode: judges prefer places ("Large Language Models are not Fair Evaluators", Wang et al. 2023,
arXiv:2305.17926). Each group is asked about five times, in turns of an order that is shuffled anew for each group, and
:mod:`reward_hooks.judges.places` takes out what the judge gives to a place, exactly where that adds to the score. What
remains is a preference that does not add up: scores that are rounded (a judge without log-probabilities) or that the
end of the scale cuts off, or a place that helps good answers more than bad ones. ``orders: 3`` is enough where the
judge offers log-probabilities; ``orders: 1`` leaves a preference in as noise; ``orders: 2`` is an order and its
reverse. Also: a judge scores the style it likes itself, and a policy that is trained on it for long learns to please
it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from reward_hooks.contract import Candidate, HookContext, Reward
from reward_hooks.judges.client import JudgeClient, Unparsable
from reward_hooks.judges.judge import Judge, JudgeConfig, all_of, prompt, question, shown_answer, strict_object
from reward_hooks.judges.places import freed, orders_of
from reward_hooks.judges.reading import DIGITS, HIGHEST, LOWEST, json_of, means, score_of, text_of
from swarm.types import Task

_Verdicts = list[tuple[float, float, str]]  # score, mean of its distribution, explanation


class ListwiseConfig(JudgeConfig):
    """One listwise judge."""

    kind: Literal["listwise"] = "listwise"
    orders: int = Field(default=5, ge=1, le=8, description="questions per group, each in another order")
    seed: int = Field(default=0, description="of the orders; with it, each group has an order of its own")


class Listwise(Judge):
    """Asks ``orders`` questions per group, or as many as there are answers. The reward is in [0, 1], or just outside
    where a preference for places was taken out."""

    def __init__(self, config: ListwiseConfig, client: JudgeClient | None = None) -> None:
        super().__init__(client or JudgeClient(config.endpoint))
        self._config = config

    async def judge(self, task: Task, answers: Sequence[Candidate], context: HookContext) -> list[Reward]:
        """Each answer's score, freed of its places."""
        shuffled = random.Random(f"{self._config.seed}/{context.group_id or task.task_id}")
        orders = orders_of(shuffled.sample(range(len(answers)), len(answers)), self._config.orders)
        asked = await all_of([self._ask(task, answers, order) for order in orders])
        qualities, effects = freed(orders, [[verdict[1] for verdict in one] for one in asked])
        swing = (max(effects) - min(effects)) / HIGHEST
        return [_reward(qualities[index], [one[index] for one in asked], swing) for index in range(len(answers))]

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


def _reward(quality: float, verdicts: _Verdicts, swing: float) -> Reward:
    """``swing`` is how much the judge prefers its favourite place to the one it likes least."""
    scores, mean_scores = [one[0] for one in verdicts], [one[1] for one in verdicts]
    components = {"score": sum(scores) / len(scores) / HIGHEST}
    if len(verdicts) > 1:
        components["spread"] = (max(mean_scores) - min(mean_scores)) / HIGHEST
    if len(verdicts) > 2:
        components["place_swing"] = swing
    reason = " / ".join(dict.fromkeys(one[2] for one in verdicts if one[2]))
    # equally good answers are a tie, which the last digits of solving must not undo
    return Reward(value=round(quality / HIGHEST, 9), components=components, reason=reason)
