"""OpenAI Chat Completions as vLLM speaks it: the internal form itself; and what a message in it means, by which gateway
and swarm server know a conversation again.

Invariant: nothing that affects the answer is dropped silently. What vLLM would ignore or refuse is left out and noted,
or is a 400 that names the field if the answer would be another one without it. Unknown fields go on to vLLM.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import orjson

from adapters.dialects.chat_answers import answer_of_chunks
from adapters.dialects.conversation import carried, meant, unread
from adapters.dialects.dialect import Body, Dialect, EventStream, LLMRequest, SampledAnswer, is_text, text_of
from adapters.dialects.fields import Fields, check_depth, refuse
from adapters.dialects.jsons import to_json

#: What gateway or swarm server heed before vLLM reads it.
_FLAGS = ("echo", "continue_final_message", "include_reasoning")
_DELIVERY = frozenset({"stream", "stream_options", "n"})
#: Fields that vLLM does not know although they change the form of the answer, and their harmless values.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "modalities": (["text"],),
}
#: Fields that vLLM ignores, and their harmless values.
_IGNORED: dict[str, tuple[Any, ...]] = {
    "moderation": (),
    "store": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}


class ChatDialect(Dialect):
    """``POST /v1/chat/completions``."""

    path = "/v1/chat/completions"
    id_prefix = "chatcmpl-"

    def parse(self, data: dict[str, Any]) -> LLMRequest:
        check_depth(data)
        top = Fields(data)
        turns = top.objects("messages")
        if not turns:
            refuse("messages", "must be a list of at least one message")
        messages = [_message(turn) for turn in turns]
        changed = _tools(top)
        choices, stream, include_usage = delivery(top)
        sampling(top)
        for name in _FLAGS:
            top.flag(name)
        logprobs = top.flag("logprobs")
        if top.take("top_logprobs") and not logprobs:
            refuse("top_logprobs", "is only given with logprobs: true")
        for name, harmless in _REFUSED.items():
            top.only(name, *harmless)
        for name, harmless in _IGNORED.items():
            top.leave(name, "vLLM has no such setting", *harmless)
        if any(new is not old for new, old in zip(messages, data["messages"], strict=True)):
            changed["messages"] = messages
        changed |= top.read
        body = {name: value for name, value in {**data, **changed}.items() if value is not None} if changed else data
        return LLMRequest(top.text("model"), messages, choices, stream, include_usage, body, top.notes.lines())

    def answer(self, data: Mapping[str, Any], completion: Mapping[str, Any]) -> dict[str, Any]:
        return dict(completion)

    def stream(self, data: Mapping[str, Any]) -> EventStream:
        return EventStream()

    def read(self, body: Body) -> SampledAnswer:
        return SampledAnswer.from_completion(body)

    def read_stream(self, events: Iterable[Body]) -> SampledAnswer:
        return answer_of_chunks(events)

    def sampling_body(self, body: dict[str, Any], model: str) -> bytes:
        """The JSON for ``model`` to sample one answer: ``body`` without the fields of its delivery.

        Raises:
            RequestError: JSON cannot encode it (NaN, lone surrogates).
        """
        return to_json({**{key: value for key, value in body.items() if key not in _DELIVERY}, "model": model})


def delivery(top: Fields) -> tuple[int, bool, bool]:
    """How many answers are wanted, whether as a stream, and whether that ends with usage.

    Raises:
        RequestError: see :meth:`Dialect.parse`.
    """
    choices, stream, options = top.integer("n"), top.flag("stream") or False, top.inner("stream_options")
    if choices is not None and choices < 1:
        refuse(top.at("n"), "must be at least 1")
    if options is not None and options.data and not stream:
        refuse(top.at("stream_options"), "is only allowed when stream is true")
    include_usage = options is not None and options.flag("include_usage") is True
    if options is not None and options.read:
        top.read["stream_options"] = options.data | options.read
    return choices or 1, stream, include_usage


def sampling(top: Fields) -> None:
    """Take the numbers that control sampling, and the flags that chats and raw prompts share and that the swarm server
    heeds; vLLM checks every other field.

    Raises:
        RequestError: one is no number, or no flag.
    """
    for name in ("temperature", "top_p"):
        top.number(name)
    for name in ("max_tokens", "max_completion_tokens", "seed"):
        top.integer(name)
    for name in ("include_stop_str_in_output", "return_token_ids"):
        top.flag(name)


def _message(turn: Fields) -> dict[str, Any]:
    """A message as vLLM takes it; the same object if vLLM takes it as it is."""
    fields = turn.data
    role, content, calls = fields.get("role"), fields.get("content"), fields.get("tool_calls")
    if not isinstance(role, str) or not role:
        refuse(turn.at("role"), "must be a string that is not empty")
    changed: dict[str, Any] = {}
    if content is None and role != "assistant":
        changed["content"] = ""
    elif isinstance(content, list):
        changed["content"] = [_part(turn, part, k) for k, part in enumerate(cast("list[Any]", content))]
    if isinstance(calls, list):
        changed["tool_calls"] = [_call(call) for call in cast("list[Any]", calls)]
    return {**fields, **changed} if any(fields.get(name) != value for name, value in changed.items()) else fields


def _part(turn: Fields, part: Any, index: int) -> Any:
    match part:
        case {"type": "file", "file": dict(file)}:
            turn.note("files are replaced by a text", f"content.{index}")
            name: object = cast("dict[str, Any]", file).get("filename")
            return unread("A file", name if isinstance(name, str) else None)
        case _:
            return part


def _call(call: Any) -> Any:
    """vLLM parses the arguments of calls in the conversation, and fails if they are no JSON object."""
    match call:
        case {"function": {"arguments": str(arguments), **function}} if (fit := carried(arguments)) != arguments:
            return {**call, "function": {**function, "arguments": fit}}
        case _:
            return call


def _tools(top: Fields) -> dict[str, Any]:
    """Changes to ``tools`` and ``tool_choice``, ``None`` for what is left out: vLLM refuses tools other than functions,
    an empty list of them, and a choice among none."""
    listed, choice = top.objects("tools"), top.take("tool_choice")
    tools = [tool.data for tool in listed or () if tool.data.get("type", "function") != "custom"]
    for tool in listed or ():
        if tool.data.get("type") == "custom":
            tool.note("custom tools are not carried")
    changed: dict[str, Any] = {}
    if listed is not None and len(tools) < max(1, len(listed)):
        changed["tools"] = tools or None
    if not tools and choice in ("auto", "none"):
        changed["tool_choice"] = None
    return changed


# ------------------------------------------------------------------ what a message means


def meaning_of(message: Any) -> bytes:
    """What a message means: its role, text, calls, and content that is not text, as JSON; of anything else its JSON.

    Two messages have one meaning exactly when they say the same, whatever form a client gave an answer when it sent it
    back: parts for a string, absent for null, other white space or field order in a call's arguments, other ids, and an
    object for arguments that are none (:func:`adapters.dialects.conversation.carried`).
    """
    if not isinstance(message, dict):
        return canonical(message)
    fields = cast("dict[str, Any]", message)
    calls, content = fields.get("tool_calls"), fields.get("content")
    meaning: list[Any] = [fields.get("role"), text_of(fields).strip()]
    if calls:
        meaning.append(
            [_meaning_of_call(call) for call in cast("list[Any]", calls)] if isinstance(calls, list) else calls
        )
    if isinstance(content, list):
        meaning += [part for part in cast("list[Any]", content) if not is_text(part)]
    elif not isinstance(content, str | None):
        meaning.append(content)
    return canonical(meaning)


def without_lines(body: dict[str, Any], patterns: Sequence[re.Pattern[str]]) -> tuple[dict[str, Any], list[str]]:
    """A body in chat form without the lines at the head of its instructions that one of ``patterns`` fits as a whole,
    and these lines. What is sampled and trained is what is left."""
    # of a body that nobody has checked
    match body.get("messages"):
        case [{"role": "system" | "developer", "content": str() | list() as content} as first, *others] if patterns:
            pass
        case _:
            return body, []
    parts: list[Any] = [{"type": "text", "text": content}] if isinstance(content, str) else [*content]
    dropped: list[str] = []
    # where what is left begins: in which part, and where in its text
    at = begin = 0
    while at < len(parts) and isinstance(parts[at], dict) and isinstance(text := parts[at].get("text"), str):
        end = line_end if (line_end := text.find("\n", begin)) >= 0 else len(text)
        line = text[begin:end]
        if not any(pattern.fullmatch(line) for pattern in patterns):
            break
        dropped.append(line)
        at, begin = (at, end + 1) if end + 1 < len(text) else (at + 1, 0)
    if begin:
        parts[at] = {**parts[at], "text": parts[at]["text"][begin:]}
    del parts[:at]
    if not dropped or not (parts or others):
        return body, []
    left = parts[0]["text"] if parts and isinstance(content, str) else parts
    return {**body, "messages": [*([{**first, "content": left}] if parts else []), *others]}, dropped


def canonical(value: object) -> bytes:
    """``value`` as JSON with sorted keys."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # an integer of more than 64 bits, or deeper nesting than orjson follows
        return json.dumps(value, sort_keys=True).encode()


def _meaning_of_call(call: object) -> Any:
    """Name and arguments; clients parse these and write them anew, and may change ids."""
    match call:
        case {"function": {**named}}:
            arguments = cast("Any", named.get("arguments"))
        case _:
            return call
    return [named.get("name"), meant(arguments) if isinstance(arguments, str) else arguments]
