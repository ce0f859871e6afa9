"""``consensus``: answers that agree with most of their group.

With ``by: share`` the reward is the share of all candidates that give the same answer (self-consistency; Wang et al.
2022, arXiv:2203.11171, as a reward instead of a vote). With ``by: majority`` it is 1 for the most frequent answers and
0 for others (TTRL; Zuo et al. 2025, arXiv:2504.16084). A candidate without an answer earns 0.

Fails when: most are wrong. It then teaches the common mistake, and it always sharpens what the model already says, down
to one answer for everything. Use it if the model is right more often than not, watch a held-out set, and extract what
must agree: whole texts hardly ever do.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Literal

import regex

from reward_hooks.builtin.verifiable.match import compiled, last_match, normalised
from reward_hooks.contract import Candidate, HookContext, Reward
from swarm.errors import ConfigError, HookError
from swarm.types import Task

#: Ways to find the answer in a text, by name.
EXTRACTORS = {
    "number": r"[-\N{MINUS SIGN}]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)",
    "boxed": r"\\boxed\{((?:[^{}]++|(\{(?:[^{}]++|(?2))*+\}))*+)\}",
    # the first repetition gives nothing back: else a line of spaces would be tried in every way
    "answer": r"(?:final answer|answer)\s*(?:is|:|=)[\s*]*+([^\n]*[^\s*.])",
    "choice": r"\b([A-E])\b",
}


class Consensus:
    """The hook.

    Args:
        extract: ``number`` (the last), ``boxed``, ``answer`` (after "answer:" or "answer is"), ``choice`` (the last
            capital letter from A to E that stands alone), ``text`` (all of it), or a regular expression whose last
            match counts, by its first group if it has one. What has digits, or is boxed, agrees if it is
            the same number or formula; other texts agree without regard to case, punctuation and articles.
        by: ``share`` or ``majority``.
    """

    def __init__(self, extract: str = "number", by: Literal["share", "majority"] = "share") -> None:
        if by not in ("share", "majority"):
            raise ConfigError(f"Consensus: by is {by!r}; use share or majority")
        self._by = by
        self._number = extract == "number"
        #: signs, points and powers are all that tells -3 from 3, and 1.5 from 15
        self._formulas = re.compile("" if extract == "boxed" else r"[\d\\^=]")
        flags = "(?i)" if extract == "answer" else ""
        self._pattern = None if extract == "text" else compiled(flags + EXTRACTORS.get(extract, extract), "Consensus")

    def on_compute_relative_reward(self, task: Task, candidates: list[Candidate], context: HookContext) -> list[Reward]:
        """The rewards of a group.

        Raises:
            HookError: no answer can be extracted from any of them (``no_answers``).
        """
        answers = [self._answer(candidate.text) for candidate in candidates]
        counts = Counter(answer for answer in answers if answer is not None)
        if not counts:
            raise HookError("none of the answers holds what Consensus is to extract", code="no_answers")
        most, size = max(counts.values()), len(answers)
        rewards: list[Reward] = []
        for answer in answers:
            votes = 0 if answer is None else counts[answer]
            value = float(votes == most) if self._by == "majority" else votes / size
            reason = "no answer found in the text" if answer is None else f"{votes} of {size} say {answer[:80]!r}"
            rewards.append(Reward(value=value, components={"votes": float(votes)}, reason=reason))
        return rewards

    def _answer(self, text: str) -> str | None:
        answer = text if self._pattern is None else last_match(self._pattern, text)
        if answer is None or not answer.strip():
            return None
        if self._number:
            return _plain_number(answer)
        is_formula = self._pattern is not None and self._formulas.search(answer)
        return _plain_formula(answer) if is_formula else normalised(answer)

    __call__ = on_compute_relative_reward


def _plain_formula(text: str) -> str:
    """Without white space and marks of LaTeX, and what may stand around it, as a number where it is one."""
    text = re.sub(r"\\(?:left|right)(?![a-z])|(?<=\\)[dt](?=frac)", "", text.lower())
    text = re.sub(r"(?<!\\)\\(?:[\s,;:!()\[\]]|(?=[$%]))|\{,\}|[\s$`]+", "", text).rstrip(".")
    return _plain_number(text) if regex.fullmatch(EXTRACTORS["number"], text) else text


def _plain_number(text: str) -> str:
    """One spelling for one number: ``1,000.50`` and ``1000.5``."""
    whole, _, fraction = text.replace(",", "").replace("\N{MINUS SIGN}", "-").partition(".")
    sign, digits = ("-", whole[1:]) if whole.startswith("-") else ("", whole)
    fraction = fraction.rstrip("0")
    number = (digits.lstrip("0") or "0") + (f".{fraction}" if fraction else "")
    return number if number == "0" else sign + number
