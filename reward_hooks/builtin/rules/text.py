"""``length``, ``repetition`` and ``words``: how long an answer is, whether it repeats itself, which words it has.

``length`` is 1 from ``at_least`` to ``at_most``, falls linearly to 0 over ``slack`` beyond ``at_most`` (the soft
overlong punishment of DAPO, arXiv:2503.14476, equation 13, moved from [-1, 0] to [0, 1]), and is ``length / at_least``
below. ``repetition`` is the share of distinct word n-grams (distinct-n; Li et al. 2016, "A Diversity-Promoting
Objective Function for Neural Conversation Models"): 1 without repetition, towards 0 in a loop. ``words`` is the share
of wanted words and phrases that occur, divided by one plus the number of occurrences of banned ones (keyword
constraints as in IFEval, arXiv:2311.07911, with partial credit so that a group differs).

Fails when: form does not make an answer good. ``length`` only counts: padding and cut-off sentences score like a good
answer of that length. ``repetition`` also rewards brevity, since long texts repeat more n-grams, and punishes tables,
code and refrains; paraphrases pass. ``words`` counts words in bare lists and in quotes; set ``whole`` to false for a
script without spaces between words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import regex

from reward_hooks.contract import NO_USAGE, Candidate, Reward, Rule
from swarm.errors import ConfigError, HookError
from swarm.types import Task


@dataclass(frozen=True)
class Length(Rule):
    """The rule with its range; ``slack`` defaults to ``at_most``.

    ``unit`` is ``words`` (separated by white space: one word per sentence in Chinese or Japanese), ``characters``, or
    the engine's own ``tokens``, without which there is no reward (``no_usage``).
    """

    at_most: int
    at_least: int = 0
    slack: int | None = None
    unit: Literal["words", "characters", "tokens"] = "words"

    def __post_init__(self) -> None:
        if not 0 <= self.at_least <= self.at_most or self.at_most < 1 or (self.slack is not None and self.slack < 1):
            raise ConfigError("Length needs 0 <= at_least <= at_most, at_most and slack of at least 1")
        if self.unit not in ("words", "characters", "tokens"):
            raise ConfigError(f"Length: unit is {self.unit!r}; use words, characters or tokens")

    def judge(self, task: Task, candidate: Candidate) -> Reward:
        size = self._size(candidate)
        if size > self.at_most:
            value = max(0.0, 1 - (size - self.at_most) / (self.slack or self.at_most))
        else:
            value = min(1.0, size / self.at_least) if self.at_least else 1.0
        reason = "" if value == 1.0 else f"{size} {self.unit}, wanted {self.at_least} to {self.at_most}"
        return Reward(value=value, components={self.unit: float(size)}, reason=reason)

    def _size(self, candidate: Candidate) -> int:
        if self.unit == "tokens":
            if not candidate.completion_tokens and (candidate.text or candidate.tool_calls):
                raise HookError("its server does not say how many tokens an answer has", code=NO_USAGE)
            return candidate.completion_tokens
        text = candidate.text.strip()
        return len(text) if self.unit == "characters" else len(text.split())


#: Letters, digits and underscore of any script, with vowel signs, which ``re`` does not take for a part.
WORD = regex.compile(r"[\p{L}\p{N}_][\w\p{N}]*")
#: One of these; not what makes a picture of the sign before it.
_PART = r"(?!\ufe0f)[\w\p{N}]"


@dataclass(frozen=True)
class Repetition(Rule):
    """The rule with its ``n``. An empty answer scores 0, one of fewer than ``n`` words 1."""

    n: int = 3

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ConfigError("Repetition needs n of at least 1")

    def judge(self, task: Task, candidate: Candidate) -> Reward:
        value = distinct_share(candidate.text, self.n)
        return Reward(value=value, reason="" if value == 1.0 else f"{value:.2f} of the {self.n}-grams are distinct")


def distinct_share(text: str, n: int = 3) -> float:
    """The share of distinct word n-grams in ``text``, 0 to 1: 0 without a word, 1 for fewer than ``n``."""
    words = WORD.findall(text.lower())
    grams = [tuple(words[start : start + n]) for start in range(len(words) - n + 1)]
    return len(set(grams)) / len(grams) if grams else float(bool(words))


class Words(Rule):
    """The rule with its words or phrases, ``whole`` words only or not; case does not matter, and an empty answer earns
    0."""

    def __init__(self, wanted: Sequence[str] = (), banned: Sequence[str] = (), *, whole: bool = True) -> None:
        if isinstance(wanted, str) or isinstance(banned, str):
            raise ConfigError("Words needs lists of words, not a string")
        if not (wanted or banned) or not all(str(word).strip() for word in (*wanted, *banned)):
            raise ConfigError("Words needs wanted or banned words, none of them empty")
        self._wanted = {str(word): _pattern(str(word), whole) for word in wanted}
        self._banned = {str(word): _pattern(str(word), whole) for word in banned}

    def judge(self, task: Task, candidate: Candidate) -> Reward:
        if not candidate.text.strip():
            return Reward(value=0.0, reason="empty")
        missing = [word for word, pattern in self._wanted.items() if not pattern.search(candidate.text)]
        counts = {word: len(pattern.findall(candidate.text)) for word, pattern in self._banned.items()}
        share = 1 - len(missing) / len(self._wanted) if self._wanted else 1.0
        faults = sum(counts.values())
        reasons = [f"lacks {', '.join(missing)}"] if missing else []
        if faults:
            reasons.append(f"says {', '.join(word for word, count in counts.items() if count)}")
        return Reward(
            value=share / (1 + faults),
            components={"wanted_share": share, "banned_count": float(faults)},
            reason="; ".join(reasons),
        )


def _pattern(word: str, whole: bool) -> regex.Pattern[str]:
    # any white space between the words of a phrase: answers wrap their lines
    text = r"\s+".join(map(regex.escape, word.split()))
    return regex.compile(rf"(?<!{_PART}){text}(?!{_PART})" if whole else text, regex.IGNORECASE)
