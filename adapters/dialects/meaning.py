"""What a message in Chat Completions form means, by which gateway and swarm server know a conversation again.

Invariant: two messages have one meaning exactly when they say the same, whatever form a client gave an answer when it
sent it back: parts for a string, absent for null, other white space or field order in a call's arguments, other ids.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any, cast

import orjson

from adapters.dialects.jsons import decode
from swarm.types import texts_of


def meaning_of(message: Any) -> bytes:
    """A message's role, text, calls, and content that is not text, as JSON; of anything else its JSON."""
    if not isinstance(message, dict):
        return canonical(message)
    fields = cast("dict[str, Any]", message)
    calls, content = fields.get("tool_calls"), fields.get("content")
    meaning: list[Any] = [fields.get("role"), text_of(fields).strip()]
    if calls:
        meaning.append([_call(call) for call in cast("list[Any]", calls)] if isinstance(calls, list) else calls)
    if isinstance(content, list):
        meaning += [part for part in cast("list[Any]", content) if not _is_text(part)]
    elif not isinstance(content, str | None):
        meaning.append(content)
    return canonical(meaning)


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message's content: a string, or the text parts of a list."""
    return "".join(texts_of(message))


def canonical(value: object) -> bytes:
    """``value`` as JSON with sorted keys."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # an integer of more than 64 bits, or deeper nesting than orjson follows
        return json.dumps(value, sort_keys=True).encode()


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and isinstance(cast("dict[str, Any]", part).get("text"), str)


def _call(call: object) -> Any:
    """Name and arguments; clients parse these and write them anew, and may change ids."""
    match call:
        case {"function": {**named}}:
            arguments = cast("Any", named.get("arguments"))
        case _:
            return call
    if isinstance(arguments, str):
        text = arguments.strip()
        arguments = text
        with contextlib.suppress(ValueError, RecursionError):
            arguments = decode(text)
    return [named.get("name"), arguments]
