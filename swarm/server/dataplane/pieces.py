"""Where the tokens of an answer's text begin and end, so that a gateway can replay it as it was sampled.

Invariant: the lengths add up to the text exactly, or there are none.
"""

from __future__ import annotations

import codecs
import itertools
from typing import Any


def pieces_of(choice: dict[str, Any]) -> list[int] | None:
    """The length in characters of each token of a plain choice's content, in order.

    A token that ends within a character counts for nothing, and the one that completes it for the whole of it; what
    follows the text (the token that ended it, a stop string) is left out.

    Returns:
        ``None`` where the tokens do not spell the content, e.g. because a parser took tool calls or reasoning out.
    """
    content: Any = (choice.get("message") or {}).get("content")
    entries: list[dict[str, Any]] = (choice.get("logprobs") or {}).get("content") or []
    if not isinstance(content, str) or not content or not entries:
        return None
    if content.isascii() and all(entry.get("bytes") is not None for entry in entries):
        return _of_ascii(content, [entry["bytes"] for entry in entries])
    decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
    lengths: list[int] = []
    done, whole = 0, len(content)
    for entry in entries:
        raw = entry.get("bytes")
        text = decode(bytes(raw)) if raw is not None else str(entry.get("token", ""))
        text = text[: whole - done]
        if not content.startswith(text, done):
            return None
        done += len(text)
        lengths.append(len(text))
        if done == whole:
            return lengths
    return None


def _of_ascii(content: str, tokens: list[list[int]]) -> list[int] | None:
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
