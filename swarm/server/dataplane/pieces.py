"""Where the tokens of an answer's text begin and end, so that a gateway can replay it as it was sampled.

Invariant: the lengths add up to the text exactly, or there are none.
"""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Sequence
from typing import Any, cast


def pieces_of(content: Any, tokens: Sequence[list[int] | str]) -> list[int] | None:
    """The length in characters of each token of a plain choice's ``content``, in order.

    A token that ends within a character counts for nothing, and the one that completes it for the whole of it; what
    follows the text (the token that ended it, a stop string) is left out.

    Args:
        content: of the choice's message.
        tokens: the bytes of each, or its text where its bytes are not known.

    Returns:
        ``None`` where the tokens do not spell the content, e.g. because a parser took tool calls or reasoning out.
    """
    if not isinstance(content, str) or not content or not tokens:
        return None
    if content.isascii() and not any(isinstance(token, str) for token in tokens):
        return _of_ascii(content, cast("Sequence[list[int]]", tokens))
    decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
    lengths: list[int] = []
    done, whole = 0, len(content)
    for token in tokens:
        text = token if isinstance(token, str) else decode(bytes(token))
        text = text[: whole - done]
        if not content.startswith(text, done):
            return None
        done += len(text)
        lengths.append(len(text))
        if done == whole:
            return lengths
    return None


def _of_ascii(content: str, tokens: Sequence[list[int]]) -> list[int] | None:
    """The same where each character is one byte."""
    if not bytes(itertools.chain.from_iterable(tokens)).startswith(content.encode()):
        return None
    lengths: list[int] = []
    left = len(content)
    for token in tokens:
        lengths.append(min(len(token), left))
        left -= lengths[-1]
        if not left:
            break
    return lengths
