"""OpenAI Chat Completions on the wire, as vLLM speaks it: the internal form itself.

Invariant: nothing is dropped in silence. What vLLM would ignore although it changes the answer is a 400 that names the
field; fields that nobody here knows travel on, for vLLM to judge.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from adapters.dialects.chat_answers import chunks_of, completion_of
from adapters.dialects.fields import Fields, check_depth, refuse
from adapters.dialects.forms import Answer, LLMRequest, to_json
from adapters.dialects.sse import COMMENT, DONE, encode_event
from swarm.errors import SwarmGatewayError

_DELIVERY = frozenset({"stream", "stream_options", "n"})
#: What vLLM knows nothing of, and the values that ask for nothing.
_NOT_VLLMS: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": (),
    "functions": (),
    "modalities": (["text"],),
    "moderation": (),
    "service_tier": ("auto", "default"),
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
        top.objects("tools")
        choices, stream, include_usage = delivery(top)
        sampling(top)
        for name, harmless in _NOT_VLLMS.items():
            if name in data:
                top.only(name, *harmless)
        return LLMRequest(
            model=top.text("model"),
            messages=messages,
            choices=choices,
            stream=stream,
            include_usage=include_usage,
            body=data,
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
    for message in messages:
        if not message.needed("role"):
            refuse(message.at("role"), "must not be empty")
    return [message.data for message in messages]
