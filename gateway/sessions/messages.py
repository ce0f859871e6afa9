"""What messages mean: digests, which show that a request continues a delivered answer, and the similarity of texts.

Invariant: two conversations have one digest exactly when they mean the same, whatever form a client gave an answer when
it sent it back (parts for a string, absent for null, other white space or field order in a call's arguments).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, cast

import orjson

#: Instructions do not count: applications put the time of day into them.
_INSTRUCTIONS = frozenset({"system", "developer"})
_BYTES = 16
_START = b"\0" * _BYTES
_WORD = re.compile(r"\w+|[^\w\s]")
_WORDS = 200
#: Below it a text is a different one, not an edit.
_EDITED = 0.5


@dataclass(frozen=True, slots=True)
class Digests:
    """A conversation as digests.

    Attributes:
        digest: of all of it.
        answers: per assistant message, oldest first, the digests of the conversation before and with it.
        sizes: bytes per message, as JSON of its meaning; 0 for instructions.
    """

    digest: bytes
    answers: tuple[tuple[bytes, bytes], ...]
    sizes: tuple[int, ...]


def digests_of(messages: Sequence[Mapping[str, Any]]) -> Digests:
    """The digests of ``messages``, in Chat Completions form."""
    digest = _START
    answers: list[tuple[bytes, bytes]] = []
    sizes: list[int] = []
    for message in messages:
        if message.get("role") in _INSTRUCTIONS:
            sizes.append(0)
            continue
        meaning = _bytes(_meaning(message))
        before, digest = digest, _chained(digest, meaning)
        sizes.append(len(meaning))
        if message.get("role") == "assistant":
            answers.append((before, digest))
    return Digests(digest, tuple(answers), tuple(sizes))


def answered(digest: bytes, message: Mapping[str, Any]) -> tuple[bytes, int]:
    """The digest of a conversation with the assistant's ``message`` appended, and the bytes of that message."""
    meaning = _bytes(_meaning({**message, "role": "assistant"}))
    return _chained(digest, meaning), len(meaning)


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message's content: a string, or the text parts of a list."""
    content: Any = message.get("content")
    if isinstance(content, str):
        return content
    parts = cast("list[Any]", content) if isinstance(content, list) else []
    texts = [cast("dict[str, Any]", part).get("text") for part in parts if isinstance(part, dict)]
    return "".join(text for text in texts if isinstance(text, str))


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


def size_of(value: object) -> int:
    """Bytes of ``value`` as JSON."""
    return len(_bytes(value))


def _chained(digest: bytes, meaning: bytes) -> bytes:
    return hashlib.blake2b(digest + meaning, digest_size=_BYTES).digest()


def _meaning(message: Mapping[str, Any]) -> list[Any]:
    """A message's role, text, calls, and parts that are not text."""
    calls: Any = message.get("tool_calls")
    meaning: list[Any] = [message.get("role"), text_of(message).strip()]
    if isinstance(calls, list) and calls:
        meaning.append([_call(call) for call in cast("list[Any]", calls)])
    content: Any = message.get("content")
    if isinstance(content, list):
        meaning += [part for part in cast("list[Any]", content) if not _is_text(part)]
    return meaning


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and isinstance(cast("dict[str, Any]", part).get("text"), str)


def _call(call: object) -> list[Any]:
    """Name and arguments; clients may change ids."""
    function: Any = cast("dict[str, Any]", call).get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return [call]
    named = cast("dict[str, Any]", function)
    arguments: Any = named.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments)
        except ValueError:
            arguments = arguments.strip()
    return [named.get("name"), arguments]


def _bytes(value: object) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # an integer of more than 64 bits, or deeper nesting than orjson follows
        return json.dumps(value, sort_keys=True).encode()
