"""Answers that a stand-in swarm gives to every dialect."""

from __future__ import annotations

from typing import Any

from tests.standins.swarm import Answer, said

LOOK = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def saying(text: str | None, **message: Any) -> Answer:
    """Every sample says ``text``; ``message`` are further fields of it, ``finish_reason`` among them."""
    return lambda *_: said(text, **message)


def calling(*cities: str) -> Answer:
    """Every sample thinks, then looks up ``cities``."""
    calls = [
        {"id": f"call-{k}", "type": "function", "function": {"name": "look", "arguments": f'{{"city": "{city}"}}'}}
        for k, city in enumerate(cities)
    ]
    return saying(None, finish_reason="tool_calls", tool_calls=calls, reasoning="hm")
