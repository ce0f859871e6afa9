"""``concise``: short, complete, on-topic English answers score near 1.

The reward is the product of six factors in [0, 1], so that none of them can compensate another.

    finished    the model ended by itself, within its token limit
    on_topic    shares content words with the question (two are enough)
    substance   has content words that the question lacks (two are enough)
    complete    ends like a sentence
    fluent      no repeated word triples, symbol soup, or bare list of keywords; each fault is a factor of 0.3
    concise     1 up to ``full_marks_words`` words, then linear to 0 at ``zero_words``

The formula is our own; its parts are common (a length ramp as in DAPO, arXiv:2503.14476; repeated n-grams; content
words without stop words and suffixes, as in Porter 1980).

Fails when: an answer is wrong. It scores form and topic, not truth: an echo of the question with a few more words
scores well. English only, and an answer that shares no word with its question counts as off topic.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod

from reward_hooks.contract import Candidate, Reward, Rule
from swarm.errors import ConfigError
from swarm.types import Task

_STOP_TEXT = """a about all am an and any are aren as at be been but by can cannot could did do does doesn doing don
for from had has have how i if in into is isn it its just like me more my no not of on one or our out shouldn so some
than that the their them then there these they this those to too up use used using very want was we were what when where
which who why will with would you your s t re ve ll m d"""
_STOP_WORDS = frozenset(_STOP_TEXT.split())
_WORD = re.compile(r"[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*")
_SENTENCE_END = re.compile(r"[.!`][\"')\]*]*$")
_SUFFIXES = ("ations", "ation", "ments", "ment", "ing", "ies", "ied", "es", "ed", "ly", "s", "e")
_PLAIN = frozenset(".,;:!?'\"()-`_")
_FAULT = 0.3


@dataclass(frozen=True)
class Concise(Rule):
    """The rule with its two lengths, in words separated by white space."""

    full_marks_words: int = 8
    zero_words: int = 36

    def __post_init__(self) -> None:
        if not 0 < self.full_marks_words < self.zero_words:
            raise ConfigError("Concise needs 0 < full_marks_words < zero_words")

    def judge(self, task: Task, candidate: Candidate) -> Reward:
        text = candidate.text.strip()
        words = _words(text)
        asked, stated = _content(task.main_query), _content(text)
        wanted = min(2, len(asked))
        length = (self.zero_words - len(text.split())) / (self.zero_words - self.full_marks_words)
        components = {
            "finished": float(candidate.finish_reason == "stop" and bool(words)),
            "on_topic": min(1.0, len(asked & stated) / wanted) if wanted else 1.0,
            "substance": min(1.0, len(stated - asked) / 2),
            "complete": float(_SENTENCE_END.search(text) is not None),
            "fluent": _FAULT ** _faults(text, words),
            "concise": max(0.0, min(1.0, length)),
        }
        weakest = min(components, key=components.__getitem__)
        reason = "" if components[weakest] == 1.0 else f"{weakest} {components[weakest]:.2f}, {len(text.split())} words"
        return Reward(value=prod(components.values()), components=components, reason=reason)


def _faults(text: str, words: list[str]) -> int:
    """How many signs of bad English it shows."""
    if not words:
        return 0
    triples = list(zip(words, words[1:], words[2:], strict=False))
    plain = sum((char.isascii() and (char.isalnum() or char.isspace())) or char in _PLAIN for char in text)
    return sum(
        (
            len(set(triples)) < len(triples),
            plain / len(text) <= 0.93,
            len(set(words)) / len(words) <= 0.6,
            sum(word in _STOP_WORDS for word in words) / len(words) < 0.15,
        )
    )


def _words(text: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(text)]


def _content(text: str) -> set[str]:
    """Stems of the content words."""
    return {_stem(word) for word in _words(text) if word not in _STOP_WORDS and len(word) > 1}


def _stem(word: str) -> str:
    for suffix in _SUFFIXES:
        if word.endswith(suffix) and len(word) - len(suffix) >= 3:
            return word[: -len(suffix)]
    return word
