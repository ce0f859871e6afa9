"""How alike two texts are, by the word trigrams that they share (Broder 1997, "On the resemblance of documents")."""

from __future__ import annotations

import re

_WORD = re.compile(r"\w+")
_SIZE = 3


def shingles(text: str) -> frozenset[str]:
    """The word trigrams of ``text``; shorter texts are one shingle. Case and punctuation do not count."""
    words = _WORD.findall(text.lower())
    if len(words) <= _SIZE:
        return frozenset({" ".join(words)})
    return frozenset(" ".join(words[start : start + _SIZE]) for start in range(len(words) - _SIZE + 1))


def jaccard(one: frozenset[str], other: frozenset[str]) -> float:
    """Shared over all, in [0, 1]."""
    shared = len(one & other)
    return shared / (len(one) + len(other) - shared)
