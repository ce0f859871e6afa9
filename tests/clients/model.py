"""What the scripted model of the client suite says: a sensible answer to whatever a client asks, and one that is not.

Every other sample of a group gives up (:data:`GIVES_UP`), so that a user who sees the sensible answer was given the
better one, and every group has something to learn from.

A user gives orders by lines of the last message: ``CALL tool {"its": "arguments"}``, ``SAY this``, ``THINK this``
before the answer, and ``WAIT path`` until there is such a file. Who gives up calls the same tools, but with ``other``
for ``chosen`` in their arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

GIVES_UP = "I do not know."
_CALL = re.compile(r"^CALL (\S+) (\{.*\})$", re.MULTILINE)
_THINK = re.compile(r"^THINK (.*)$", re.MULTILINE)
_WAIT = re.compile(r"^WAIT (.*)$", re.MULTILINE)
_SAY = re.compile(r"^SAY (.*)$", re.MULTILINE)
#: What fills a field of a schema, by its type.
_FILL: dict[str, Any] = {"string": "Rome", "integer": 7, "number": 7.5, "boolean": True, "null": None}


def answer(body: dict[str, Any]) -> dict[str, Any]:
    """The message that is worth something, for a chat or a raw prompt in vLLM's form."""
    if "prompt" in body:
        return said(f" goes on after {body['prompt']!r}")
    thoughts = _THINK.findall(_orders(body["messages"]))
    return _answer(body) | ({"reasoning": thoughts[-1]} if thoughts else {})


def waits_for(body: dict[str, Any]) -> str | None:
    """The path of the file that the answer is to wait for."""
    found = _WAIT.findall(_orders(body.get("messages", [])))
    return found[-1] if found else None


def _answer(body: dict[str, Any]) -> dict[str, Any]:
    messages, tools = body["messages"], body.get("tools") and body.get("tool_choice") != "none"
    last, orders = messages[-1], _orders(messages)
    form = (body.get("response_format") or {}).get("json_schema")
    results = [text_of(one) for one in _since_last_answer(messages) if one["role"] == "tool"]
    if results and form is None:
        return said(f"The tools say: {', '.join(results)}.")
    if spoken := _SAY.findall(orders):
        return said(spoken[-1])
    if tools and (calls := _CALL.findall(orders)):
        return called(messages, calls)
    if tools and not results:
        asked = text_of(last)
        cities = [city for city in ("Rome", "Oslo") if city in asked] or ["Rome"]
        function = body["tools"][0]["function"]
        schema = function["parameters"]
        return called(messages, [(function["name"], json.dumps(filled(schema, schema, city))) for city in cities])
    if form is not None:
        return said(json.dumps(filled(form["schema"], form["schema"])))
    return said(edited(messages) or f"You said: {text_of(last)}")


def given_up(message: dict[str, Any]) -> dict[str, Any]:
    """The answer that is worth nothing beside ``message``."""
    calls = [
        {
            **call,
            "function": {**call["function"], "arguments": call["function"]["arguments"].replace("chosen", "other")},
        }
        for call in message["tool_calls"]
    ]
    return {**said(GIVES_UP), "tool_calls": calls}


def _orders(messages: Sequence[dict[str, Any]]) -> str:
    users = [one for one in _since_last_answer(messages) if one["role"] == "user"]
    return text_of(users[-1], "\n") if users else ""


def _since_last_answer(messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    answered = [index for index, one in enumerate(messages) if one["role"] == "assistant"]
    return messages[answered[-1] + 1 :] if answered else messages


def called(messages: Sequence[dict[str, Any]], calls: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Calls of tools by name and arguments; their ids are unique in the conversation, as vLLM's are everywhere."""
    before = sum(len(one.get("tool_calls") or []) for one in messages)
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for number, (name, arguments) in enumerate(calls, before)
        ],
    }


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "tool_calls": []}


def text_of(message: dict[str, Any], between: str = "") -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    return between.join(part["text"] if part["type"] == "text" else f"[{part['type']}]" for part in content or [])


def filled(schema: dict[str, Any], root: dict[str, Any], text: str = "Rome") -> Any:
    """A value that fits ``schema``; references are to ``$defs`` of ``root``."""
    if "$ref" in schema:
        return filled(root["$defs"][schema["$ref"].rpartition("/")[2]], root, text)
    if "enum" in schema:
        return schema["enum"][0]
    if schema.get("type") == "array":
        return [filled(schema.get("items", {}), root, text)]
    if schema.get("type") == "object" or "properties" in schema:
        return {name: filled(one, root, text) for name, one in schema.get("properties", {}).items()}
    kind = schema.get("type", "string")
    return text if kind == "string" else _FILL[kind]


def edited(messages: Sequence[dict[str, Any]]) -> str | None:
    """The edit that an editing client asks for, as a whole file; ``None`` where nobody asks for one."""
    if "Say farewell in hello.py" not in text_of(messages[-1]):
        return None
    return 'Here it is.\n\nhello.py\n```\ndef greet():\n    return "farewell"\n```\n'
