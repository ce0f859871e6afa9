"""A listwise judge: all answers of a group in one question, scored side by side.

Source: RULER, "Relative Universal LLM-Elicited Rewards" (OpenPipe ART, 2025): scoring answers next to each other is
easier than scoring each alone, and GRPO needs only the differences. The conversation, which they share, is said once.
Scores are whole numbers from 0 to 9, replaced by the mean of their distribution where log-probabilities are offered
(G-Eval, arXiv:2303.16634), and divided by 9.

Failure mode: judges prefer places ("Large Language Models are not Fair Evaluators", Wang et al. 2023,
arXiv:2305.17926). Each group is asked about five times, in turns of an order that is shuffled anew for each group, and
:func:`freed` takes out what the judge gives to a place, exactly where that adds to the score. What
remains is a preference that does not add up: scores that are rounded (a judge without log-probabilities) or that the
end of the scale cuts off, or a place that helps good answers more than bad ones. ``orders: 3`` is enough where the
judge offers log-probabilities; ``orders: 1`` leaves a preference in as noise; ``orders: 2`` is an order and its
reverse. Also: a judge scores the style it likes itself, and a policy that is trained on it for long learns to please
it.

A score is taken to be ``quality of the answer + effect of its place``. One order, and an order with its reverse, cannot
tell the two apart. Three orders that are turns of one another can: each answer stands at three places and each place
holds three answers, so that all are compared with all through others (an incomplete Latin square, Youden 1937), and
least squares separates them. Where the judge sees every turn, the mean is free of places.
"""

from __future__ import annotations

import cmath
import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
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


def orders_of(first: Sequence[int], count: int) -> list[list[int]]:
    """At most ``count`` orders of the items in ``first``, that one among them; fewer where there are fewer turns.

    Two are an order and its reverse, which cancels a preference that grows evenly along the list; more are turns.
    """
    listed = list(first)
    count = min(count, len(listed))
    if count <= 2:
        return [listed, listed[::-1]][:count]
    return [listed[turn:] + listed[:turn] for turn in _turns(len(listed), count)]


def freed(orders: Sequence[Sequence[int]], scores: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    """Qualities of the items, and effects of the places (mean 0).

    Args:
        orders: K orders of N items from :func:`orders_of`.
        scores: K lists of N, by item.

    Returns:
        N qualities, with the mean of all scores; N effects, zeros for fewer than three orders.
    """
    size, count = len(orders[0]), len(orders)
    mean = [sum(one[item] for one in scores) / count for item in range(size)]
    if count <= 2:
        return mean, [0.0] * size
    at: list[float] = [0.0] * size
    for order, one in zip(orders, scores, strict=True):
        for place, item in enumerate(order):
            at[place] += one[item] / count
    # normal equations of y = quality + effect; the effects, mean(at - quality), are put into those of the qualities
    right = list(mean)
    matrix = [[1.0 / size] * size for _ in range(size)]  # what is undetermined, a constant, has mean 0
    for item in range(size):
        matrix[item][item] += 1.0
    for order in orders:
        for place, item in enumerate(order):
            right[item] -= at[place] / count
            for other in orders:
                matrix[item][other[place]] -= 1.0 / count**2
    found = _solved(matrix, right)
    level = sum(mean) / size - sum(found) / size
    quality = [value + level for value in found]
    effects = list(at)
    for order in orders:
        for place, item in enumerate(order):
            effects[place] -= quality[item] / count
    return quality, effects


@lru_cache(maxsize=64)
def _turns(size: int, count: int) -> tuple[int, ...]:
    """Turns of a circle of ``size`` that tell patterns of places apart: each next turn is the one that sees best what
    those before it see worst."""
    turns = [0]
    while len(turns) < count:
        left = [turn for turn in range(1, size) if turn not in turns]
        turns.append(min(left, key=lambda turn: (round(_confusion(size, (*turns, turn)), 9), turn)))
    return tuple(turns)


def _confusion(size: int, turns: Sequence[int]) -> float:
    """How much of the worst wave along the places stays in the means of the items, between 0 and 1."""
    waves = range(1, size // 2 + 1)
    seen = (abs(sum(cmath.exp(2j * cmath.pi * wave * turn / size) for turn in turns)) for wave in waves)
    return max(seen) / len(turns)


def _solved(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gaussian elimination; ``matrix`` is positive definite, so that no pivot is small."""
    size = len(right)
    for column in range(size):
        for row in range(column + 1, size):
            factor = matrix[row][column] / matrix[column][column]
            if factor:
                for k in range(column, size):
                    matrix[row][k] -= factor * matrix[column][k]
                right[row] -= factor * right[column]
    found = [0.0] * size
    for row in reversed(range(size)):
        known = sum(matrix[row][k] * found[k] for k in range(row + 1, size))
        found[row] = (right[row] - known) / matrix[row][row]
    return found
