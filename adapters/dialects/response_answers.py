"""Chat answers as OpenAI's responses, plain or as the events of a stream.

Invariant: the items of the stream's last event are those of the plain response; ``response.completed`` goes out only
after the whole answer was read.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from adapters.dialects.chat import ChatDialect
from adapters.dialects.chat_answers import AnswerPart, Step, Unfolding
from adapters.dialects.dialect import EventStream
from adapters.dialects.response_items import input_of, sealed, tools_by_function
from adapters.dialects.sse import encode_named
from swarm.errors import SwarmGatewayError

Event = dict[str, Any]

ID_PREFIX = "resp_"
#: Value of ``include`` that asks for reasoning in a form that a client can send back if nothing is stored.
SEALED = "reasoning.encrypted_content"
#: Settings of the request that a response repeats, and their defaults.
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
#: Codes of a failed response by the status of a client error; the others are ``invalid_prompt``.
_FAULTS = {429: "rate_limit_exceeded"}
#: Why a response is incomplete, by the finish reason of the chat form.
CUT = {"length": "max_output_tokens", "content_filter": "content_filter"}


class ResponseStream(EventStream):
    """Events named by their ``type``."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._data = data
        self._unfolding = Unfolding()
        self._items: ResponseItems | None = None
        self._count = 0
        #: the whole response, once the stream has ended
        self.response: dict[str, Any] = {}

    def take(self, chunk: Mapping[str, Any]) -> bytes:
        events, items = self._begun(chunk)
        for step in self._unfolding.take(chunk):
            events += self._events(items, step)
        return self._encoded(events)

    def end(self) -> bytes:
        seen = self._unfolding
        finish = seen.end()
        events, items = self._begun({})
        self.response = items.ended(seen.parts, finish, seen.usage)
        return self._encoded([*events, {"type": f"response.{self.response['status']}", "response": self.response}])

    def fail(self, exc: SwarmGatewayError) -> bytes:
        events, items = self._begun({})
        parts = self._unfolding.parts
        code = "server_error" if exc.status >= 500 else _FAULTS.get(exc.status, "invalid_prompt")
        response = items.envelope | {
            "status": "failed",
            "error": {"code": code, "message": exc.message},
            "output": [items.item(part, "incomplete" if part is parts[-1] else None) for part in parts],
        }
        return self._encoded([*events, {"type": "response.failed", "response": response}])

    def _begun(self, head: Mapping[str, Any]) -> tuple[list[Event], ResponseItems]:
        """The first events, unless they went out already; SDKs accept no others before them."""
        if self._items is not None:
            return [], self._items
        self._items = items = ResponseItems(self._data, head)
        return [
            {"type": f"response.{state}", "response": items.envelope} for state in ("created", "in_progress")
        ], items

    def _encoded(self, events: list[Event]) -> bytes:
        for event in events:
            event["sequence_number"] = self._count
            self._count += 1
        return encode_named(events)

    def _events(self, items: ResponseItems, step: Step) -> list[Event]:
        """The events of one step; its part may have more pieces by now."""
        part, where = step.part, {"output_index": step.part.index}
        inside = where | {"item_id": items.id_of(part)}
        call, custom = part.kind == "call", items.is_custom(part)
        kind = "function_call_arguments" if call else "reasoning_text" if part.kind == "reasoning" else "output_text"
        more = {"logprobs": []} if part.kind == "text" else {}
        if not call:
            inside["content_index"] = 0
        if step.what == "open":
            empty = replace(part, pieces=[])
            item = items.item(empty, "in_progress") | ({} if call else {"content": []})
            opened: list[Event] = [{"type": "response.output_item.added", **where, "item": item}]
            if not call:
                opened.append({"type": "response.content_part.added", **inside, "part": _content(empty)})
            return opened
        if step.what == "more":
            # a custom tool's input goes out once the arguments around it are complete
            return [] if custom else [{"type": f"response.{kind}.delta", **inside, "delta": step.text, **more}]
        cut = "incomplete" if self._unfolding.finish_reason in CUT and part is self._unfolding.parts[-1] else None
        done = items.item(part, cut)
        if custom:
            input_ = done["input"]
            closed: list[Event] = [
                {"type": "response.custom_tool_call_input.delta", **inside, "delta": input_},
                {"type": "response.custom_tool_call_input.done", **inside, "input": input_},
            ]
        elif call:
            closed = [{"type": f"response.{kind}.done", **inside, "name": done["name"], "arguments": part.text}]
        else:
            closed = [
                {"type": f"response.{kind}.done", **inside, "text": part.text, **more},
                {"type": "response.content_part.done", **inside, "part": _content(part)},
            ]
        return [*closed, {"type": "response.output_item.done", **where, "item": done}]


class ResponseItems:
    """Makes the items of one response.

    Args:
        data: the request.
        head: ``id``, ``created`` and ``model`` of the answer.

    Attributes:
        envelope: the response before its first item.
    """

    def __init__(self, data: Mapping[str, Any], head: Mapping[str, Any]) -> None:
        self.envelope = _envelope(data, head)
        self._tools = tools_by_function(data)
        self._sealed = SEALED in (data.get("include") or ())

    def ended(self, parts: Sequence[AnswerPart], finish: object, usage: Mapping[str, Any]) -> dict[str, Any]:
        """The whole response."""
        cut = CUT.get(str(finish))
        last = len(parts) - 1
        return {
            **self.envelope,
            "status": "completed" if cut is None else "incomplete",
            "incomplete_details": None if cut is None else {"reason": cut},
            "output": [self.item(part, "incomplete" if cut and part.index == last else None) for part in parts],
            "usage": _usage(usage),
        }

    def is_custom(self, part: AnswerPart) -> bool:
        """Whether it calls a custom tool."""
        return part.kind == "call" and part.name in self._tools and self._tools[part.name].custom

    def id_of(self, part: AnswerPart) -> str:
        """It has the id of its response, so that no other item has it."""
        prefix = {"reasoning": "rs", "text": "msg", "call": "ctc" if self.is_custom(part) else "fc"}[part.kind]
        return f"{prefix}_{self.envelope['id'].removeprefix(ID_PREFIX)}_{part.index}"

    def item(self, part: AnswerPart, status: str | None) -> dict[str, Any]:
        """``status``: ``None`` if the part is complete."""
        item = {"id": self.id_of(part), "status": status or "completed"}
        match part.kind:
            case "reasoning":
                seal = {"encrypted_content": sealed(part.text)} if self._sealed else {}
                return {**item, "type": "reasoning", "summary": [], "content": [_content(part)], **seal}
            case "text":
                return {**item, "type": "message", "role": "assistant", "content": [_content(part)]}
            case "call":
                return {**item, **self._call(part)}

    def _call(self, part: AnswerPart) -> dict[str, Any]:
        call: dict[str, Any] = {"call_id": part.call_id, "name": part.name}
        if (tool := self._tools.get(part.name)) is not None:
            call["name"] = tool.name
            if tool.namespace is not None:
                call["namespace"] = tool.namespace
            if tool.custom:
                # an item that has just begun has no arguments yet
                return {**call, "type": "custom_tool_call", "input": input_of(part.text) if part.text else ""}
        return {**call, "type": "function_call", "arguments": part.text}


def _envelope(data: Mapping[str, Any], head: Mapping[str, Any]) -> dict[str, Any]:
    """The response before its first item."""
    repeated = {name: default if data.get(name) is None else data[name] for name, default in _REPEATED.items()}
    return {
        "id": ID_PREFIX + str(head.get("id") or uuid.uuid4().hex).removeprefix(ChatDialect.id_prefix),
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


def _content(part: AnswerPart) -> dict[str, Any]:
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
