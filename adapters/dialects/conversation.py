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


class Conversation:
    """Takes turns in their order, oldest first; content is a text or parts of the chat form.

    Attributes:
        messages: so far.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._reminded = False

    def system(self, content: Content) -> None:
        """Instructions. Behind the first turn they become a part of what the user says: many templates refuse a system
        message that is not the first, or drop it, and those that alternate strictly want no message in between. The
        mark is the one that agents use themselves for such text."""
        if not self.messages:
            self.messages.append({"role": "system", "content": content})
        elif len(self.messages) == 1 and self.messages[0]["role"] == "system":
            self._extend(content)
        else:
            reminder = [text_part(f"<system-reminder>\n{plain(content)}\n</system-reminder>")]
            if self.messages[-1]["role"] == "user":
                self._extend(reminder)
            else:
                self.messages.append({"role": "user", "content": content_of(reminder)})
                self._reminded = True

    def user(self, content: Content) -> None:
        """What the user says."""
        if self._reminded and self.messages[-1]["role"] == "user":
            self._extend(content)
        else:
            self.messages.append({"role": "user", "content": content})
        self._reminded = False

    def tool(self, call_id: str, content: Content) -> None:
        """What a call gave."""
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def assistant(self) -> Message:
        """Begin a message of the assistant; :func:`think`, :func:`say` and :func:`call` go on with it."""
        message: Message = {"role": "assistant", "content": None}
        self.messages.append(message)
        return message

    def _extend(self, content: Content) -> None:
        last = self.messages[-1]
        last["content"] = [*_parts(last["content"]), *_parts(content)]


def think(message: Message, text: str) -> None:
    """Add to the reasoning of an assistant's message."""
    if text:
        message["reasoning"] = message.get("reasoning", "") + text


def say(message: Message, text: str) -> None:
    """Add to the text of an assistant's message."""
    message["content"] = (message["content"] or "") + text


def call(message: Message, call_id: str, name: str, arguments: str) -> None:
    """Add a call to an assistant's message; ``arguments`` are a JSON object, see :func:`carried`."""
    function = {"name": name, "arguments": arguments}
    message.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})


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


def plain(content: Content) -> str:
    """The text of ``content``, a line feed between two parts."""
    return "\n".join(part["text"] for part in _parts(content) if part["type"] == "text")


def unread(what: str, name: str | None = None) -> Part:
    """The text that stands for what cannot be carried, so that the model knows of it."""
    return text_part(f"[{what}{f' {name!r:.200}' if name else ''} was here; this model cannot read it.]")


def _parts(content: Content) -> list[Part]:
    return [text_part(content)] if isinstance(content, str) else content
