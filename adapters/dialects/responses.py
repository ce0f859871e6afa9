"""OpenAI Responses on the wire: request to Chat Completions form, a chat answer back to a response or its events.

Invariant: nothing that affects the answer is dropped silently. A field of the wrong type, or one whose absence would
change the answer, is a 400 that names it; anything else that the chat form cannot express is left out and noted. Hints
(keys of prompt caches, tiers, labels) are not even noted. Nothing is stored here: a conversation comes whole with each
request, or is completed before it comes here. The items of a stream's last event are those of the plain response;
``response.completed`` goes out only after the whole answer was read.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

from adapters.dialects.chat import ChatDialect
from adapters.dialects.chat_answers import AnswerPart, Step, Unfolding, parts_of
from adapters.dialects.dialect import Body, Dialect, EventStream, LLMRequest, SampledAnswer, choices_of, unreadable
from adapters.dialects.fields import Fields, check_depth, present, refuse, session_in
from adapters.dialects.jsons import to_json
from adapters.dialects.response_items import (
    SEAL,
    compacts,
    conversation_of,
    input_of,
    sealed,
    tools_by_function,
    tools_of,
    uttered,
    without_seals,
)
from adapters.dialects.sse import encode_named
from swarm.errors import CONTEXT_LENGTH, SwarmGatewayError

Event = dict[str, Any]

_ID_PREFIX = "resp_"
#: Value of ``include`` that asks for reasoning in a form that a client can send back if nothing is stored.
_SEALED = "reasoning.encrypted_content"
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
#: Fields of vLLM's own that its Responses and its chats have alike.
_VLLM_FIELDS = (
    "cache_salt",
    "frequency_penalty",
    "ignore_eos",
    "include_reasoning",
    "include_stop_str_in_output",
    "logit_bias",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "presence_penalty",
    "priority",
    "repetition_penalty",
    "seed",
    "skip_special_tokens",
    "stop",
    "structured_outputs",
    "top_k",
    "vllm_xargs",
)
#: Items that are the model's own words, and one that says nothing: messages next to each other would be two turns.
_SAID = frozenset({"message", "reasoning", "function_call", "custom_tool_call", "compaction"})
_NO_THOUGHT: Mapping[str, Any] = {"type": "reasoning", "summary": []}
#: Codes of a failed response by the status of a client error; the others are ``invalid_prompt``.
_FAULTS = {429: "rate_limit_exceeded"}
#: Why a response is incomplete, by the finish reason of the chat form.
_CUT = {"length": "max_output_tokens", "content_filter": "content_filter"}
_FINISH_REASONS = {reason: finish for finish, reason in _CUT.items()}


class ResponsesDialect(Dialect):
    """``POST /v1/responses``.

    Args:
        stored: whether the caller stores responses. It then handles ``store`` and ``previous_response_id``, and adds
            the items of the latter to ``input``.
    """

    path = "/v1/responses"
    id_prefix = _ID_PREFIX
    translatable = True
    spelled = {"max_completion_tokens": "max_output_tokens"}

    def __init__(self, *, stored: bool = False) -> None:
        self._stored = stored

    def parse(self, data: dict[str, Any]) -> LLMRequest:
        check_depth(data)
        top = Fields(data)
        previous, store = top.text("previous_response_id"), top.flag("store")
        if previous is not None and not self._stored:
            refuse("previous_response_id", "responses are not stored here; send the conversation's items as 'input'")
        if store and not self._stored:
            top.note("responses are not stored here", "store")
        model, stream = top.text("model"), top.flag("stream") or False
        user, known_as = top.text("user"), top.text("safety_identifier")
        body: dict[str, Any] = {"messages": conversation_of(top).messages} | present(
            temperature=top.number("temperature"),
            top_p=top.number("top_p"),
            max_completion_tokens=top.integer("max_output_tokens"),
            user=known_as or user,
            # the response repeats it; the name of its session alone goes on
            metadata=session_in(top.whole("metadata")),
            chat_template_kwargs=top.whole("chat_template_kwargs"),
            **{name: top.take(name) for name in _VLLM_FIELDS},
        )
        body |= {**tools_of(top), **_text_format(top), **_reasoning(top), **_going_on(data, body["messages"])}
        _without_effect(top)
        top.done()
        return LLMRequest.for_one_answer(body, model, stream, top.notes.lines())

    def answer(self, data: Mapping[str, Any], completion: Mapping[str, Any]) -> dict[str, Any]:
        choice, usage = choices_of(completion)[0], completion.get("usage") or {}
        return ResponseItems(data, completion).ended(parts_of(choice["message"]), choice.get("finish_reason"), usage)

    def stream(self, data: Mapping[str, Any]) -> ResponseStream:
        return ResponseStream(data)

    def foreign(self, raw: bytes) -> bytes:
        """With our summaries in plain, and without our reasoning: OpenAI refuses what others encrypted."""
        if SEAL.encode() not in raw:
            return raw
        data = cast("Body", json.loads(raw))
        items = data.get("input")
        return to_json({**data, "input": without_seals(items)}) if isinstance(items, list) else raw

    def read(self, body: Body) -> SampledAnswer:
        kinds = [item.get("type", "message") for item in body["output"]]
        last = next((kind for kind in reversed(kinds) if kind != "reasoning"), None)
        if last not in (None, *_SAID):
            # a call of OpenAI's own tools, or a picture: without it the answer is empty, or half of what it was
            raise unreadable(f"it ends with {last}")
        # one answer, whatever stands between its messages
        utterances = [uttered(item) for item, kind in zip(body["output"], kinds, strict=True) if kind in _SAID]
        if utterances and utterances[-1].get("type") == "compaction":
            raise unreadable("only its maker can read its summary")
        items = [part for item in utterances if item.get("type") != "compaction" for part in (_NO_THOUGHT, item)]
        turns = self.parse({"model": "any", "input": items}).messages if items else []
        match body.get("status"):
            case "completed":
                finish = "tool_calls" if turns and turns[-1].get("tool_calls") else "stop"
            case "incomplete":
                reason = str((body.get("incomplete_details") or {}).get("reason"))
                finish = _FINISH_REASONS.get(reason) or reason
            case status:
                raise unreadable(f"its status is {status}")
        return SampledAnswer.from_turns(body, turns, finish)

    def read_stream(self, events: Iterable[Body]) -> SampledAnswer:
        ends = [event for event in events if event.get("type") in ("response.completed", "response.incomplete")]
        if not ends:
            raise unreadable("the stream broke off")
        return self.read(ends[-1]["response"])

    def error(self, exc: SwarmGatewayError) -> dict[str, Any]:
        body = exc.body()
        return {"error": {**body["error"], "param": "input"}} if exc.code == CONTEXT_LENGTH else body


class ResponseStream(EventStream):
    """Events named by their ``type``."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._data = data
        self._unfolding = Unfolding()
        self._head: Mapping[str, Any] = {}
        self._count = 0
        #: the whole response, once the stream has ended
        self.response: dict[str, Any] = {}

    def take(self, chunk: Mapping[str, Any]) -> bytes:
        # the first chunk need not have a choice
        self._head = self._head or chunk
        steps = self._unfolding.take(chunk)
        return self._encoded([event for step in steps for event in self._events(step)])

    def end(self) -> bytes:
        seen = self._unfolding
        self.response = self._items.ended(seen.parts, seen.end(), seen.usage)
        return self._encoded([{"type": f"response.{self.response['status']}", "response": self.response}])

    def fail(self, exc: SwarmGatewayError) -> bytes:
        items, parts = self._items, self._unfolding.parts
        code = "server_error" if exc.status >= 500 else _FAULTS.get(exc.status, "invalid_prompt")
        response = items.envelope | {
            "status": "failed",
            "error": {"code": code, "message": exc.message},
            "output": [items.item(part, "incomplete" if part is parts[-1] else None) for part in parts],
        }
        return self._encoded([{"type": "response.failed", "response": response}])

    @cached_property
    def _items(self) -> ResponseItems:
        return ResponseItems(self._data, self._head)

    def _encoded(self, events: list[Event]) -> bytes:
        """``events``, after the first ones unless these went out already; SDKs accept no others before them."""
        if not self._count:
            envelope = self._items.envelope
            states = ("created", "in_progress")
            events = [*({"type": f"response.{state}", "response": envelope} for state in states), *events]
        for event in events:
            event["sequence_number"] = self._count
            self._count += 1
        return encode_named(events)

    def _events(self, step: Step) -> list[Event]:
        """The events of one step; its part may have more pieces by now."""
        items = self._items
        part, where = step.part, {"output_index": step.part.index}
        inside = where | {"item_id": items.id_of(part)}
        call, custom = part.kind == "call", items.is_custom(part)
        kind = "function_call_arguments" if call else "reasoning_text" if part.kind == "reasoning" else "output_text"
        more = {"logprobs": []} if part.kind == "text" else {}
        if not call:
            inside["content_index"] = 0
        if items.is_summary(part):
            # it has no pieces
            if step.what != "close":
                return []
            item = items.item(part, None)
            return [{"type": f"response.output_item.{kind}", **where, "item": item} for kind in ("added", "done")]
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
        cut = "incomplete" if self._unfolding.finish_reason in _CUT and part is self._unfolding.parts[-1] else None
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
        self._sealed = _SEALED in (data.get("include") or ())
        self._compacts = compacts(data)

    def ended(self, parts: Sequence[AnswerPart], finish: object, usage: Mapping[str, Any]) -> dict[str, Any]:
        """The whole response."""
        cut = _CUT.get(str(finish))
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

    def is_summary(self, part: AnswerPart) -> bool:
        """Whether it goes out as the summary that was asked for."""
        return part.kind == "text" and self._compacts

    def id_of(self, part: AnswerPart) -> str:
        """It has the id of its response, so that no other item has it."""
        text = "cmp" if self.is_summary(part) else "msg"
        prefix = {"reasoning": "rs", "text": text, "call": "ctc" if self.is_custom(part) else "fc"}[part.kind]
        return f"{prefix}_{self.envelope['id'].removeprefix(_ID_PREFIX)}_{part.index}"

    def item(self, part: AnswerPart, status: str | None) -> dict[str, Any]:
        """``status``: ``None`` if the part is complete."""
        item = {"id": self.id_of(part), "status": status or "completed"}
        if self.is_summary(part):
            return {"id": item["id"], "type": "compaction", "encrypted_content": sealed(part.text)}
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
        "id": _ID_PREFIX + str(head.get("id") or uuid.uuid4().hex).removeprefix(ChatDialect.id_prefix),
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
    details: Mapping[str, Any] = usage.get("prompt_tokens_details") or {}
    reasoning = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    return {
        "input_tokens": prompt,
        "input_tokens_details": {
            "cached_tokens": details.get("cached_tokens") or 0,
            "cache_write_tokens": details.get("created_cache_tokens") or 0,
        },
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": prompt + completion,
    }


def _without_effect(top: Fields) -> None:
    """Take the fields that do not affect the answer, and refuse those that would."""
    for name in ("conversation", "prompt"):
        top.only(name)
    top.only("background", False)
    top.only("top_logprobs", 0)
    top.drop("prompt_cache_key", "prompt_cache_retention", "service_tier", "client_metadata")
    # the first bounds tools that do not run here
    top.drop("max_tool_calls", "stream_options")
    top.leave("truncation", "a conversation that is too long is refused", "disabled")
    include = top.take("include")
    if include is not None and not isinstance(include, list):
        refuse("include", "must be a list")
    for item in cast("list[object]", include or []):
        if item == "message.output_text.logprobs":
            refuse("include", f"{item!r} cannot be given")
        if item != _SEALED:
            top.note(f"{item!s:.60} cannot be given", "include")


def _text_format(top: Fields) -> dict[str, Any]:
    text = top.inner("text")
    if text is None:
        return {}
    body: dict[str, Any] = {}
    text.leave("verbosity", "the model has no such setting", "medium")
    if (form := text.inner("format")) is not None:
        kind = form.required("type")
        if kind == "json_schema":
            schema: dict[str, Any] = {"name": form.required("name"), "schema": form.whole("schema") or {}}
            schema |= present(description=form.text("description"), strict=form.flag("strict"))
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif kind in ("text", "json_object"):
            body["response_format"] = {"type": kind}
        else:
            refuse(form.at("type"), "must be 'text', 'json_schema' or 'json_object'")
        form.done()
    text.done()
    return body


def _going_on(data: Mapping[str, Any], messages: list[dict[str, Any]]) -> dict[str, Any]:
    """An answer that was cut goes on where it is the last of the ``messages``, as by vLLM."""
    match data["input"]:
        case [*_, {"role": "assistant", "status": "in_progress" | "incomplete", **rest}] if (
            rest.get("type") or "message"
        ) == "message":
            goes_on = messages[-1]["content"] and "tool_calls" not in messages[-1]
        case _:
            goes_on = False
    return {"add_generation_prompt": False, "continue_final_message": True} if goes_on else {}


def _reasoning(top: Fields) -> dict[str, Any]:
    reasoning = top.inner("reasoning")
    if reasoning is None:
        return {}
    effort = reasoning.text("effort")
    # the answer has the reasoning itself
    for name in ("summary", "generate_summary"):
        reasoning.leave(name, "reasoning is given whole")
    reasoning.done()
    return present(reasoning_effort=effort)
