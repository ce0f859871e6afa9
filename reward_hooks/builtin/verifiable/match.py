"""``exact`` and ``fuzzy``: the answer is, or is near, a known one (``task.metadata["answer"]``).

``exact`` is 1 if they are equal after SQuAD's normalisation (Rajpurkar et al. 2016, arXiv:1606.05250: lower case, no
punctuation, articles and extra white space), else 0. ``fuzzy`` is the best similarity to an accepted answer: SQuAD's
token F1, ``2PR / (P + R)`` over shared words.

Fails when: a right answer is paraphrased, or a wrong one shares most words with the right one ("not in Paris" and "in
Paris" have an F1 of 0.8). Articles and word boundaries are English; use ``math`` for numbers and formulas.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from typing import Any, cast

import regex

from reward_hooks.contract import Candidate, Reward, Rule
from swarm.errors import ConfigError, HookError
from swarm.types import Task

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
#: with marks that change its look; others, such as vowel signs, are parts of words, which ``re`` does not know
_NO_WORD = regex.compile(r"[^\w\s\p{N}][\p{M}\u200d]*|_")
#: Seconds that a pattern may take on one answer.
MATCH_SECONDS = 1.0


def normalised(text: str) -> str:
    """Lower case, without punctuation, articles and extra white space."""
    text = text.lower()
    words = _NO_WORD.sub("", text)
    # an article alone is an answer (the choice A), and so is punctuation
    return next((" ".join(kept.split()) for kept in (_ARTICLES.sub(" ", words), words, text) if kept.strip()), "")


class Exact(Rule):
    """1 if the answer is one of the accepted ones; without any, there is no reward (``no_reference``).

    Args:
        key: of ``task.metadata``.
        extract: a regular expression whose last match is the answer (its first group, if it has one). Default: the
            whole text.
    """

    def __init__(self, key: str = "answer", extract: str | None = None) -> None:
        self._key = key
        self._extract = None if extract is None else compiled(extract, "Exact")

    def judge(self, task: Task, candidate: Candidate) -> Reward:
        accepted = {normalised(text) for text in references(task, self._key)}
        text = candidate.text if self._extract is None else last_match(self._extract, candidate.text)
        if text is None:
            return Reward(value=0.0, components={"found": 0.0}, reason="no answer found in the text")
        good = normalised(text) in accepted
        return Reward(
            value=float(good), components={"found": 1.0}, reason="" if good else f"says {text.strip()[:80]!r}"
        )


class Fuzzy(Rule):
    """The similarity to the most similar accepted answer, in [0, 1].

    Args:
        key: of ``task.metadata``.
    """

    def __init__(self, key: str = "answer") -> None:
        self._key = key

    def judge(self, task: Task, candidate: Candidate) -> Reward:
        answer = normalised(candidate.text)
        value, nearest = max((token_f1(answer, normalised(text)), text) for text in references(task, self._key))
        return Reward(value=value, reason="" if value == 1.0 else f"{value:.2f} like {nearest[:80]!r}")


def token_f1(text: str, other: str) -> float:
    """Harmonic mean of the shares of common words in each text, with repetitions."""
    left, right = Counter(text.split()), Counter(other.split())
    total = left.total() + right.total()
    return 2 * (left & right).total() / total if total else 1.0


def compiled(pattern: str, owner: str, flags: int = regex.DOTALL) -> regex.Pattern[str]:
    """The regular expression; raises :class:`ConfigError` if it is none.

    Of the ``regex`` package, which can be given a deadline and lets other threads run: in ``re``, an answer that makes
    a pattern try exponentially many ways stops the whole process.
    """
    try:
        return regex.compile(pattern, flags)
    except regex.error as exc:
        raise ConfigError(f"{owner}: {pattern!r} is no regular expression: {exc}") from exc


def last_match(pattern: regex.Pattern[str], text: str) -> str | None:
    """The first group, or all, of the last match in ``text``; ``None`` also if matching takes too long."""
    try:
        matches = pattern.finditer(text, timeout=MATCH_SECONDS, concurrent=True)
        match = next(iter(deque(matches, maxlen=1)), None)
    except TimeoutError:
        return None
    if match is None:
        return None
    return match[1] if pattern.groups else match[0]


def references(task: Task, key: str) -> list[str]:
    """The accepted answers in ``task.metadata[key]``: a string or number, or a list of these.

    Raises:
        HookError: there are none (``no_reference``).
    """
    value = task.metadata.get(key)
    listed = cast("list[Any]", value) if isinstance(value, list) else [value]
    texts = [str(item) for item in listed if isinstance(item, str | int | float) and not isinstance(item, bool)]
    if not texts or len(texts) < len(listed) or not all(text.strip() for text in texts):
        raise HookError(
            f"task {task.task_id} has no metadata[{key!r}] that is an answer or a list of answers; let "
            "on_user_submit_new_requests return a Submission whose task has it",
            code="no_reference",
        )
    return texts
