"""Chat answers as OpenAI's responses, plain or as the events of a stream.

Invariant: the items of the stream's last event are those of the plain response; ``response.completed`` is given out
only once the whole answer was taken in.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from adapters.dialects.parts import Part, Step, Unfolding, only_choice, parts_of
from swarm.errors import SwarmGatewayError

Event = dict[str, Any]

#: Settings of the request that a response repeats, and what they are when the request does not say.
_REPEATED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "store": False,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "user": None,
}
#: The codes of a failed response for what is the caller's; any other fault of theirs is their prompt's.
_FAULTS = {429: "rate_limit_exceeded"}
_CUT = {"length": "max_output_tokens", "content_filter": "content_filter"}


def response_of(data: Mapping[str, Any], completion: Mapping[str, Any]) -> dict[str, Any]:
    """The response to request ``data`` for a ``chat.completion``.

    Raises:
        UpstreamError: it is none.
    """
    choice = only_choice(completion)
    envelope = _envelope(data, completion)
    parts = parts_of(choice["message"])
    return _ended(envelope, parts, choice.get("finish_reason"), completion.get("usage") or {})


class ResponseEvents:
    """Chat chunks in, events out; each event's ``type`` is also its name on the wire."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._data = data
        self._unfolding = Unfolding()
        self._envelope: dict[str, Any] = {}
        self._count = 0
        #: the whole response, once the stream has ended
        self.response: dict[str, Any] = {}

    def take(self, chunk: Mapping[str, Any]) -> list[Event]:
        """The events that a ``chat.completion.chunk`` brings.

        Raises:
            UpstreamError: it makes no sense after those before it.
        """
        events = self._begun(chunk)
        seen = self._unfolding
        for step in seen.take(chunk):
            events += self._events(step)
        return self._numbered(events)

    def end(self) -> list[Event]:
        """The last event.

        Raises:
            UpstreamError: no chunk told a finish reason.
        """
        seen = self._unfolding
        self.response = _ended(self._envelope, seen.parts, seen.end(), seen.usage)
        return self._numbered([{"type": f"response.{self.response['status']}", "response": self.response}])

    def fail(self, exc: SwarmGatewayError) -> list[Event]:
        """The events that end a stream which cannot go on."""
        events = self._begun({})
        parts = self._unfolding.parts
        code = "server_error" if exc.status >= 500 else _FAULTS.get(exc.status, "invalid_prompt")
        response = self._envelope | {
            "status": "failed",
            "error": {"code": code, "message": exc.message},
            "output": [_item(self._envelope, part, "incomplete" if part is parts[-1] else None) for part in parts],
        }
        return self._numbered([*events, {"type": "response.failed", "response": response}])

    def _begun(self, head: Mapping[str, Any]) -> list[Event]:
        """The first events, unless they were given out; SDKs take no other before them."""
        if self._envelope:
            return []
        self._envelope = _envelope(self._data, head)
        return [{"type": f"response.{state}", "response": self._envelope} for state in ("created", "in_progress")]

    def _numbered(self, events: list[Event]) -> list[Event]:
        for event in events:
            event["sequence_number"] = self._count
            self._count += 1
        return events

    def _events(self, step: Step) -> list[Event]:
        """The events of one step; the part may have gone on since an earlier one."""
        part, where = step.part, {"output_index": step.part.index}
        item_id = _item_id(self._envelope, part)
        inside = where | {"item_id": item_id} | ({} if part.kind == "call" else {"content_index": 0})
        if step.what == "open":
            item = _item(self._envelope, replace(part, pieces=[]), "in_progress") | (
                {} if part.kind == "call" else {"content": []}
            )
            opened: list[Event] = [{"type": "response.output_item.added", **where, "item": item}]
            if part.kind != "call":
                empty = _content(replace(part, pieces=[]))
                opened.append({"type": "response.content_part.added", **inside, "part": empty})
            return opened
        if step.what == "more":
            delta: Event = {**inside, "delta": step.text}
            match part.kind:
                case "reasoning":
                    return [{"type": "response.reasoning_text.delta", **delta}]
                case "text":
                    return [{"type": "response.output_text.delta", **delta, "logprobs": []}]
                case "call":
                    return [{"type": "response.function_call_arguments.delta", **delta}]
        cut = "incomplete" if self._unfolding.finish_reason in _CUT and part is self._unfolding.parts[-1] else None
        closed: list[Event]
        match part.kind:
            case "reasoning":
                closed = [{"type": "response.reasoning_text.done", **inside, "text": part.text}]
            case "text":
                closed = [{"type": "response.output_text.done", **inside, "text": part.text, "logprobs": []}]
            case "call":
                said = {"name": part.name, "arguments": part.text}
                closed = [{"type": "response.function_call_arguments.done", **inside, **said}]
        if part.kind != "call":
            closed.append({"type": "response.content_part.done", **inside, "part": _content(part)})
        done = _item(self._envelope, part, cut)
        return [*closed, {"type": "response.output_item.done", **where, "item": done}]


def _envelope(data: Mapping[str, Any], head: Mapping[str, Any]) -> dict[str, Any]:
    """The response before anything is answered."""
    repeated = {name: default if data.get(name) is None else data[name] for name, default in _REPEATED.items()}
    return {
        "id": "resp_" + str(head.get("id") or uuid.uuid4().hex).removeprefix("chatcmpl-"),
        "object": "response",
        "created_at": head.get("created") or int(time.time()),
        "model": head.get("model") or data.get("model"),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
        "background": False,
        "service_tier": "default",
        "truncation": "disabled",
        **repeated,
    }


def _ended(
    envelope: Mapping[str, Any], parts: Sequence[Part], finish: object, usage: Mapping[str, Any]
) -> dict[str, Any]:
    cut = _CUT.get(str(finish))
    last = len(parts) - 1
    return {
        **envelope,
        "status": "completed" if cut is None else "incomplete",
        "incomplete_details": None if cut is None else {"reason": cut},
        "output": [_item(envelope, part, "incomplete" if cut and part.index == last else None) for part in parts],
        "usage": _usage(usage),
    }


def _item_id(envelope: Mapping[str, Any], part: Part) -> str:
    prefix = {"reasoning": "rs", "text": "msg", "call": "fc"}[part.kind]
    return f"{prefix}_{envelope['id'].removeprefix('resp_')}_{part.index}"


def _item(envelope: Mapping[str, Any], part: Part, status: str | None) -> dict[str, Any]:
    """``status``: ``None`` when the part is whole."""
    item = {"id": _item_id(envelope, part), "status": status or "completed"}
    match part.kind:
        case "reasoning":
            return {**item, "type": "reasoning", "summary": [], "content": [_content(part)]}
        case "text":
            return {**item, "type": "message", "role": "assistant", "content": [_content(part)]}
        case "call":
            call = {"call_id": part.call_id, "name": part.name, "arguments": part.text}
            return {**item, "type": "function_call", **call}


def _content(part: Part) -> dict[str, Any]:
    if part.kind == "reasoning":
        return {"type": "reasoning_text", "text": part.text}
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    prompt, completion = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    reasoning = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": prompt + completion,
    }
