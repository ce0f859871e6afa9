"""A conversation in the chat form, put together from the turns, blocks or items of another dialect.

Invariant: it is one that strict chat templates take too. Instructions are one system message, the first. An assistant's
message holds reasoning, text and calls once each, whatever their order was: joined they say what the model wrote.
"""

from __future__ import annotations

import json
from typing import Any, cast

Message = dict[str, Any]
Part = dict[str, Any]
Content = str | list[Part]

#: What Anthropic's documentation wraps arguments in that are no JSON object.
_NO_JSON = "INVALID_JSON"


class Turn:
    """A message of the assistant, in pieces that are joined once."""

    def __init__(self) -> None:
        self._thoughts: list[str] = []
        self._texts: list[str] | None = None
        self._calls: list[dict[str, Any]] = []

    def think(self, text: str) -> None:
        """Add to the reasoning."""
        self._thoughts.append(text)

    def say(self, text: str) -> None:
        """Add to the text."""
        self._texts = self._texts or []
        self._texts.append(text)

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """Add a call; ``arguments`` are a JSON object, see :func:`carried`."""
        function = {"name": name, "arguments": arguments}
        self._calls.append({"id": call_id, "type": "function", "function": function})

    def message(self) -> Message:
        """The message in the chat form; a call without words has no content."""
        content = None if self._texts is None else "".join(self._texts)
        message: Message = {"role": "assistant", "content": (content or None) if self._calls else content}
        if reasoning := "".join(self._thoughts):
            message["reasoning"] = reasoning
        if self._calls:
            message["tool_calls"] = self._calls
        return message


class Conversation:
    """Takes turns in their order, oldest first; content is a text or parts of the chat form."""

    def __init__(self) -> None:
        self._said: list[Message | Turn] = []
        self._reminded = False

    @property
    def messages(self) -> list[Message]:
        """The conversation so far."""
        return [one.message() if isinstance(one, Turn) else one for one in self._said]

    def system(self, content: Content) -> None:
        """Instructions. Behind the first turn they become a part of what the user says: many templates refuse a system
        message that is not the first, or drop it, and those that alternate strictly want no message in between. The
        mark is the one that agents use themselves for such text."""
        if not self._said:
            self._said.append({"role": "system", "content": content})
        elif len(self._said) == 1 and (first := self._last("system")) is not None:
            _extend(first, content)
        else:
            parts = _parts(content)
            texts = [part["text"] for part in parts if part["type"] == "text" and part["text"]]
            reminder = "\n".join(["<system-reminder>", *texts, "</system-reminder>"])
            self.aside([*([text_part(reminder)] if texts else []), *(part for part in parts if part["type"] != "text")])

    def aside(self, parts: list[Part]) -> None:
        """What is no turn of its own: it becomes a part of what the user says."""
        if not parts:
            return
        if (last := self._last("user")) is not None:
            _extend(last, parts)
        else:
            self._said.append({"role": "user", "content": content_of(parts)})
            self._reminded = True

    def user(self, content: Content) -> None:
        """What the user says."""
        if self._reminded and (last := self._last("user")) is not None:
            _extend(last, content)
        else:
            self._said.append({"role": "user", "content": content})
        self._reminded = False

    def tool(self, call_id: str, content: Content) -> None:
        """What a call gave."""
        self._said.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def assistant(self, *, goes_on: bool = False) -> Turn:
        """Begin a message of the assistant, unless it ``goes_on`` and the last one is the assistant's."""
        last = self._said[-1] if self._said else None
        if not goes_on or not isinstance(last, Turn):
            last = Turn()
            self._said.append(last)
        return last

    def _last(self, role: str) -> Message | None:
        """The last message, if it is of ``role``."""
        last = self._said[-1] if self._said else None
        return last if isinstance(last, dict) and last["role"] == role else None


def as_object(arguments: str) -> dict[str, Any]:
    """A call's arguments as an object; what the model wrote as none is wrapped in one, and ``null`` is empty as it is
    to vLLM."""
    try:
        value: object = json.loads(arguments or "{}")
        json.dumps(value, allow_nan=False)  # Python reads NaN and infinities, which JSON does not have
    except (ValueError, RecursionError):
        return {_NO_JSON: arguments}
    if value is None:
        return {}
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {_NO_JSON: arguments}


def carried(arguments: str) -> str:
    """A call's arguments as vLLM takes them back: as the model wrote them, unless they are no JSON object."""
    value = as_object(arguments)
    return json.dumps(value, ensure_ascii=False) if value == {_NO_JSON: arguments} else arguments


def text_part(text: str) -> Part:
    """A content part that says ``text``."""
    return {"type": "text", "text": text}


def content_of(parts: list[Part]) -> Content:
    """One text as a string, which every chat template takes; anything else part by part."""
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def unread(what: str, name: str | None = None) -> Part:
    """The text that stands for what cannot be carried, so that the model knows of it."""
    return text_part(f"[{what}{f' {name!r:.200}' if name else ''} was here; this model cannot read it.]")


def _extend(message: Message, content: Content) -> None:
    """Add to a message; in place, for it may be extended often."""
    if isinstance(message["content"], str):
        message["content"] = [text_part(message["content"])]
    message["content"] += _parts(content)


def _parts(content: Content) -> list[Part]:
    return [text_part(content)] if isinstance(content, str) else content
