"""A pairwise tournament: each pair of answers is judged in both orders, and the reward is the net win rate.

Source: pairwise comparison by a judge as in MT-Bench (Zheng et al. 2023, "Judging LLM-as-a-Judge with MT-Bench and
Chatbot Arena", arXiv:2306.05685), where a win counts only if both orders agree. With log-probabilities, a verdict
is the probability of each side instead of the named side.

Failure mode: N answers have N (N - 1) / 2 pairs, and each costs two calls. Under ``max_comparisons`` every answer is
compared equally often (plus or minus one), and answers that never met are compared only through third ones. A judge
that prefers a place contradicts itself: these pairs are ties, and ``contradicted`` is their share. A judge that looks
only at places makes a group uninformative, not wrong.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from pydantic import Field

from reward_hooks.contract import Candidate, HookContext, Reward
from reward_hooks.judges.judge import TextJudge, Verdict, comparable, json_of, means, shown_answer, text_of
from reward_hooks.judges.judge_client import Unparsable
from swarm.concurrency import all_of
from swarm.errors import HookError
from swarm.types import Task

#: What the first answer of a pair gets by the verdict.
_GETS: Mapping[str, float] = {"A": 1.0, "B": 0.0, "C": 0.5}
_LETTER = re.compile(r"\W*([ABC])\W*")


class Pairwise(TextJudge):
    """Compares answers in pairs; the reward is in [-1, 1]: wins minus losses, over the pairs of the answer."""

    name = "pairwise"
    explain: bool = False
    max_comparisons: int | None = Field(
        default=None, ge=1, description="pairs per group, two calls each; default: all pairs"
    )
    seed: int = Field(default=0, description="of the choice of pairs under max_comparisons")

    async def judge(self, task: Task, answers: Sequence[Candidate], context: HookContext) -> list[Reward]:
        """The net win rates."""
        if len(answers) == 1:
            return [Reward(value=0.0, reason="there is no other answer to compare with")]
        shown = [shown_answer(answer) for answer in answers]
        pairs = self._pairs(shown)
        calls = [self._ask(task, *pair) for i, j in pairs for pair in ((shown[i], shown[j]), (shown[j], shown[i]))]
        verdicts = comparable(await all_of(calls))
        met: list[list[tuple[float, float]]] = [[] for _ in answers]
        for (i, j), first, second in zip(pairs, verdicts[::2], verdicts[1::2], strict=True):
            # what an answer gets in the order with i first, and in the other
            met[i].append((first, 1 - second))
            met[j].append((1 - first, second))
        return [_reward(results) for results in met]

    def _pairs(self, shown: Sequence[str]) -> list[tuple[int, int]]:
        """The pairs to compare: rounds in which everybody plays once (the circle method), cut at ``max_comparisons``.

        They depend on the texts and the seed, not on the order of the answers.
        """
        count = len(shown)
        least, every = math.ceil(count / 2), count * (count - 1) // 2
        most = min(every, self.max_comparisons or every)
        if most < least:
            raise HookError(
                f"max_comparisons {most} leaves some of {count} answers without any comparison; allow at least {least}",
                code="judge_budget",
            )
        drawn = [hashlib.sha256(f"{self.seed}/{text}".encode(errors="replace")).digest() for text in shown]
        seats = [*sorted(range(count), key=drawn.__getitem__), *[None] * (count % 2)]
        return list(islice(_rounds(seats), most))

    async def _ask(self, task: Task, first: str, second: str) -> Verdict:
        """What the first of two answers gets."""
        explanation, explained = self.explanation
        ask = (
            "Which of the two answers is better? Reply with JSON only: "
            f'{{{explanation}"verdict": "A"}} for answer A, "B" for answer B, "C" if they are equally '
            "good."
        )
        fields = {**explained, "verdict": {"type": "string", "enum": list(_GETS)}}
        return await self.asked(task, [("A", first), ("B", second)], ask, fields, _read)


def _reward(met: Sequence[tuple[float, float]]) -> Reward:
    """The reward for the results of one answer's comparisons, each in both orders."""
    results = [(first + other) / 2 for first, other in met]
    wins, losses = sum(result > 0.5 for result in results), sum(result < 0.5 for result in results)
    contradicted = sum((first - 0.5) * (other - 0.5) < 0 for first, other in met)
    count = len(met)
    return Reward(
        value=sum(2 * result - 1 for result in results) / count,
        components={"wins": wins, "losses": losses, "comparisons": count, "contradicted": contradicted / count},
        reason=f"{wins} won, {losses} lost, {count - wins - losses} tied of {count}",
    )


def _rounds(seats: Sequence[int | None]) -> Iterator[tuple[int, int]]:
    """The pairs of a round robin, round by round; ``None`` is an empty seat."""
    for _ in range(len(seats) - 1):
        for left, right in zip(seats[: len(seats) // 2], reversed(seats), strict=False):
            if left is not None and right is not None:
                yield (left, right)
        seats = [seats[0], seats[-1], *seats[1:-1]]


def _read(choice: Mapping[str, Any]) -> Verdict:
    text = text_of(choice)
    if letter := _LETTER.fullmatch(text):
        return _GETS[letter[1]], None
    verdict = str(json_of(text).get("verdict")).strip().upper()
    if verdict not in _GETS:
        raise Unparsable(f"its verdict {verdict!r} is none of A, B and C")
    [mean] = means(choice, "verdict", _GETS, 1) or [None]
    return _GETS[verdict], mean
