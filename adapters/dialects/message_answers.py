"""Chat answers as Anthropic's messages, plain or as the events of a stream, and errors in Anthropic's shape.

Invariant: the events, put together as Anthropic's SDKs do, give exactly the plain message; ``stop_reason`` and
``message_stop`` are given out only once the whole answer was taken in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from adapters.dialects.conversation import as_object
from adapters.dialects.parts import Part, Step, Unfolding, only_choice, parts_of
from swarm.errors import SwarmGatewayError

Event = dict[str, Any]

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


#: Clients that read a signature give thinking back only with one; ours proves nothing, and is not asked for.
_SIGNATURE = "swarm-gateway"


def message_of(completion: Mapping[str, Any]) -> dict[str, Any]:
    """The message for a ``chat.completion``.

    Raises:
        UpstreamError: it is none.
    """
    choice = only_choice(completion)
    parts = parts_of(choice["message"])
    stop = _stop(choice.get("finish_reason"), choice.get("stop_reason"), parts)
    usage = _usage(completion.get("usage") or {})
    return _envelope(completion) | {"content": [_block(part) for part in parts], **stop, "usage": usage}


class MessageEvents:
    """Chat chunks in, events out; each event's ``type`` is also its name on the wire."""

    def __init__(self) -> None:
        self._unfolding = Unfolding()

    def take(self, chunk: Mapping[str, Any]) -> list[Event]:
        """The events that a ``chat.completion.chunk`` brings.

        Raises:
            UpstreamError: it makes no sense after those before it.
        """
        events: list[Event] = []
        if not self._unfolding.head:
            message = _envelope(chunk) | {"content": [], "stop_reason": None, "stop_sequence": None}
            # the engine tells the usage at the end, where ``message_delta`` gives it
            message["usage"] = {"input_tokens": 0, "output_tokens": 0}
            events += [{"type": "message_start", "message": message}, {"type": "ping"}]
        return [*events, *(event for step in self._unfolding.take(chunk) for event in _events(step))]

    def end(self) -> list[Event]:
        """The last events.

        Raises:
            UpstreamError: no chunk told a finish reason.
        """
        seen = self._unfolding
        stop = _stop(seen.end(), seen.stop_reason, seen.parts)
        return [{"type": "message_delta", "delta": stop, "usage": _usage(seen.usage)}, {"type": "message_stop"}]

    def fail(self, exc: SwarmGatewayError) -> list[Event]:
        """The events that end a stream which cannot go on."""
        return [error_body(exc)]


def error_body(exc: SwarmGatewayError) -> dict[str, Any]:
    """``exc`` in Anthropic's shape; our ``code`` and ``param`` stay, for programs."""
    error: dict[str, Any] = exc.body()["error"]
    default = "invalid_request_error" if exc.status < 500 else "api_error"
    return {"type": "error", "error": {**error, "type": _ERROR_TYPES.get(exc.status, default)}}


def _envelope(head: Mapping[str, Any]) -> dict[str, Any]:
    answer_id = "msg_" + str(head.get("id") or "").removeprefix("chatcmpl-")
    return {"id": answer_id, "type": "message", "role": "assistant", "model": head.get("model")}


def _events(step: Step) -> list[Event]:
    part = step.part
    if step.what == "open":
        # the part may have gone on since
        empty = replace(part, pieces=[])
        unsigned = {"signature": ""} if part.kind == "reasoning" else {}
        return [{"type": "content_block_start", "index": part.index, "content_block": _block(empty) | unsigned}]
    if step.what == "close":
        stop: Event = {"type": "content_block_stop", "index": part.index}
        if part.kind != "reasoning":
            return [stop]
        signed = {"type": "signature_delta", "signature": _SIGNATURE}
        return [{"type": "content_block_delta", "index": part.index, "delta": signed}, stop]
    match part.kind:
        case "reasoning":
            delta: Event = {"type": "thinking_delta", "thinking": step.text}
        case "text":
            delta = {"type": "text_delta", "text": step.text}
        case "call":
            delta = {"type": "input_json_delta", "partial_json": step.text}
    return [{"type": "content_block_delta", "index": part.index, "delta": delta}]


def _block(part: Part) -> dict[str, Any]:
    match part.kind:
        case "reasoning":
            return {"type": "thinking", "thinking": part.text, "signature": _SIGNATURE}
        case "text":
            return {"type": "text", "text": part.text}
        case "call":
            return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": as_object(part.text)}


def _stop(finish: object, stop: object, parts: list[Part]) -> dict[str, Any]:
    """``stop_reason`` and ``stop_sequence``; vLLM tells the string that it stopped at as its ``stop_reason``."""
    sequence = stop if isinstance(stop, str) and finish == "stop" else None
    if sequence is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": sequence}
    # to a forced call vLLM's finish reason is "stop"
    if finish == "stop" and any(part.kind == "call" for part in parts):
        finish = "tool_calls"
    return {"stop_reason": _STOP_REASONS.get(str(finish), finish), "stop_sequence": None}


def _usage(usage: Mapping[str, Any]) -> dict[str, int]:
    """Anthropic counts what came from the cache apart, vLLM within the prompt."""
    prompt: int = usage.get("prompt_tokens") or 0
    counted = {"input_tokens": prompt, "output_tokens": usage.get("completion_tokens") or 0}
    cached: int | None = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    if cached is None:
        return counted
    return counted | {"input_tokens": prompt - cached, "cache_read_input_tokens": cached}
