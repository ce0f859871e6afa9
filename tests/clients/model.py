"""What the scripted model of the client suite says: a sensible answer to whatever a client asks, and one that is not.

Every other sample of a group gives up (:data:`GIVES_UP`), so that a user who sees the sensible answer was given the
better one, and every group has something to learn from.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

GIVES_UP = "I do not know."
#: What fills a field of a schema, by its type.
_FILL: dict[str, Any] = {"string": "Rome", "integer": 7, "number": 7.5, "boolean": True, "null": None}


def answer(body: dict[str, Any]) -> dict[str, Any]:
    """The message that is worth something, for a chat or a raw prompt in vLLM's form."""
    if "prompt" in body:
        return said(f" goes on after {body['prompt']!r}")
    last = body["messages"][-1]
    form = (body.get("response_format") or {}).get("json_schema")
    if last["role"] == "tool":
        results = [text_of(one) for one in body["messages"] if one["role"] == "tool"]
        if form is None:
            return said(f"The tools say: {', '.join(results)}.")
    elif body.get("tools") and body.get("tool_choice") != "none":
        asked = text_of(last)
        cities = [city for city in ("Rome", "Oslo") if city in asked] or ["Rome"]
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [_call(body, n, city) for n, city in enumerate(cities)],
        }
    if form is not None:
        return said(json.dumps(filled(form["schema"], form["schema"])))
    return said(edited(body["messages"]) or f"You said: {text_of(last)}")


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "tool_calls": []}


def text_of(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else f"[{part['type']}]" for part in content or [])


def _call(body: dict[str, Any], number: int, city: str) -> dict[str, Any]:
    function = body["tools"][0]["function"]
    arguments = filled(function["parameters"], function["parameters"], city)
    return {
        "id": f"call_{number}",
        "type": "function",
        "function": {"name": function["name"], "arguments": json.dumps(arguments)},
    }


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
