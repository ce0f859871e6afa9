"""A stand-in's answer that is streamed where a stream is asked for."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response

from tests.standins.swarm import MODEL, by_number


async def streamed(body: dict[str, Any], number: int) -> Response:
    """As :func:`by_number`; the stream is of two words."""
    if not body.get("stream"):
        return await by_number(body, number)
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
    deltas: list[tuple[dict[str, Any], str | None]] = [
        ({"role": "assistant", "content": "two"}, None),
        ({"content": " words"}, "stop"),
    ]
    chunks = [
        *({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": end}]} for delta, end in deltas),
        {**head, "choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}},
    ]
    events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return Response("".join([*events, "data: [DONE]\n\n"]), media_type="text/event-stream")
