"""Build a conversation in chat form from the turns, blocks or items of another dialect.

Invariant: strict chat templates accept it. Instructions are one system message, the first one. An assistant message
holds reasoning, text and calls once each, joined, whatever their order was.
"""

from __future__ import annotations

import json
from typing import Any, cast

from adapters.dialects.jsons import decode

Message = dict[str, Any]
Part = dict[str, Any]
Content = str | list[Part]

#: Anthropic's documentation wraps arguments that are no JSON object in this field.
_NO_JSON = "INVALID_JSON"


class AssistantTurn:
    """An assistant message in pieces."""

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
        """The message in chat form; its content is ``None`` if it only has calls."""
        content = None if self._texts is None else "".join(self._texts)
        message: Message = {"role": "assistant", "content": (content or None) if self._calls else content}
        if reasoning := "".join(self._thoughts):
            message["reasoning"] = reasoning
        if self._calls:
            message["tool_calls"] = self._calls
        return message


class ConversationBuilder:
    """Takes turns in order, oldest first; content is a text or parts of the chat form."""

    def __init__(self) -> None:
        self._entries: list[Message | AssistantTurn] = []
        self._reminded = False

    @property
    def messages(self) -> list[Message]:
        """The conversation so far."""
        return [entry.message() if isinstance(entry, AssistantTurn) else entry for entry in self._entries]

    def system(self, content: Content) -> None:
        """Add instructions. After the first turn they become a part of a user message: many templates refuse or drop a
        system message that is not the first, and those that alternate strictly allow no message in between. Agents mark
        such text with the same tag."""
        if not self._entries:
            self._entries.append({"role": "system", "content": content})
        elif len(self._entries) == 1 and (first := self._last("system")) is not None:
            _extend(first, content)
        else:
            parts = _parts(content)
            texts = [part["text"] for part in parts if part["type"] == "text" and part["text"]]
            reminder = "\n".join(["<system-reminder>", *texts, "</system-reminder>"])
            self.aside([*([text_part(reminder)] if texts else []), *(part for part in parts if part["type"] != "text")])

    def aside(self, parts: list[Part]) -> None:
        """Add parts to the user's message."""
        if not parts:
            return
        if (last := self._last("user")) is not None:
            _extend(last, parts)
        else:
            self._entries.append({"role": "user", "content": content_of(parts)})
            self._reminded = True

    def user(self, content: Content) -> None:
        """Add a user message."""
        if self._reminded and (last := self._last("user")) is not None:
            _extend(last, content)
        else:
            self._entries.append({"role": "user", "content": content})
        self._reminded = False

    def tool(self, call_id: str, content: Content) -> None:
        """Add the result of a call."""
        self._entries.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def assistant(self, *, goes_on: bool = False) -> AssistantTurn:
        """Begin an assistant message, unless it ``goes_on`` and the last message is the assistant's."""
        last = self._entries[-1] if self._entries else None
        if not goes_on or not isinstance(last, AssistantTurn):
            last = AssistantTurn()
            self._entries.append(last)
        return last

    def _last(self, role: str) -> Message | None:
        """The last message, if it is of ``role``."""
        last = self._entries[-1] if self._entries else None
        return last if isinstance(last, dict) and last["role"] == role else None


def as_object(arguments: str) -> dict[str, Any]:
    """A call's arguments as an object. Anything else is wrapped in one, also what cannot be sent (NaN, lone
    surrogates); ``null`` is empty, as it is to vLLM."""
    try:
        value: object = json.loads(arguments or "{}")
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return {_NO_JSON: arguments}
    if value is None:
        return {}
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {_NO_JSON: arguments}


def carried(arguments: str) -> str:
    """A call's arguments as vLLM takes them back: as the model wrote them, or wrapped in a JSON object."""
    value = as_object(arguments)
    return json.dumps(value, ensure_ascii=False) if value == {_NO_JSON: arguments} else arguments


def meant(arguments: str) -> Any:
    """What a call's arguments say, be they as the model wrote them or as they come back, see :func:`carried`: JSON, or
    a text that is none."""
    value = _read(arguments)
    if isinstance(value, dict) and value.keys() == {_NO_JSON}:
        value = _read(str(value[_NO_JSON]))
    return {} if value in (None, "") else value


def _read(text: str) -> Any:
    try:
        return decode(text.strip())
    except (ValueError, RecursionError):
        return text.strip()


def written(value: object) -> str:
    """The arguments of a call that a client gives back as the JSON ``value``."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        # escaped, a lone surrogate survives
        text = json.dumps(value)
    return carried(text)


def text_part(text: str) -> Part:
    """A content part that says ``text``."""
    return {"type": "text", "text": text}


def content_of(parts: list[Part]) -> Content:
    """A single text as a string, which every chat template accepts; anything else as parts."""
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def unread(what: str, name: str | None = None) -> Part:
    """A text that tells the model about something that cannot be carried."""
    return text_part(f"[{what}{f' {name!r:.200}' if name else ''} was here; this model cannot read it.]")


def _extend(message: Message, content: Content) -> None:
    """Add to a message in place: it may be extended often."""
    if isinstance(message["content"], str):
        message["content"] = [text_part(message["content"])]
    message["content"] += _parts(content)


def _parts(content: Content) -> list[Part]:
    return [text_part(content)] if isinstance(content, str) else content
