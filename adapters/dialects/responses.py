"""OpenAI Responses on the wire: request to Chat Completions form, a chat answer back to a response or its events.

Invariant: nothing is dropped in silence. What the chat form cannot say is a 400 that names the field; accepted without
effect are only hints that change no answer (keys of prompt caches, ``encrypted_content``: reasoning travels in plain).
Nothing is stored here: a conversation comes whole with each request, or is put together before it comes here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from adapters.dialects.dialect import NamedEventStream
from adapters.dialects.fields import Fields, check_depth, objects, refuse
from adapters.dialects.forms import LLMRequest
from adapters.dialects.response_answers import ResponseEvents, response_of
from adapters.dialects.sse import COMMENT
from swarm.errors import CONTEXT_LENGTH, SwarmGatewayError

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_STATUSES = ("completed", "incomplete", "in_progress")

Message = dict[str, Any]


class ResponseStream(NamedEventStream):
    """The bytes of one streamed response."""

    def __init__(self, events: ResponseEvents) -> None:
        super().__init__(events, COMMENT)
        self._made = events

    @property
    def response(self) -> dict[str, Any]:
        """The whole response, once the stream has ended; empty before."""
        return self._made.response


class ResponsesDialect:
    """``POST /v1/responses``.

    Args:
        stored: whether responses are kept by who uses this: ``store`` is then theirs to see to, and so is
            ``previous_response_id``, whose items they have put into the ``input``.
    """

    path = "/v1/responses"

    def __init__(self, *, stored: bool = False) -> None:
        self._stored = stored

    def parse(self, data: dict[str, Any]) -> LLMRequest:
        """The internal form of a request body.

        Raises:
            RequestError: a field is missing, of the wrong type, or nothing that can be carried; ``param`` names it.
        """
        check_depth(data)
        top = Fields(data)
        previous, store = top.text("previous_response_id"), top.flag("store")
        if previous is not None and not self._stored:
            refuse("previous_response_id", "responses are not stored here; send the conversation's items as 'input'")
        if store and not self._stored:
            refuse("store", "responses are not stored here")
        model, stream = top.text("model"), top.flag("stream") or False
        messages = _messages(top)
        body: dict[str, Any] = {"messages": messages}
        for name in ("temperature", "top_p"):
            if (value := top.number(name)) is not None:
                body[name] = value
        if (limit := top.integer("max_output_tokens")) is not None:
            body["max_completion_tokens"] = limit
        if (user := top.text("user")) is not None:
            body["user"] = user
        if (template := top.whole("chat_template_kwargs")) is not None:
            body["chat_template_kwargs"] = template
        body |= {**_tools(top), **_text_format(top), **_reasoning(top)}
        if (parallel := top.flag("parallel_tool_calls")) is not None:
            body["parallel_tool_calls"] = parallel
        _without_effect(top)
        top.done()
        return LLMRequest.for_one_answer(body, model, stream)

    def answer(self, data: Mapping[str, Any], completion: Mapping[str, Any]) -> dict[str, Any]:
        """The response for a ``chat.completion``, the answer to request ``data``, whose settings it repeats.

        Raises:
            UpstreamError: it is no chat completion.
        """
        return response_of(data, completion)

    def events(self, data: Mapping[str, Any]) -> ResponseEvents:
        """Makes the events of a streamed answer to request ``data``."""
        return ResponseEvents(data)

    def stream(self, data: Mapping[str, Any]) -> ResponseStream:
        """Makes the bytes of a streamed answer to request ``data``."""
        return ResponseStream(self.events(data))

    def error(self, exc: SwarmGatewayError) -> dict[str, Any]:
        """The error body for ``exc``."""
        body = exc.body()
        return {"error": {**body["error"], "param": "input"}} if exc.code == CONTEXT_LENGTH else body


def _without_effect(top: Fields) -> None:
    """Take the fields that change no answer, and refuse those values of them that would."""
    top.whole("metadata")  # repeated in the response
    for hint in ("prompt_cache_key", "prompt_cache_retention", "safety_identifier"):
        top.text(hint)
    top.only("service_tier", "auto", "default")
    top.only("background", False)
    top.only("truncation", "disabled")
    top.only("top_logprobs", 0)
    for item in cast("list[object]", _list(top, "include")):
        if item != "reasoning.encrypted_content":
            refuse("include", f"{item!r:.60} cannot be given")
    if (options := top.inner("stream_options")) is not None:
        options.only("include_obfuscation", False)
        options.done()


def _list(top: Fields, name: str) -> list[Any]:
    value = top.take(name)
    if value is not None and not isinstance(value, list):
        refuse(top.at(name), "must be a list")
    return value or []


def _messages(top: Fields) -> list[Message]:
    instructions, given = top.text("instructions"), top.take("input")
    messages: list[Message] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
        return messages
    if not given:
        refuse("input", "must be a string or a list of at least one item")
    for item in objects(given, "input"):
        _add(messages, item)
    return messages


def _add(messages: list[Message], item: Fields) -> None:
    """Append ``item``; what the assistant gave in one turn, in the order in which it does, is one message."""
    kind = item.text("type") or "message"
    item.only("status", *_STATUSES)
    if kind == "message":
        _add_message(messages, item)
    elif kind == "reasoning":
        item.text("id")
        thought = _thought(item)
        messages.append({"role": "assistant", "content": None, "reasoning": thought})
    elif kind == "function_call":
        item.text("id")
        function = {"name": item.needed("name"), "arguments": item.needed("arguments")}
        call = {"id": item.needed("call_id"), "type": "function", "function": function}
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        item.text("id")
        content = _content(item, "output")
        messages.append({"role": "tool", "tool_call_id": item.needed("call_id"), "content": content})
    else:
        refuse(item.at("type"), f"items of type {kind!r:.60} cannot be carried to this model")
    item.done()


def _add_message(messages: list[Message], item: Fields) -> None:
    item.text("id")
    item.only("phase", "final_answer")
    role = item.needed("role")
    if role not in _ROLES:
        refuse(item.at("role"), "must be 'user', 'assistant', 'system' or 'developer'")
    message: Message = {"role": _ROLES[role], "content": _content(item, "content")}
    last = messages[-1] if messages else {}
    if role == "assistant" and last.keys() == {"role", "content", "reasoning"} and last["content"] is None:
        last["content"] = message["content"]
    elif message["role"] == last.get("role") == "system" and len(messages) == 1:
        # many chat templates take one message of the system, and only as the first
        last["content"] = [*_as_parts(last["content"]), *_as_parts(message["content"])]
    else:
        messages.append(message)


def _thought(item: Fields) -> str:
    """The text of a reasoning item as we gave it out."""
    item.only("encrypted_content", "")
    item.only("summary", [])
    texts: list[str] = []
    for part in item.objects("content") or []:
        if part.needed("type") != "reasoning_text":
            refuse(part.at("type"), "must be 'reasoning_text'")
        texts.append(part.needed("text"))
        part.done()
    return "".join(texts)


def _content(item: Fields, name: str) -> str | list[dict[str, Any]]:
    """Text as a string, which every chat template takes; anything else part by part."""
    value = item.take(name)
    if value is None:
        refuse(item.at(name), "is required")
    if isinstance(value, str):
        return value
    parts = [_part(part) for part in objects(value, item.at(name))]
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _as_parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _part(part: Fields) -> dict[str, Any]:
    kind = part.needed("type")
    if kind in ("input_text", "output_text", "text"):
        carried: dict[str, Any] = {"type": "text", "text": part.needed("text")}
        part.only("annotations", [])
        part.only("logprobs", [])
    elif kind == "input_image":
        if part.take("file_id") is not None:
            refuse(part.at("file_id"), "files are not stored here; use 'image_url'")
        image: dict[str, Any] = {"url": part.needed("image_url")}
        if (detail := part.text("detail")) is not None:
            image["detail"] = detail
        carried = {"type": "image_url", "image_url": image}
    else:
        refuse(part.at("type"), f"content of type {kind!r:.60} cannot be carried to this model")
    part.done()
    return carried


def _tools(top: Fields) -> dict[str, Any]:
    body: dict[str, Any] = {}
    if (tools := top.objects("tools")) is not None:
        body["tools"] = [_tool(tool) for tool in tools]
    choice = top.take("tool_choice")
    if isinstance(choice, str):
        if choice not in ("auto", "none", "required"):
            refuse("tool_choice", "must be 'auto', 'none', 'required' or a function")
        body["tool_choice"] = choice
    elif choice is not None:
        chosen = Fields(choice, "tool_choice")
        _function_only(chosen)
        body["tool_choice"] = {"type": "function", "function": {"name": chosen.needed("name")}}
        chosen.done()
    return body


def _tool(tool: Fields) -> dict[str, Any]:
    _function_only(tool)
    function: dict[str, Any] = {"name": tool.needed("name"), "parameters": tool.whole("parameters") or {}}
    if (description := tool.text("description")) is not None:
        function["description"] = description
    if (strict := tool.flag("strict")) is not None:
        function["strict"] = strict
    tool.done()
    return {"type": "function", "function": function}


def _function_only(tool: Fields) -> None:
    kind = tool.needed("type")
    if kind != "function":
        refuse(tool.at("type"), f"{kind!r:.60} runs on OpenAI's servers or is part of its models; only 'function' here")


def _text_format(top: Fields) -> dict[str, Any]:
    text = top.inner("text")
    if text is None:
        return {}
    body: dict[str, Any] = {}
    text.only("verbosity", "medium")
    if (form := text.inner("format")) is not None:
        kind = form.needed("type")
        if kind == "json_schema":
            schema: dict[str, Any] = {"name": form.needed("name"), "schema": form.whole("schema") or {}}
            if (description := form.text("description")) is not None:
                schema["description"] = description
            if (strict := form.flag("strict")) is not None:
                schema["strict"] = strict
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif kind in ("text", "json_object"):
            body["response_format"] = {"type": kind}
        else:
            refuse(form.at("type"), "must be 'text', 'json_schema' or 'json_object'")
        form.done()
    text.done()
    return body


def _reasoning(top: Fields) -> dict[str, Any]:
    reasoning = top.inner("reasoning")
    if reasoning is None:
        return {}
    effort = reasoning.text("effort")
    # a summary would be another text than the one the model wrote, which the answer has
    reasoning.done()
    return {} if effort is None else {"reasoning_effort": effort}
