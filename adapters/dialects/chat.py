"""OpenAI Chat Completions on the wire, as vLLM speaks it: the internal form itself.

Invariant: nothing is dropped in silence that has a bearing on the answer. What vLLM would ignore or refuse is left out
and noted where the answer can do without it, and is a 400 that names the field where it cannot. Fields that nobody here
knows travel on, for vLLM to judge.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from adapters.dialects.chat_answers import chunks_of, completion_of
from adapters.dialects.conversation import carried, unread
from adapters.dialects.dialect import Answer, LLMRequest, to_json
from adapters.dialects.fields import Fields, check_depth, refuse
from adapters.dialects.sse import COMMENT, DONE, encode_event
from swarm.errors import SwarmGatewayError

_DELIVERY = frozenset({"stream", "stream_options", "n"})
#: What vLLM knows nothing of although the answer would be in another form, and the values that ask for nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "modalities": (["text"],),
}
#: What vLLM ignores, and the values that ask for nothing.
_IGNORED: dict[str, tuple[Any, ...]] = {
    "moderation": (),
    "store": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}


class ChatDialect:
    """``POST /v1/chat/completions``."""

    path = "/v1/chat/completions"

    def parse(self, data: dict[str, Any]) -> LLMRequest:
        """The internal form of a request body.

        Raises:
            RequestError: a field is missing, of the wrong type, or nothing that vLLM would heed, which ``param`` names;
                or the body nests more than 100 levels deep.
        """
        check_depth(data)
        top = Fields(data)
        messages = _messages(top)
        changed = _tools(top)
        choices, stream, include_usage = delivery(top)
        sampling(top)
        for name, harmless in _REFUSED.items():
            top.only(name, *harmless)
        for name, harmless in _IGNORED.items():
            top.leave(name, "vLLM has no such setting", *harmless)
        if messages != data["messages"]:
            changed["messages"] = messages
        body = {name: value for name, value in {**data, **changed}.items() if value is not None} if changed else data
        return LLMRequest(
            model=top.text("model"),
            messages=messages,
            choices=choices,
            stream=stream,
            include_usage=include_usage,
            body=body,
            left_out=top.notes.told(),
        )

    def answer(self, data: Mapping[str, Any], completion: Mapping[str, Any]) -> dict[str, Any]:
        """The body of the answer: the completion itself."""
        return dict(completion)

    def stream(self, data: Mapping[str, Any]) -> ChatStream:
        """Makes the bytes of a streamed answer to request ``data``."""
        return ChatStream()

    def error(self, exc: SwarmGatewayError) -> dict[str, Any]:
        """The error body for ``exc``."""
        return exc.body()

    def sampling_body(self, body: dict[str, Any], model: str) -> bytes:
        """The JSON with which ``model`` samples one answer: ``body`` without what concerns the delivery of several.

        Raises:
            RequestError: it holds what JSON cannot say (NaN, lone surrogates).
        """
        return to_json({**{key: value for key, value in body.items() if key not in _DELIVERY}, "model": model})

    def completion(self, answers: Sequence[Answer], answer_id: str) -> dict[str, Any]:
        """See :func:`adapters.dialects.chat_answers.completion_of`."""
        return completion_of(answers, answer_id)

    def chunks(
        self, answers: Sequence[Answer], answer_id: str, *, include_usage: bool, last: dict[str, Any] | None = None
    ) -> Iterator[dict[str, Any]]:
        """See :func:`adapters.dialects.chat_answers.chunks_of`."""
        return chunks_of(answers, answer_id, include_usage=include_usage, last=last)


class ChatStream:
    """The bytes of a streamed chat completion: its chunks as they are."""

    keepalive = COMMENT

    def take(self, chunk: Mapping[str, Any]) -> bytes:
        return encode_event(chunk)

    def end(self) -> bytes:
        return DONE

    def fail(self, exc: SwarmGatewayError) -> bytes:
        return encode_event(exc.body())


def delivery(top: Fields) -> tuple[int, bool, bool]:
    """How many answers are asked for, whether as a stream, and whether that ends with the usage.

    Raises:
        RequestError: see :meth:`ChatDialect.parse`.
    """
    choices, stream, options = top.integer("n"), top.flag("stream") or False, top.inner("stream_options")
    if choices is not None and choices < 1:
        refuse(top.at("n"), "must be at least 1")
    if options is not None and not stream:
        refuse(top.at("stream_options"), "is only allowed when stream is true")
    include_usage = options is not None and options.flag("include_usage") is True
    return choices or 1, stream, include_usage


def sampling(top: Fields) -> None:
    """Take the numbers that tell how to sample; every other field is vLLM's to judge.

    Raises:
        RequestError: one is no number.
    """
    for name in ("temperature", "top_p"):
        top.number(name)
    for name in ("max_tokens", "max_completion_tokens", "seed"):
        top.integer(name)


def _messages(top: Fields) -> list[dict[str, Any]]:
    messages = top.objects("messages")
    if not messages:
        refuse(top.at("messages"), "must be a list of at least one message")
    return [_message(message) for message in messages]


def _message(message: Fields) -> dict[str, Any]:
    """A message as vLLM takes it; as it came, unless that is refused."""
    role, content, calls = message.needed("role"), message.take("content"), message.take("tool_calls")
    if not role:
        refuse(message.at("role"), "must not be empty")
    changed: dict[str, Any] = {}
    if content is None and role != "assistant":
        changed["content"] = ""
    elif isinstance(content, list):
        changed["content"] = [_part(message, part, k) for k, part in enumerate(cast("list[Any]", content))]
    if isinstance(calls, list):
        changed["tool_calls"] = [_call(call) for call in cast("list[Any]", calls)]
    return {**message.data, **changed}


def _part(message: Fields, part: Any, index: int) -> Any:
    match part:
        case {"type": "file", "file": dict(file)}:
            message.note("files are told in words only", f"content.{index}")
            name: object = cast("dict[str, Any]", file).get("filename")
            return unread("A file", name if isinstance(name, str) else None)
        case _:
            return part


def _call(call: Any) -> Any:
    """vLLM reads the arguments of a call that is given back, and fails where they are no JSON object."""
    match call:
        case {"function": {"arguments": str(arguments), **function}} if (fit := carried(arguments)) != arguments:
            return {**call, "function": {**function, "arguments": fit}}
        case _:
            return call


def _tools(top: Fields) -> dict[str, Any]:
    """Changes to ``tools`` and ``tool_choice``, ``None`` for what is left out: vLLM refuses tools other than functions,
    an empty list of them, and a choice among none."""
    given, choice = top.objects("tools"), top.take("tool_choice")
    tools = [tool.data for tool in given or () if tool.data.get("type", "function") != "custom"]
    for tool in given or ():
        if tool.data.get("type") == "custom":
            tool.note("custom tools are not carried")
    changed: dict[str, Any] = {}
    if given is not None and len(tools) < max(1, len(given)):
        changed["tools"] = tools or None
    if not tools and choice in ("auto", "none"):
        changed["tool_choice"] = None
    return changed
