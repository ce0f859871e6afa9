"""``Span``: a part of a text that is private, and its kind; and the words before it that say what it is."""

from __future__ import annotations

import re
from collections.abc import Set
from typing import NamedTuple


class Span(NamedTuple):
    """The characters ``start`` to ``end`` (exclusive) of a text."""

    kind: str
    start: int
    end: int


_WORD = re.compile(r"[^\W\d_]+\.?")
_LOOK_BACK, _MOST_WORDS, _LONGEST_ABBREVIATION = 40, 4, 4


def words_of(text: str) -> frozenset[str]:
    """The words of ``text``, for :func:`said_before`."""
    return frozenset(text.split())


def said_before(text: str, at: int, words: Set[str], fillers: Set[str]) -> bool:
    """Whether one of ``words`` stands before ``at``, in the same sentence and with nothing but ``fillers`` between:
    *order* in ``order no. 12345``. All are in lower case."""
    begin = max(text.rfind("\n", max(0, at - _LOOK_BACK), at) + 1, at - _LOOK_BACK)
    for word in reversed(_WORD.findall(text, begin, at)[-_MOST_WORDS:]):
        plain = word.rstrip(".").lower()
        if plain != word.lower() and len(plain) > _LONGEST_ABBREVIATION:
            return False
        if plain in words:
            return True
        if plain not in fillers:
            return False
    return False
