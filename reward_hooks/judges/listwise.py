"""A listwise judge: all answers of a group in one question, scored side by side.

Source: RULER, "Relative Universal LLM-Elicited Rewards" (OpenPipe ART, 2025): to score answers next to each other is
easier than to score each alone, and GRPO needs only the differences. The shared conversation is shown once. Scores are
whole numbers from 0 to 9, replaced by the mean of their distribution if the server returns log-probabilities (G-Eval,
arXiv:2303.16634), and divided by 9.

Position bias: judges prefer places ("Large Language Models are not Fair Evaluators", Wang et al. 2023,
arXiv:2305.17926). A score is modelled as ``quality of the answer + effect of its place``. One order, or an order and
its reverse, cannot tell the two apart. Three or more rotations of one order can: each answer stands at three places and
each place holds three answers, so all are compared with all through others (an incomplete Latin square, Youden 1937),
and least squares separates them (:func:`freed`). Each group is therefore asked about five times, in rotations of its
own shuffled order. ``orders: 3`` is enough with log-probabilities; ``orders: 1`` leaves the bias in as noise; ``orders:
2`` is an order and its reverse.

Failure mode: a bias that does not add up remains: scores that are rounded (no log-probabilities) or cut off by the end
of the scale, or a place that helps good answers more than bad ones. And a judge scores the style that it likes; a
policy trained on it for long learns to please it.
"""

from __future__ import annotations

import cmath
import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from statistics import fmean
from typing import Any

import numpy as np
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

_Reply = list[tuple[Verdict, str]]  # verdict and explanation of each answer


class Listwise(TextJudge):
    """Asks ``orders`` questions per group, but at most one per answer. Rewards are in [0, 1]."""

    name = "listwise"
    orders: int = Field(default=5, ge=1, le=8, description="questions per group, each in another order")
    seed: int = Field(default=0, description="of the orders; each group has its own order")

    async def judge(self, task: Task, answers: Sequence[Candidate], context: HookContext) -> list[Reward]:
        """Each answer's score without the effect of its places."""
        shuffled = random.Random(f"{self.seed}/{context.group_id or task.task_id}")
        orders = orders_of(shuffled.sample(range(len(answers)), len(answers)), self.orders)
        replies = await all_of([self._ask(task, answers, order) for order in orders])
        verdicts = comparable(verdict for reply in replies for verdict, _ in reply)
        scores = [verdicts[begin : begin + len(answers)] for begin in range(0, len(verdicts), len(answers))]
        qualities, effects = freed(orders, scores)
        swing = (max(effects) - min(effects)) / HIGHEST
        return [
            _reward(quality, [reply[index] for reply in replies], [of_order[index] for of_order in scores], swing)
            for index, quality in enumerate(qualities)
        ]

    async def _ask(self, task: Task, answers: Sequence[Candidate], order: Sequence[int]) -> _Reply:
        count, (explanation, explained) = len(order), self.explanation
        labelled = [(str(number), shown_answer(answers[index])) for number, index in enumerate(order, 1)]
        ask = (
            f"Compare the {count} answers with each other and give each a whole score from {LOWEST} (useless) to "
            f"{HIGHEST} (could not be better). Use the scale to tell them apart; equally good answers get equal "
            f'scores. Reply with JSON only: {{"verdicts": [{{"answer": 1, {explanation}"score": 5}}, '
            f"...]}}, one entry for each answer from 1 to {count}."
        )
        number = {"type": "integer", "minimum": 1, "maximum": count}
        verdict = {"answer": number, **explained, "score": SCORE}
        fields = {"verdicts": strict_list(count, verdict)}
        by_place = await self.asked(task, labelled, ask, fields, lambda choice: _read(choice, count))
        by_answer = {index: by_place[number] for number, index in enumerate(order)}
        return [by_answer[index] for index in range(count)]


def _read(choice: Mapping[str, Any], count: int) -> _Reply:
    """The reply by place."""
    listed: Any = json_of(text_of(choice)).get("verdicts")
    if not isinstance(listed, list) or [type(entry) for entry in listed] != [dict] * count:
        raise Unparsable(f"it has not one verdict for each of the {count} answers")
    verdicts = {
        int(entry.get("answer")): (score, str(entry.get("explanation") or ""))
        for entry, score in zip(listed, scores_of(choice, listed), strict=True)
    }
    if set(verdicts) != set(range(1, count + 1)):
        raise Unparsable(f"its verdicts are on the answers {sorted(verdicts)} of 1 to {count}")
    return [verdicts[number] for number in range(1, count + 1)]


def _reward(quality: float, replies: _Reply, scores: Sequence[float], swing: float) -> Reward:
    """``swing`` is how much the judge prefers its favourite place to the one it likes least."""
    components = {"score": fmean(plain for (plain, _), _ in replies) / HIGHEST}
    if len(scores) > 1:
        components["spread"] = (max(scores) - min(scores)) / HIGHEST
    if len(scores) > 2:
        components["place_swing"] = swing
    reason = " / ".join(dict.fromkeys(explanation for _, explanation in replies if explanation))
    # an estimate may lie slightly beyond the scale; rounded: numerical noise must not break ties
    value = round(min(1.0, max(0.0, quality / HIGHEST)), 9)
    return Reward(value=value, components=components, reason=reason)


def orders_of(first: Sequence[int], count: int) -> list[list[int]]:
    """``first`` and further orders of its items, ``count`` in all, but at most one per item.

    Two are an order and its reverse, which cancels a bias that grows evenly along the list; more are rotations.
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
        N qualities, whose mean is the mean of all scores; N effects, zeros for fewer than three orders.
    """
    size, count = len(orders[0]), len(orders)
    by_item = np.array(scores, dtype=float)
    mean = by_item.mean(axis=0)
    if count <= 2:
        return mean.tolist(), [0.0] * size
    # one row per score, with a 1 for its item and a 1 for its place
    rows = np.zeros((count * size, 2 * size))
    for number, order in enumerate(orders):
        for column, item in enumerate(order):
            rows[number * size + item, [item, size + column]] = 1.0
    solution = np.linalg.lstsq(rows, by_item.ravel(), rcond=None)[0]
    effects = solution[size:] - solution[size:].mean()
    # a constant is undetermined
    quality = solution[:size] - solution[:size].mean() + mean.mean()
    return quality.tolist(), effects.tolist()


@lru_cache(maxsize=64)
def _turns(size: int, count: int) -> tuple[int, ...]:
    """Rotations of a circle of ``size`` that tell patterns of places apart; each next one resolves best what those
    before it resolve worst."""
    turns = [0]
    while len(turns) < count:
        left = [turn for turn in range(1, size) if turn not in turns]
        turns.append(min(left, key=lambda turn: (round(_confusion(size, (*turns, turn)), 9), turn)))
    return tuple(turns)


def _confusion(size: int, turns: Sequence[int]) -> float:
    """The share of the worst wave along the places that remains in the means of the items, in [0, 1]."""
    waves = range(1, size // 2 + 1)
    seen = (abs(sum(cmath.exp(2j * cmath.pi * wave * turn / size) for turn in turns)) for wave in waves)
    return max(seen) / len(turns)
