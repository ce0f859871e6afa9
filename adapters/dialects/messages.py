"""Anthropic Messages on the wire: request to Chat Completions form, a chat answer back to a message or its events.

Invariant: nothing is dropped in silence. What the chat form cannot say is a 400 that names the field; accepted without
effect are only hints that change no answer (``cache_control``: the engine caches prefixes by itself; ``service_tier``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from adapters.dialects.dialect import NamedEventStream
from adapters.dialects.fields import Fields, check_depth, objects, refuse
from adapters.dialects.forms import LLMRequest
from adapters.dialects.message_answers import MessageEvents, error_body, message_of
from adapters.dialects.sse import encode_named
from swarm.errors import SwarmGatewayError

#: Fields that the chat form has under the same name (``top_k`` and ``chat_template_kwargs`` are vLLM's).
_SAME = ("temperature", "top_p", "top_k")
#: What of a chat its prompt depends on.
_COUNTED = ("model", "messages", "tools", "chat_template_kwargs", "continue_final_message", "add_generation_prompt")
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
#: How a model is told that a tool failed: the chat form has no field for it.
_FAILED = "Error: "
_PING = encode_named("ping", {"type": "ping"})

Message = dict[str, Any]


class MessagesDialect:
    """``POST /v1/messages``; a stream is kept alive as Anthropic does it, by pings."""

    path = "/v1/messages"

    def parse(self, data: dict[str, Any]) -> LLMRequest:
        """The internal form of a request body.

        A conversation that ends with the assistant's words asks for their continuation, as in Anthropic's API.

        Raises:
            RequestError: a field is missing, of the wrong type, or nothing that can be carried; ``param`` names it.
        """
        check_depth(data)
        top = Fields(data)
        model, stream = top.text("model"), top.flag("stream") or False
        max_tokens = top.integer("max_tokens")
        if max_tokens is None:
            refuse("max_tokens", "is required")
        messages = [*_system(top), *_conversation(top)]
        body: dict[str, Any] = {"messages": messages, "max_tokens": max_tokens}
        for name in _SAME:
            if (value := top.number(name)) is not None:
                body[name] = value
        if (stop := top.take("stop_sequences")) is not None:
            if not isinstance(stop, list) or not all(isinstance(item, str) for item in cast("list[object]", stop)):
                refuse("stop_sequences", "must be a list of strings")
            body["stop"] = stop
        if (metadata := top.inner("metadata")) is not None:
            if (user := metadata.text("user_id")) is not None:
                body["user"] = user
            metadata.done()
        body |= {**_tools(top), **_thinking(top), **_output(top)}
        top.only("service_tier", "auto", "standard_only")
        top.take("cache_control")
        top.done()
        if messages[-1]["role"] == "assistant":
            if not messages[-1].get("content") or messages[-1].get("tool_calls"):
                refuse(f"messages.{len(data['messages']) - 1}", "an assistant's turn can only be continued in its text")
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        return LLMRequest.for_one_answer(body, model, stream)

    def counted(self, data: dict[str, Any]) -> dict[str, Any]:
        """The ``/tokenize`` body by which vLLM counts the prompt of a ``/v1/messages/count_tokens`` request.

        Raises:
            RequestError: as of :meth:`parse`.
        """
        body = self.parse({"max_tokens": 1, **data}).body
        return {name: body[name] for name in _COUNTED if name in body}

    def answer(self, data: Mapping[str, Any], completion: Mapping[str, Any]) -> dict[str, Any]:
        """The message for a ``chat.completion``, the answer to request ``data``.

        Raises:
            UpstreamError: it is no chat completion.
        """
        return message_of(completion)

    def events(self) -> MessageEvents:
        """Makes the events of a streamed answer."""
        return MessageEvents()

    def stream(self, data: Mapping[str, Any]) -> NamedEventStream:
        """Makes the bytes of a streamed answer to request ``data``."""
        return NamedEventStream(self.events(), _PING)

    def error(self, exc: SwarmGatewayError) -> dict[str, Any]:
        """The error body for ``exc``."""
        return error_body(exc)


def _system(top: Fields) -> list[Message]:
    system = top.take("system")
    if system is None or system == "" or system == []:
        return []
    if isinstance(system, str):
        return [{"role": "system", "content": system}]
    return [{"role": "system", "content": _content([_text(block) for block in objects(system, "system")])}]


def _conversation(top: Fields) -> list[Message]:
    turns = top.objects("messages")
    if not turns:
        refuse("messages", "must be a list of at least one message")
    messages: list[Message] = []
    for turn in turns:
        role, content = turn.needed("role"), turn.take("content")
        turn.done()
        if role not in ("user", "assistant"):
            refuse(turn.at("role"), "must be 'user' or 'assistant'; instructions go into 'system'")
        if isinstance(content, str):
            messages.append({"role": role, "content": content})
            continue
        blocks = objects(content, turn.at("content"))
        if role == "assistant":
            messages.append(_assistant(blocks))
        elif blocks:
            messages += _user(blocks)
        else:
            refuse(turn.at("content"), "must not be empty")
    return messages


def _user(blocks: list[Fields]) -> list[Message]:
    """Results of tools as messages of their own, then what the user says."""
    messages: list[Message] = []
    parts: list[dict[str, Any]] = []
    for block in blocks:
        kind = block.needed("type")
        if kind != "tool_result":
            parts.append(_part(block, kind))
        elif parts:
            refuse(block.path, "results of tools come before everything else that the user says")
        else:
            messages.append(_tool_result(block))
    return [*messages, {"role": "user", "content": _content(parts)}] if parts else messages


def _tool_result(block: Fields) -> Message:
    call_id, failed, content = block.needed("tool_use_id"), block.flag("is_error"), block.take("content")
    _end(block)
    if content is None or isinstance(content, str):
        return {"role": "tool", "tool_call_id": call_id, "content": (_FAILED if failed else "") + (content or "")}
    inner = objects(content, block.at("content"))
    parts = [_part(part, part.needed("type")) for part in inner]
    if failed:
        parts.insert(0, {"type": "text", "text": _FAILED})
    return {"role": "tool", "tool_call_id": call_id, "content": _content(parts)}


def _assistant(blocks: list[Fields]) -> Message:
    """The chat form has one order: reasoning, text, tool calls."""
    thoughts: list[str] = []
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        kind = block.needed("type")
        if kind == "thinking":
            if parts or calls:
                refuse(block.path, "thinking after text or tool calls of one turn cannot be carried to this model")
            thoughts.append(block.needed("thinking"))
            # ours are empty; another is a proof that only its maker can check
            block.only("signature", "")
        elif kind == "text":
            if calls:
                refuse(block.path, "text after tool calls of one turn cannot be carried to this model")
            parts.append({"type": "text", "text": block.needed("text")})
            block.only("citations", [])
        elif kind == "tool_use":
            calls.append(_call(block))
        else:
            refuse(block.at("type"), f"blocks of type {kind!r:.60} cannot be carried to this model")
        _end(block)
    message: Message = {"role": "assistant", "content": _content(parts) if parts or not calls else None}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: Fields) -> dict[str, Any]:
    call_id, name, given = block.needed("id"), block.needed("name"), block.take("input")
    if not isinstance(given, dict):
        refuse(block.at("input"), "must be an object")
    block.only("caller", {"type": "direct"})
    arguments = json.dumps(given, ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _part(block: Fields, kind: str) -> dict[str, Any]:
    """A content part of the chat form; ``kind`` is the block's type, already taken."""
    if kind == "text":
        part = {"type": "text", "text": block.needed("text")}
        block.only("citations", [])
    elif kind == "image":
        part = {"type": "image_url", "image_url": {"url": _image(block)}}
    else:
        refuse(block.at("type"), f"blocks of type {kind!r:.60} cannot be carried to this model")
    _end(block)
    return part


def _text(block: Fields) -> dict[str, Any]:
    kind = block.needed("type")
    if kind != "text":
        refuse(block.at("type"), "must be 'text'")
    return _part(block, kind)


def _image(block: Fields) -> str:
    source = block.inner("source")
    if source is None:
        refuse(block.at("source"), "is required")
    kind = source.needed("type")
    if kind == "base64":
        url = f"data:{source.needed('media_type')};base64,{source.needed('data')}"
    elif kind == "url":
        url = source.needed("url")
    else:
        refuse(source.at("type"), f"images from {kind!r:.60} cannot be carried; use 'base64' or 'url'")
    source.done()
    return url


def _content(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """One text as a string, which every chat template takes; anything else part by part."""
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _tools(top: Fields) -> dict[str, Any]:
    body: dict[str, Any] = {}
    if (tools := top.objects("tools")) is not None:
        body["tools"] = [_tool(tool) for tool in tools]
    if (choice := top.inner("tool_choice")) is not None:
        kind = choice.needed("type")
        if kind == "tool":
            body["tool_choice"] = {"type": "function", "function": {"name": choice.needed("name")}}
        elif kind in _TOOL_CHOICES:
            body["tool_choice"] = _TOOL_CHOICES[kind]
        else:
            refuse(choice.at("type"), "must be 'auto', 'any', 'tool' or 'none'")
        if (alone := choice.flag("disable_parallel_tool_use")) is not None:
            body["parallel_tool_calls"] = not alone
        choice.done()
    return body


def _tool(tool: Fields) -> dict[str, Any]:
    kind = tool.text("type") or "custom"
    if kind != "custom":
        refuse(
            tool.at("type"), f"{kind!r:.60} runs on Anthropic's servers or is part of its models; only 'custom' here"
        )
    schema = tool.whole("input_schema")
    if schema is None:
        refuse(tool.at("input_schema"), "is required")
    function: dict[str, Any] = {"name": tool.needed("name"), "parameters": schema}
    if (description := tool.text("description")) is not None:
        function["description"] = description
    if (strict := tool.flag("strict")) is not None:
        function["strict"] = strict
    _end(tool)
    return {"type": "function", "function": function}


def _thinking(top: Fields) -> dict[str, Any]:
    options = top.whole("chat_template_kwargs") or {}
    body: dict[str, Any] = {}
    if (thinking := top.inner("thinking")) is not None:
        kind = thinking.needed("type")
        if kind not in ("enabled", "disabled", "adaptive"):
            refuse(thinking.at("type"), "must be 'enabled', 'disabled' or 'adaptive'")
        if kind != "adaptive":
            options = {"enable_thinking": kind == "enabled", **options}
        if kind == "enabled" and (budget := thinking.integer("budget_tokens")) is not None:
            body["thinking_token_budget"] = budget
        thinking.done()
    if options:
        body["chat_template_kwargs"] = options
    return body


def _output(top: Fields) -> dict[str, Any]:
    output = top.inner("output_config")
    if output is None:
        return {}
    body: dict[str, Any] = {}
    if (effort := output.text("effort")) is not None:
        body["reasoning_effort"] = effort
    if (form := output.inner("format")) is not None:
        if (kind := form.needed("type")) != "json_schema":
            refuse(form.at("type"), f"{kind!r:.60} cannot be carried; use 'json_schema'")
        schema = form.whole("schema")
        if schema is None:
            refuse(form.at("schema"), "is required")
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema, "strict": True},
        }
        form.done()
    output.done()
    return body


def _end(block: Fields) -> None:
    """Nothing is left of ``block`` but a hint about caching."""
    block.take("cache_control")
    block.done()
