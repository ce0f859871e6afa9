"""Answers that a stand-in swarm gives to every dialect."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.responses import JSONResponse, Response

from tests.standins.swarm import completion

Scripted = Callable[[dict[str, Any], int], Awaitable[Response]]

LOOK = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def saying(text: str | None, **message: Any) -> Scripted:
    """Every sample says ``text``; ``message`` are further fields of it, ``finish_reason`` among them."""

    async def answer(body: dict[str, Any], number: int) -> Response:
        return JSONResponse(completion(text, **message))

    return answer


def calling(*cities: str) -> Scripted:
    """Every sample thinks, then looks up ``cities``."""
    calls = [
        {"id": f"call-{k}", "type": "function", "function": {"name": "look", "arguments": f'{{"city": "{city}"}}'}}
        for k, city in enumerate(cities)
    ]
    return saying(None, finish_reason="tool_calls", tool_calls=calls, reasoning="hm")
