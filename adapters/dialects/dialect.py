"""The internal form between dialects and gateway (one request, and its sampled answers), and what a dialect provides.

Invariant: fields that nobody here knows pass untouched, from the application to vLLM and back. Put together as the
dialect's own SDKs do, the bytes of a stream say exactly what the plain body says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import orjson

from adapters.dialects.sse import encode_named
from swarm.errors import RequestError, SwarmGatewayError, UpstreamError

#: leaves what JSON has no form for to the encoder that refuses it
_PLAIN = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_SUBCLASS
#: header of an answer: what of its request was left out
LEFT_OUT = "x-swarm-left-out"
_MOST_TOLD = 1000
_KNOWN_IN_BODY = frozenset({"id", "object", "created", "model", "choices", "usage"})
_KNOWN_IN_CHOICE = frozenset({"index", "message", "finish_reason", "logprobs"})


@dataclass(frozen=True, slots=True)
class LLMRequest:
    """What an application asked for, whatever its dialect.

    Attributes:
        model: the name the application gave, ``None`` when it left it out.
        messages: the conversation in Chat Completions form, oldest first; a raw prompt is one message of the user, and
            none where it is token ids.
        choices: how many answers it wants back (1 in most dialects).
        stream: whether the answer goes out as server-sent events.
        include_usage: whether a stream ends with a usage chunk.
        body: the whole request in Chat Completions form, unknown fields included; a raw prompt stands in it as
            ``prompt`` (a text, or token ids) in place of ``messages``.
        left_out: what of the request the body does not say, one short line of ASCII each.
    """

    model: str | None
    messages: list[dict[str, Any]]
    choices: int
    stream: bool
    include_usage: bool
    body: dict[str, Any]
    left_out: tuple[str, ...] = ()

    @classmethod
    def for_one_answer(
        cls, body: dict[str, Any], model: str | None, stream: bool, left_out: tuple[str, ...]
    ) -> LLMRequest:
        """The request of a dialect that knows one answer and always tells its usage; ``body`` is completed."""
        if model is not None:
            body["model"] = model
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        messages: list[dict[str, Any]] = body["messages"]
        return cls(
            model=model,
            messages=messages,
            choices=1,
            stream=stream,
            include_usage=stream,
            body=body,
            left_out=left_out,
        )

    @property
    def answer_headers(self) -> dict[str, str]:
        """Headers of its answer, which tell what was left out."""
        if not self.left_out:
            return {}
        told = "; ".join(self.left_out)
        return {LEFT_OUT: told if len(told) <= _MOST_TOLD else told[: _MOST_TOLD - 3] + "..."}


@dataclass(frozen=True, slots=True)
class Answer:
    """One sampled answer, as vLLM's Chat Completions route gave it.

    Attributes:
        model: name under which it was served.
        message: the assistant message: ``content``, ``tool_calls``, ``reasoning``, and whatever else came.
        finish_reason: ``stop``, ``length``, ``tool_calls``, ...
        usage: token counts of this answer alone.
        logprobs: the choice's log-probabilities when the application asked for them.
        choice_extra: fields of the choice that are none of the above (``stop_reason``, ``token_ids``, ...).
        body_extra: fields beside ``choices`` that are none of the above (``system_fingerprint``, ...).
    """

    model: str
    message: dict[str, Any]
    finish_reason: str
    usage: dict[str, Any] = field(default_factory=dict[str, Any])
    logprobs: dict[str, Any] | None = None
    choice_extra: dict[str, Any] = field(default_factory=dict[str, Any])
    body_extra: dict[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def from_completion(cls, body: object) -> Answer:
        """Read the first choice of a ``chat.completion`` body.

        Raises:
            UpstreamError: it has no such choice with a message and a finish reason.
        """
        match body:
            case {"choices": [choice, *_]}:
                whole = cast("dict[str, Any]", body)
                return cls._of(choice, str(whole.get("model", "")), whole.get("usage") or {}, _beside(whole))
            case _:
                raise _no_completion()

    @classmethod
    def from_choices(cls, body: object, tokens: Sequence[int]) -> list[Answer]:
        """Read all choices of a ``chat.completion`` body, in order of their index.

        Args:
            body: its usage is about all choices.
            tokens: how many completion tokens each choice has; the usage of each answer is its own.

        Raises:
            UpstreamError: it has another number of choices, or one without a message and a finish reason.
        """
        match body:
            case {"choices": [*choices]} if len(choices) == len(tokens):
                whole = cast("dict[str, Any]", body)
            case _:
                raise _no_completion()
        by_index = {index: choice for choice in choices if isinstance(choice, dict) for index in [choice.get("index")]}
        usage: dict[str, Any] = whole.get("usage") or {}
        prompt = usage.get("prompt_tokens") or 0
        model, beside = str(whole.get("model", "")), _beside(whole)
        return [
            cls._of(
                by_index.get(index),
                model,
                {**usage, "completion_tokens": count, "total_tokens": prompt + count},
                dict(beside),
            )
            for index, count in enumerate(tokens)
        ]

    @classmethod
    def _of(cls, choice: object, model: str, usage: dict[str, Any], beside: dict[str, Any]) -> Answer:
        match choice:
            case {"message": dict() as message, "finish_reason": str() as reason}:
                pass
            case _:
                raise _no_completion()
        fields = cast("dict[str, Any]", choice)
        return cls(
            model=model,
            message=cast("dict[str, Any]", message),
            finish_reason=reason,
            usage=usage,
            logprobs=fields.get("logprobs"),
            choice_extra={k: v for k, v in fields.items() if k not in _KNOWN_IN_CHOICE},
            body_extra=beside,
        )

    @property
    def text(self) -> str:
        """The content as text; empty for an answer that only calls tools."""
        content = self.message.get("content")
        return content if isinstance(content, str) else ""


def choices_of(completion: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The choices of a ``chat.completion``.

    Raises:
        UpstreamError: it has none, or one without a message.
    """
    choices: Any = completion.get("choices")
    if not isinstance(choices, list) or not choices:
        raise _no_completion()
    for choice in cast("list[Any]", choices):
        if not isinstance(choice, dict) or not isinstance(cast("dict[str, Any]", choice).get("message"), dict):
            raise _no_completion()
    return cast("list[dict[str, Any]]", choices)


def _beside(whole: Mapping[str, Any]) -> dict[str, Any]:
    """What a body tells that no part of an answer is made of."""
    return {name: value for name, value in whole.items() if name not in _KNOWN_IN_BODY}


def _no_completion() -> UpstreamError:
    return UpstreamError("the engine's answer is no chat completion", code="malformed_answer")


def to_json(body: dict[str, Any]) -> bytes:
    """``body`` as JSON for an upstream.

    Raises:
        RequestError: it holds what JSON or UTF-8 cannot say (NaN, lone surrogates).
    """
    try:
        quick = orjson.dumps(body, option=_PLAIN)
    except TypeError:
        quick = b"null"
    # it writes NaN as null
    if b"null" not in quick:
        return quick
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (ValueError, RecursionError) as exc:
        raise RequestError(f"the request cannot be sent on as JSON: {exc}", code="malformed_json") from exc


Body = dict[str, Any]


class EventStream(Protocol):
    """Makes the bytes of one streamed answer from the chunks of a chat completion."""

    @property
    def keepalive(self) -> bytes:
        """What may stand between two events, and before the first, without meaning anything."""
        ...

    def take(self, chunk: Mapping[str, Any]) -> bytes:
        """The events that a ``chat.completion.chunk`` brings; may be empty.

        Raises:
            UpstreamError: it makes no sense after those before it.
        """
        ...

    def end(self) -> bytes:
        """The last events of a stream that is whole.

        Raises:
            UpstreamError: no chunk told a finish reason.
        """
        ...

    def fail(self, exc: SwarmGatewayError) -> bytes:
        """The last events of a stream that cannot go on, be it before its first chunk."""
        ...


class Dialect(Protocol):
    """One wire format, translated without I/O; an instance serves any number of requests.

    Attributes:
        path: of its address, the same here, at the episodes' addresses and at an upstream.
    """

    path: str

    def parse(self, data: Body) -> LLMRequest:
        """The internal form of a request body.

        Raises:
            RequestError: a field is missing, of the wrong type, or nothing that can be carried; ``param`` names it.
        """
        ...

    def answer(self, data: Mapping[str, Any], completion: Mapping[str, Any]) -> Body:
        """The body for a ``chat.completion``, the answer to request ``data``.

        Raises:
            UpstreamError: it is no chat completion.
        """
        ...

    def stream(self, data: Mapping[str, Any]) -> EventStream:
        """Makes the events of a streamed answer to request ``data``."""
        ...

    def error(self, exc: SwarmGatewayError) -> Body:
        """The error body for ``exc``."""
        ...


class Events(Protocol):
    """Makes the events of one streamed answer; each names itself by its ``type``. As :class:`EventStream`."""

    def take(self, chunk: Mapping[str, Any]) -> list[Body]: ...

    def end(self) -> list[Body]: ...

    def fail(self, exc: SwarmGatewayError) -> list[Body]: ...


class NamedEventStream:
    """The event stream of a dialect whose events have names.

    Args:
        events: makes them.
        keepalive: see :class:`EventStream`.
    """

    def __init__(self, events: Events, keepalive: bytes) -> None:
        self._events = events
        self.keepalive = keepalive

    def take(self, chunk: Mapping[str, Any]) -> bytes:
        return _encoded(self._events.take(chunk))

    def end(self) -> bytes:
        return _encoded(self._events.end())

    def fail(self, exc: SwarmGatewayError) -> bytes:
        return _encoded(self._events.fail(exc))


def _encoded(events: list[Body]) -> bytes:
    return b"".join([encode_named(event["type"], event) for event in events])
