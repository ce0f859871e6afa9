"""Anthropic Messages on the wire: a request in Chat Completions form, and a chat answer as a message or its events.

Invariant: nothing that affects the answer is dropped silently. A field of the wrong type, or one whose absence would
change the answer, is a 400 that names it; anything else that the chat form cannot express is left out and noted. Hints
are not even noted (``cache_control``: the engine caches prefixes by itself; ``service_tier``, labels). Assembled as
Anthropic's SDKs do, the events give exactly the plain message; ``stop_reason`` and ``message_stop`` come only after the
whole answer was read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

from adapters.dialects.chat import ChatDialect
from adapters.dialects.chat_answers import AnswerPart, Step, Unfolding, parts_of
from adapters.dialects.conversation import as_object, carried
from adapters.dialects.dialect import Body, Dialect, EventStream, LLMRequest, SampledAnswer, choices_of, unreadable
from adapters.dialects.fields import Fields, check_depth, present, refuse, session_in
from adapters.dialects.jsons import to_json
from adapters.dialects.message_blocks import conversation_of
from adapters.dialects.sse import encode_named
from swarm.errors import CONTEXT_LENGTH, NotFoundError, SwarmGatewayError

#: Fields of the chat form on which the prompt depends.
_COUNTED = ("model", "messages", "tools", "chat_template_kwargs", "continue_final_message", "add_generation_prompt")
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_FINISH_REASONS = {"stop_sequence": "stop", **{reason: finish for finish, reason in _STOP_REASONS.items()}}
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
#: Counts of the usage by those of the chat form.
_CACHED = {"cache_read_input_tokens": "cached_tokens", "cache_creation_input_tokens": "created_cache_tokens"}
#: Clients that read a signature send thinking back only with one; ours proves nothing, and is not checked.
_SIGNATURE = "swarm-gateway"
#: In Anthropic's words, upon which its clients send the whole conversation.
_THREAD_NOT_FOUND = "thread_not_found"
#: The type of a part's deltas, and the field of each that has the text.
_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}
#: What an empty answer has, as vLLM's: programs read the first block.
_EMPTY = AnswerPart(0, "text")

Event = dict[str, Any]


class MessagesDialect(Dialect):
    """``POST /v1/messages``. A conversation that ends with an assistant's text asks for its continuation, as in
    Anthropic's API."""

    path = "/v1/messages"
    id_prefix = "msg_"
    id_header = "request-id"
    keepalives = (b"event: ping", b'data: {"type":"ping"', b'data: {"type": "ping"')
    translatable = True

    def owns(self, path: str, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        # Anthropic's SDKs name a version with each request, also for files and the like
        return super().owns(path, headers) or any(name == b"anthropic-version" for name, _ in headers)

    def parse(self, data: dict[str, Any]) -> LLMRequest:
        body, top = self._body(data)
        if body.get("add_generation_prompt") is False and "continue_final_message" not in body:
            refuse(f"messages.{len(data['messages']) - 1}", "an assistant's turn can only be continued in its text")
        model, stream = top.text("model"), top.flag("stream") or False
        top.done()
        call = LLMRequest.for_one_answer(body, model, stream, top.notes.lines())
        if stream:
            # a message begins with the tokens of its prompt
            body["stream_options"]["continuous_usage_stats"] = True
        return call

    def counted(self, data: dict[str, Any]) -> dict[str, Any]:
        """The ``/tokenize`` body with which vLLM counts the prompt of a ``/v1/messages/count_tokens`` request, which
        may end with any turn; raises as :meth:`parse`."""
        body, top = self._body({"max_tokens": 1, **data})
        body |= present(model=top.text("model"))
        return {name: body[name] for name in _COUNTED if name in body}

    def _body(self, data: dict[str, Any]) -> tuple[dict[str, Any], Fields]:
        """The chat body without model and delivery, and the fields that are left."""
        check_depth(data)
        top = Fields(data)
        _thread(top)
        max_tokens = top.needed("max_tokens", top.integer("max_tokens"))
        messages = conversation_of(top).messages
        if len(messages) > 1 and messages[-1] == {"role": "assistant", "content": ""}:
            # there is nothing to continue
            messages.pop()
        body: dict[str, Any] = {"messages": messages, "max_tokens": max_tokens}
        last = messages[-1]
        if last["role"] == "assistant":
            body["add_generation_prompt"] = False
            if last["content"] and not last.get("tool_calls"):
                body["continue_final_message"] = True
        stop, metadata = top.take("stop_sequences"), top.inner("metadata")
        if stop is not None and not (
            isinstance(stop, list) and all(isinstance(item, str) for item in cast("list[object]", stop))
        ):
            refuse("stop_sequences", "must be a list of strings")
        body |= present(
            temperature=top.number("temperature"),
            top_p=top.number("top_p"),
            top_k=top.number("top_k"),
            cache_salt=top.text("cache_salt"),
            stop=stop,
            user=None if metadata is None else metadata.text("user_id"),
            metadata=None if metadata is None else session_in(metadata.data),
        )
        body |= {**_tools(top), **_thinking(top), **_output(top)}
        top.only("compaction")
        top.only("container")
        top.only("mcp_servers", [])
        top.leave("context_management", "the conversation is taken as it is", {"edits": []})
        top.leave("speed", "there is one speed", "standard")
        top.drop("service_tier", "cache_control", "betas", "inference_geo")
        return body, top

    def answer(self, data: Mapping[str, Any], completion: Mapping[str, Any]) -> dict[str, Any]:
        choice = choices_of(completion)[0]
        parts = parts_of(choice["message"])
        stop = _stop(choice.get("finish_reason"), choice.get("stop_reason"), parts)
        usage = _usage(completion.get("usage") or {})
        content = [_block(part) for part in parts or [_EMPTY]]
        return _envelope(completion) | {"content": content, **stop, "usage": usage}

    def stream(self, data: Mapping[str, Any]) -> MessageStream:
        return MessageStream()

    def foreign(self, raw: bytes) -> bytes:
        """Without our thinking: Anthropic refuses what it did not sign, and with it the conversation, for good."""
        if _SIGNATURE.encode() not in raw:
            return raw
        data = cast("Body", json.loads(raw))
        turns: list[Body] = []
        for turn in data["messages"]:
            content = turn["content"]
            left = (
                [block for block in content if block.get("signature") != _SIGNATURE]
                if type(content) is list
                else content
            )
            if left or not content:
                turns.append({**turn, "content": left})
        return to_json({**data, "messages": turns})

    def read(self, body: Body) -> SampledAnswer:
        stop = body.get("stop_reason")
        if not stop:
            raise unreadable("it has no stop_reason")
        if stop == "pause_turn":
            raise unreadable("it pauses, and goes on when it is sent back")
        user: Body = {"role": "user", "content": "."}
        # a turn of the user follows, for a last one of the assistant would be continued
        turns = [user, {"role": "assistant", "content": body["content"]}, user]
        request = self.parse({"model": "any", "max_tokens": 1, "messages": turns})
        return SampledAnswer.from_turns(body, request.messages, _FINISH_REASONS.get(stop) or str(stop))

    def read_stream(self, events: Iterable[Body]) -> SampledAnswer:
        return self.read(_message_of(events))

    def error(self, exc: SwarmGatewayError) -> dict[str, Any]:
        """In Anthropic's shape; our ``code`` and ``param`` stay, for programs."""
        error: dict[str, Any] = exc.body()["error"]
        if exc.code == CONTEXT_LENGTH:
            error = {**error, "message": _too_long(error)}
        if exc.code == _THREAD_NOT_FOUND:
            error = {**error, "details": {"error_code": exc.code}}
        default = "invalid_request_error" if exc.status < 500 else "api_error"
        return {"type": "error", "error": {**error, "type": _ERROR_TYPES.get(exc.status, default)}}


class MessageStream(EventStream):
    """Events named by their ``type``; pings keep the stream alive, as Anthropic's do."""

    keepalive = encode_named([{"type": "ping"}])

    def __init__(self) -> None:
        self._unfolding = Unfolding()
        self._foreseen: Mapping[str, Any] | None = None
        self._begun = False

    def foresee(self, usage: Mapping[str, Any]) -> None:
        self._foreseen = usage

    def take(self, chunk: Mapping[str, Any]) -> bytes:
        events: list[Event] = []
        # Azure's first chunk has no choices, no id and no model
        if not self._begun and chunk.get("choices"):
            self._begun = True
            message = _envelope(chunk) | {"content": [], "stop_reason": None, "stop_sequence": None}
            # an upstream may send the usage at the end; ``message_delta`` has it
            message["usage"] = _usage(self._foreseen or chunk.get("usage") or {}) | {"output_tokens": 0}
            events += [{"type": "message_start", "message": message}, {"type": "ping"}]
        return encode_named(
            [*events, *(event for step in self._unfolding.take(chunk) for event in self._step_events(step))]
        )

    def _step_events(self, step: Step) -> list[Event]:
        """Of an answer that is whole, arguments go out as the plain message has them: SDKs fail at what is no JSON."""
        part = step.part
        if self._foreseen is None or part.kind != "call" or step.what == "open":
            return _events(step)
        if step.what == "more":
            return []
        arguments = carried(part.text)
        return [*(_events(Step("more", part, arguments)) if arguments else ()), *_events(step)]

    def end(self) -> bytes:
        seen = self._unfolding
        stop = _stop(seen.end(), seen.stop_reason, seen.parts)
        empty = [] if seen.parts else [*_events(Step("open", _EMPTY)), *_events(Step("close", _EMPTY))]
        delta = {"type": "message_delta", "delta": stop, "usage": _usage(seen.usage)}
        return encode_named([*empty, delta, {"type": "message_stop"}])

    def fail(self, exc: SwarmGatewayError) -> bytes:
        return encode_named([MessagesDialect().error(exc)])


def _message_of(events: Iterable[Event]) -> Body:
    """The plain message that the events of a whole stream say."""
    message: Body = {"content": []}
    blocks: dict[int, Body] = {}
    ended = False
    for event in events:
        match event:
            case {"type": "message_start", "message": head}:
                message |= cast("Body", head)
            case {"type": "content_block_start", "index": index, "content_block": block}:
                blocks[index] = dict(cast("Body", block))
            case {"type": "content_block_delta", "index": index, "delta": delta}:
                for kind, name in _DELTAS.values():
                    if (more := cast("Body", delta)).get("type") == kind:
                        blocks[index][name] = blocks[index].get(name, "") + more[name]
            case {"type": "message_delta", "delta": delta}:
                usage = {**(message.get("usage") or {}), **(event.get("usage") or {})}
                message |= {**cast("Body", delta), "usage": usage}
            case {"type": "message_stop"}:
                ended = True
            case _:
                pass
    if not ended:
        raise unreadable("the stream broke off")
    content = [blocks[index] for index in sorted(blocks)]
    for block in content:
        if (written := block.pop("partial_json", None)) is not None:
            block["input"] = json.loads(written or "{}")
    return {**message, "content": content}


def _thread(top: Fields) -> None:
    """A conversation that the server would keep comes whole at first, and later without what was said before.

    Raises:
        NotFoundError: it comes without.
    """
    thread = top.inner("thread")
    if thread is not None and thread.data.get("type") != "create":
        message = "no conversation is kept here; send it whole, with system and tools"
        raise NotFoundError(f"thread: {message}", code=_THREAD_NOT_FOUND, param="thread")


def _tools(top: Fields) -> dict[str, Any]:
    tools: list[dict[str, Any]] = []
    left: list[str | None] = []
    for tool in _offered(top):
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
    kind, alone = choice.required("type"), choice.flag("disable_parallel_tool_use")
    if kind == "tool":
        name = choice.required("name")
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
    return {**body, **present(parallel_tool_calls=None if alone is None else not alone), "tool_choice": chosen}


def _offered(top: Fields) -> list[Fields]:
    """The tools of a request, as blocks of its messages add, replace and remove them."""
    declared = top.objects("tools") or []
    added: dict[str, Fields] = {}
    removed: set[str] = set()
    for turn in Fields(top.data, notes=top.notes).objects("messages") or []:
        content: Any = turn.data.get("content")
        for block in turn.listed(content, "content") if isinstance(content, list) else ():
            match block.data:
                case {"type": "tool_addition", "tool": {"definition": {"name": str(name)} as definition}}:
                    added[name] = Fields(cast("object", definition), block.at("tool.definition"), top.notes)
                    removed.discard(name)
                case {"type": "tool_addition", "tool": {"type": "tool_reference", "name": str(name)}}:
                    removed.discard(name)
                case {"type": "tool_removal", "tool": {"type": "tool_reference", "name": str(name)}}:
                    removed.add(name)
                case _:
                    pass
    gone = removed | added.keys()
    kept = [tool for tool in declared if str(tool.data.get("name")) not in gone]
    return [*kept, *(tool for name, tool in added.items() if name not in removed)]


def _tool(tool: Fields) -> dict[str, Any]:
    function = {"name": tool.required("name"), "parameters": tool.schema("input_schema")}
    function |= present(description=tool.text("description"), strict=tool.flag("strict"))
    # all tools are available from the start, and their calls are streamed while they are written
    tool.drop("cache_control", "eager_input_streaming", "defer_loading")
    tool.leave("allowed_callers", "only the model calls tools", ["direct"])
    tool.done()
    return {"type": "function", "function": function}


def _thinking(top: Fields) -> dict[str, Any]:
    options = top.whole("chat_template_kwargs") or {}
    if (thinking := top.inner("thinking")) is not None:
        kind = thinking.required("type")
        if kind == "between_tools":
            thinking.note("the model thinks where it likes", "type")
        elif kind not in ("enabled", "disabled", "adaptive"):
            refuse(thinking.at("type"), "must be 'enabled', 'disabled', 'adaptive' or 'between_tools'")
        elif kind != "adaptive":
            options = {"enable_thinking": kind == "enabled", **options}
        # vLLM refuses a budget if it runs without a reasoning parser
        thinking.leave("budget_tokens", "only max_tokens bounds thinking")
        thinking.leave("display", "thinking is given whole", "summarized")
        thinking.done()
    return {"chat_template_kwargs": options} if options else {}


def _output(top: Fields) -> dict[str, Any]:
    output, form = top.inner("output_config"), top.inner("output_format")
    body: dict[str, Any] = {}
    if output is not None:
        body |= present(reasoning_effort=output.text("effort"))
        form = output.inner("format") or form
        output.done()
    if form is not None:
        if (kind := form.required("type")) != "json_schema":
            refuse(form.at("type"), f"{kind!r:.60} cannot be carried; use 'json_schema'")
        schema = {"name": "answer", "schema": form.schema("schema"), "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
        form.done()
    return body


def _too_long(error: Mapping[str, Any]) -> str:
    """The message begins with the words by which Anthropic's clients decide to compact the conversation or to ask for a
    shorter answer."""
    prompt, answer, limit = (error.get(name) for name in ("prompt_tokens", "max_tokens", "max_model_len"))
    if not prompt or not limit:
        return f"prompt is too long. {error.get('message')}"
    if answer:
        return (
            f"input length and `max_tokens` exceed context limit: {prompt} + {answer} > {limit}, decrease input length "
            f"or `max_tokens` and try again. {error.get('message')}"
        )
    # a prompt that leaves no room for one token of an answer is too long, too
    return f"prompt is too long: {max(prompt, limit + 1)} tokens > {limit} maximum. {error.get('message')}"


def _envelope(head: Mapping[str, Any]) -> dict[str, Any]:
    answer_id = MessagesDialect.id_prefix + str(head.get("id") or "").removeprefix(ChatDialect.id_prefix)
    return {"id": answer_id, "type": "message", "role": "assistant", "model": head.get("model")}


def _events(step: Step) -> list[Event]:
    part = step.part
    if step.what == "open":
        # the part may have more pieces by now
        empty = replace(part, pieces=[])
        unsigned = {"signature": ""} if part.kind == "reasoning" else {}
        return [{"type": "content_block_start", "index": part.index, "content_block": _block(empty) | unsigned}]
    if step.what == "close":
        stop: Event = {"type": "content_block_stop", "index": part.index}
        if part.kind != "reasoning":
            return [stop]
        signed = {"type": "signature_delta", "signature": _SIGNATURE}
        return [{"type": "content_block_delta", "index": part.index, "delta": signed}, stop]
    kind, name = _DELTAS[part.kind]
    return [{"type": "content_block_delta", "index": part.index, "delta": {"type": kind, name: step.text}}]


def _block(part: AnswerPart) -> dict[str, Any]:
    match part.kind:
        case "reasoning":
            return {"type": "thinking", "thinking": part.text, "signature": _SIGNATURE}
        case "text":
            return {"type": "text", "text": part.text}
        case "call":
            return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": as_object(part.text)}


def _stop(finish: object, stop: object, parts: list[AnswerPart]) -> dict[str, Any]:
    """``stop_reason`` and ``stop_sequence``; vLLM's ``stop_reason`` is the string at which it stopped."""
    sequence = stop if isinstance(stop, str) and finish == "stop" else None
    if sequence is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": sequence}
    # after a forced call vLLM's finish reason is "stop"
    if finish == "stop" and any(part.kind == "call" for part in parts):
        finish = "tool_calls"
    return {"stop_reason": _STOP_REASONS.get(str(finish), finish), "stop_sequence": None}


def _usage(usage: Mapping[str, Any]) -> dict[str, int]:
    """Anthropic counts tokens that the cache had, and those that it has now, separately, vLLM within the prompt."""
    details: Mapping[str, int | None] = usage.get("prompt_tokens_details") or {}
    counts = {name: count for name, of in _CACHED.items() if (count := details.get(of)) is not None}
    prompt: int = usage.get("prompt_tokens") or 0
    rest = max(0, prompt - sum(counts.values()))
    return {"input_tokens": rest, "output_tokens": usage.get("completion_tokens") or 0, **counts}
