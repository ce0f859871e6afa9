"""How similar two texts are, by their words."""

from __future__ import annotations

import re
from difflib import SequenceMatcher

_WORD = re.compile(r"\w+|[^\w\s]")
_WORDS = 200
#: Below it a text is a different one, not an edit.
_EDITED = 0.5


def similarity(one: str, other: str, least: float = _EDITED) -> float:
    """How similar the words of two texts are: the ratio 2 M / T of :mod:`difflib` (Ratcliff and Metzener 1988) over at
    most 200 words of each, or 0 where it is below ``least``."""
    words, others = words_of(one), words_of(other)
    matcher = SequenceMatcher(None, words, others, autojunk=False)
    # an upper bound first: most texts have nothing in common, and the ratio costs the product of their lengths
    ratio = matcher.ratio() if words and others and matcher.quick_ratio() >= least else 0.0
    return ratio if ratio >= least else 0.0


def words_of(text: str) -> list[str]:
    """The first words of a text, in lower case."""
    return _WORD.findall(text[: _WORDS * 40].lower())[:_WORDS]
