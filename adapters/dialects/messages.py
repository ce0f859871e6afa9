"""Anthropic Messages on the wire: request to Chat Completions form, a chat answer back to a message or its events.

Invariant: nothing is dropped in silence that has a bearing on the answer. A field of the wrong type, or one without
which the answer would be another than the one asked for, is a 400 that names it; anything else that the chat form
cannot say is left out and noted. Not even noted are hints (``cache_control``: the engine caches prefixes by itself;
``service_tier``, labels).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from adapters.dialects.dialect import NamedEventStream
from adapters.dialects.fields import Fields, check_depth, refuse
from adapters.dialects.forms import LLMRequest
from adapters.dialects.message_answers import MessageEvents, error_body, message_of
from adapters.dialects.message_blocks import conversation_of
from adapters.dialects.sse import encode_named
from swarm.errors import SwarmGatewayError

#: Fields that the chat form has under the same name (``top_k`` and ``chat_template_kwargs`` are vLLM's).
_SAME = ("temperature", "top_p", "top_k")
#: What of a chat its prompt depends on.
_COUNTED = ("model", "messages", "tools", "chat_template_kwargs", "continue_final_message", "add_generation_prompt")
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_PING = encode_named("ping", {"type": "ping"})


class MessagesDialect:
    """``POST /v1/messages``; a stream is kept alive as Anthropic does it, by pings."""

    path = "/v1/messages"

    def parse(self, data: dict[str, Any]) -> LLMRequest:
        """The internal form of a request body.

        A conversation that ends with the assistant's words asks for their continuation, as in Anthropic's API.

        Raises:
            RequestError: a field is missing, of the wrong type, or nothing that can be carried; ``param`` names it.
        """
        body, top = self._body(data)
        if body.get("add_generation_prompt") is False and "continue_final_message" not in body:
            refuse(f"messages.{len(data['messages']) - 1}", "an assistant's turn can only be continued in its text")
        model, stream = top.text("model"), top.flag("stream") or False
        top.done()
        return LLMRequest.for_one_answer(body, model, stream, top.notes.told())

    def counted(self, data: dict[str, Any]) -> dict[str, Any]:
        """The ``/tokenize`` body by which vLLM counts the prompt of a ``/v1/messages/count_tokens`` request; it may
        end with any turn.

        Raises:
            RequestError: as of :meth:`parse`.
        """
        body, top = self._body({"max_tokens": 1, **data})
        if (model := top.text("model")) is not None:
            body["model"] = model
        return {name: body[name] for name in _COUNTED if name in body}

    def _body(self, data: dict[str, Any]) -> tuple[dict[str, Any], Fields]:
        """The chat body without model and delivery, and what is left of the request."""
        check_depth(data)
        top = Fields(data)
        max_tokens = top.integer("max_tokens")
        if max_tokens is None:
            refuse("max_tokens", "is required")
        messages = conversation_of(top).messages
        if len(messages) > 1 and messages[-1] == {"role": "assistant", "content": ""}:
            # nothing to be continued
            messages.pop()
        body: dict[str, Any] = {"messages": messages, "max_tokens": max_tokens}
        last = messages[-1]
        if last["role"] == "assistant":
            body["add_generation_prompt"] = False
            if last["content"] and not last.get("tool_calls"):
                body["continue_final_message"] = True
        for name in _SAME:
            if (value := top.number(name)) is not None:
                body[name] = value
        if (stop := top.take("stop_sequences")) is not None:
            if not isinstance(stop, list) or not all(isinstance(item, str) for item in cast("list[object]", stop)):
                refuse("stop_sequences", "must be a list of strings")
            body["stop"] = stop
        if (metadata := top.inner("metadata")) is not None and (user := metadata.text("user_id")) is not None:
            body["user"] = user
        body |= {**_tools(top), **_thinking(top), **_output(top)}
        top.only("container")
        top.only("mcp_servers", [])
        top.leave("context_management", "the conversation is taken as it is", {"edits": []})
        top.leave("speed", "there is one speed", "standard")
        top.drop("service_tier", "cache_control", "betas", "inference_geo")
        return body, top

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


def _tools(top: Fields) -> dict[str, Any]:
    tools: list[dict[str, Any]] = []
    left: list[str | None] = []
    for tool in top.objects("tools") or []:
        kind = tool.text("type") or "custom"
        if kind == "custom" or "input_schema" in tool.data:
            tools.append(_tool(tool))
        else:
            # it runs on Anthropic's servers, or is part of their models
            tool.note(f"{kind} is Anthropic's own tool")
            left.append(tool.text("name"))
    body: dict[str, Any] = {"tools": tools} if tools else {}
    choice = top.inner("tool_choice")
    if choice is None:
        return body
    kind, alone = choice.needed("type"), choice.flag("disable_parallel_tool_use")
    if kind == "tool":
        name = choice.needed("name")
        if name in left:
            refuse(choice.at("name"), f"{name!r:.60} is Anthropic's own tool and cannot be called by this model")
        chosen: Any = {"type": "function", "function": {"name": name}}
    elif kind in _TOOL_CHOICES:
        chosen = _TOOL_CHOICES[kind]
    else:
        refuse(choice.at("type"), "must be 'auto', 'any', 'tool' or 'none'")
    choice.done()
    if not tools:
        # vLLM refuses a choice among no tools
        if kind in ("any", "tool"):
            refuse(choice.at("type"), "there is no tool that this model could call")
        return body
    if alone is not None:
        body["parallel_tool_calls"] = not alone
    return {**body, "tool_choice": chosen}


def _tool(tool: Fields) -> dict[str, Any]:
    schema = tool.whole("input_schema")
    if schema is None:
        refuse(tool.at("input_schema"), "is required")
    function: dict[str, Any] = {"name": tool.needed("name"), "parameters": schema}
    if (description := tool.text("description")) is not None:
        function["description"] = description
    if (strict := tool.flag("strict")) is not None:
        function["strict"] = strict
    # every tool is there from the start, and its calls are streamed as they are written
    tool.drop("cache_control", "eager_input_streaming", "defer_loading")
    tool.leave("allowed_callers", "only the model calls tools", ["direct"])
    tool.done()
    return {"type": "function", "function": function}


def _thinking(top: Fields) -> dict[str, Any]:
    options = top.whole("chat_template_kwargs") or {}
    if (thinking := top.inner("thinking")) is not None:
        kind = thinking.needed("type")
        if kind not in ("enabled", "disabled", "adaptive"):
            refuse(thinking.at("type"), "must be 'enabled', 'disabled' or 'adaptive'")
        if kind != "adaptive":
            options = {"enable_thinking": kind == "enabled", **options}
        # vLLM refuses a budget where it runs without a reasoning parser
        thinking.leave("budget_tokens", "thinking is bounded by max_tokens alone")
        thinking.leave("display", "thinking is given whole", "summarized")
        thinking.done()
    return {"chat_template_kwargs": options} if options else {}


def _output(top: Fields) -> dict[str, Any]:
    output, form = top.inner("output_config"), top.inner("output_format")
    body: dict[str, Any] = {}
    if output is not None:
        if (effort := output.text("effort")) is not None:
            body["reasoning_effort"] = effort
        form = output.inner("format") or form
        output.done()
    if form is not None:
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
    return body
