"""The internal form between dialects and gateway (one request, and its sampled answers), and what a dialect provides.

Invariant: unknown fields pass unchanged, from the application to vLLM and back. Assembled as the dialect's SDKs do, a
stream says exactly what the plain body says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from adapters.dialects.sse import COMMENT, DONE, encode_event
from swarm.errors import SwarmGatewayError, UpstreamError

Body = dict[str, Any]

#: Response header that lists what was left out of the request.
_LEFT_OUT = "x-swarm-left-out"
_LONGEST_HEADER = 1000
#: Of the usage: how many of the tokens are reasoning, and the like, of all answers of a call together.
DETAILS = "completion_tokens_details"
#: Fields of a body, or of a chunk, that every one has.
KNOWN_IN_BODY = frozenset({"id", "object", "created", "model", "choices", "usage"})
_KNOWN_IN_CHOICE = frozenset({"index", "message", "finish_reason", "logprobs"})


@dataclass(frozen=True, slots=True)
class LLMRequest:
    """A request of an application, whatever its dialect.

    Attributes:
        model: the name that the application gave, if any.
        messages: the conversation in Chat Completions form, oldest first. A raw prompt is one user message, or none if
            it is token ids.
        choices: how many answers it wants (1 in most dialects).
        stream: whether the answer goes out as server-sent events.
        include_usage: whether a stream ends with a usage chunk.
        body: the whole request in Chat Completions form, unknown fields included; a raw prompt is in ``prompt`` (a
            text, or token ids) instead of ``messages``.
        left_out: what of the request is not in ``body``, one short line of ASCII each.
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
        """The request of a dialect with one answer, whose streams always have usage; ``body`` is completed."""
        if model is not None:
            body["model"] = model
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return cls(model, body["messages"], 1, stream, stream, body, left_out)


def left_out_header(lines: Iterable[str]) -> dict[str, str]:
    """The header of an answer that lists what was left out of its request; none without ``lines``."""
    line = "; ".join(lines)
    if not line:
        return {}
    return {_LEFT_OUT: line if len(line) <= _LONGEST_HEADER else line[: _LONGEST_HEADER - 3] + "..."}


@dataclass(frozen=True, slots=True)
class SampledAnswer:
    """One sampled answer from vLLM's Chat Completions route.

    Attributes:
        model: the name under which it was served.
        message: the assistant message: ``content``, ``tool_calls``, ``reasoning``, and other fields.
        finish_reason: ``stop``, ``length``, ``tool_calls``, ...
        usage: token counts of this answer alone.
        logprobs: the choice's log-probabilities if the application asked for them.
        choice_extra: other fields of the choice (``stop_reason``, ``token_ids``, ...).
        body_extra: other fields beside ``choices`` (``system_fingerprint``, ...).
    """

    model: str
    message: dict[str, Any]
    finish_reason: str
    usage: dict[str, Any] = field(default_factory=dict[str, Any])
    logprobs: dict[str, Any] | None = None
    choice_extra: dict[str, Any] = field(default_factory=dict[str, Any])
    body_extra: dict[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def from_completion(cls, body: object) -> SampledAnswer:
        """The first choice of a ``chat.completion`` body.

        Raises:
            UpstreamError: it has no choice with a message and a finish reason.
        """
        choices, whole = choices_of(body), cast("Body", body)
        return cls._of(choices[0], whole, whole.get("usage") or {})

    @classmethod
    def from_choices(cls, body: object, tokens: Sequence[int]) -> list[SampledAnswer]:
        """All choices of a ``chat.completion`` body, in order of their index.

        Args:
            body: its usage is about all choices.
            tokens: how many completion tokens each choice has; each answer gets its own usage.

        Raises:
            UpstreamError: the number of choices is another one, or a choice lacks a message or a finish reason.
        """
        choices, whole = choices_of(body), cast("Body", body)
        if len(choices) != len(tokens):
            raise _no_completion()
        by_index = {choice.get("index"): choice for choice in choices}
        usage: dict[str, Any] = whole.get("usage") or {}
        if len(choices) > 1:
            # of whose tokens it tells is not known
            usage = {name: value for name, value in usage.items() if name != DETAILS}
        prompt = usage.get("prompt_tokens") or 0
        own = ({**usage, "completion_tokens": count, "total_tokens": prompt + count} for count in tokens)
        return [cls._of(by_index.get(index), whole, counts) for index, counts in enumerate(own)]

    @classmethod
    def from_turns(cls, body: Body, turns: Iterable[Body], finish_reason: str) -> SampledAnswer:
        """The answer ``body`` of a format that counts input and output tokens: what it says is among ``turns``, in the
        chat form."""
        usage = body.get("usage") or {}
        prompt, completion = (int(usage.get(name) or 0) for name in ("input_tokens", "output_tokens"))
        return cls(
            model=str(body.get("model") or ""),
            message=next((turn for turn in turns if turn["role"] == "assistant"), {"role": "assistant", "content": ""}),
            finish_reason=finish_reason,
            usage={"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion},
        )

    @classmethod
    def _of(cls, choice: dict[str, Any] | None, whole: Body, usage: dict[str, Any]) -> SampledAnswer:
        reason = None if choice is None else choice.get("finish_reason")
        if choice is None or not isinstance(reason, str):
            raise _no_completion()
        return cls(
            model=str(whole.get("model", "")),
            message=choice["message"],
            finish_reason=reason,
            usage=usage,
            logprobs=choice.get("logprobs"),
            choice_extra={k: v for k, v in choice.items() if k not in _KNOWN_IN_CHOICE},
            body_extra={k: v for k, v in whole.items() if k not in KNOWN_IN_BODY},
        )

    @property
    def text(self) -> str:
        """The content as text; empty for an answer that only calls tools."""
        return text_of(self.message)


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message's content: a string, or the text parts of a list."""
    content: Any = message.get("content")
    parts = cast("list[Any]", content) if isinstance(content, list) else [{"text": content}]
    return "".join(part["text"] for part in parts if is_text(part))


def is_text(part: object) -> bool:
    """Whether a part of a message's content is text."""
    return isinstance(part, dict) and isinstance(cast("dict[str, Any]", part).get("text"), str)


def choices_of(completion: object) -> list[dict[str, Any]]:
    """The choices of a ``chat.completion``, each with a message; at least one.

    Raises:
        UpstreamError: it is no chat completion.
    """
    choices: Any = cast("Body", completion).get("choices") if isinstance(completion, dict) else None
    if not isinstance(choices, list) or not choices:
        raise _no_completion()
    for choice in cast("list[Any]", choices):
        if not isinstance(choice, dict) or not isinstance(cast("dict[str, Any]", choice).get("message"), dict):
            raise _no_completion()
    return cast("list[dict[str, Any]]", choices)


def unreadable(why: str) -> UpstreamError:
    """The error of an answer of another server that is malformed, or not whole."""
    return UpstreamError(f"the answer cannot be read: {why}", code="malformed_answer")


def _no_completion() -> UpstreamError:
    return UpstreamError("the engine's answer is no chat completion", code="malformed_answer")


class EventStream:
    """Makes the bytes of one streamed answer from the chunks of a chat completion; by itself, these as they are.

    Attributes:
        keepalive: bytes without meaning that may go out before the first event and between two events.
    """

    keepalive: bytes = COMMENT

    def foresee(self, usage: Mapping[str, Any]) -> None:
        """Of an answer that is whole: its usage, before its first chunk."""

    def take(self, chunk: Mapping[str, Any]) -> bytes:
        """The events for a ``chat.completion.chunk``; may be empty.

        Raises:
            UpstreamError: it does not fit the chunks before it.
        """
        return encode_event(chunk)

    def end(self) -> bytes:
        """The last events of a complete stream.

        Raises:
            UpstreamError: no chunk had a finish reason.
        """
        return DONE

    def fail(self, exc: SwarmGatewayError) -> bytes:
        """The last events of a stream that cannot go on, at any time."""
        return encode_event(exc.body())


class Dialect(Protocol):
    """One wire format, translated without I/O; an instance serves any number of requests. All that the product knows of
    a format stands in its class; :data:`adapters.dialects.DIALECTS` lists the formats.

    Attributes:
        path: of its endpoint, the same here, at the episodes' addresses and at an upstream.
        id_prefix: the beginning of its answers' ids.
        id_header: response header in which its SDKs look for the request's id, beside ``x-request-id``.
        keepalives: what the keep-alives of its streams begin with, ours and an upstream's.
        translatable: whether an upstream that lacks the format is asked in the chat form.
        spelled: fields of the chat form that have another name here.
    """

    path: str
    id_prefix: str
    id_header: str | None = None
    keepalives: tuple[bytes, ...] = (b":",)
    translatable: bool = False
    spelled: Mapping[str, str] = {}

    def owns(self, path: str, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether SDKs of the format send a request, by its path and its headers as ASGI has them."""
        return path.startswith(self.path)

    def parse(self, data: Body) -> LLMRequest:
        """The internal form of a request body.

        Raises:
            RequestError: a field is missing, has the wrong type, or cannot be carried to the model (``param`` names
                it); or the body nests more than 100 levels deep.
        """
        ...

    def notes_of(self, left_out: Iterable[tuple[str, str]]) -> list[str]:
        """Lines like those of :attr:`LLMRequest.left_out`, from fields of the chat form with their reasons."""
        return [f"{self.spelled.get(name, name)}: {reason}" for name, reason in left_out]

    def answer(self, data: Mapping[str, Any], completion: Mapping[str, Any]) -> Body:
        """The body of the answer to request ``data``, from a ``chat.completion``.

        Raises:
            UpstreamError: it is no chat completion.
        """
        ...

    def stream(self, data: Mapping[str, Any]) -> EventStream:
        """Makes the events of a streamed answer to request ``data``."""
        ...

    def foreign(self, raw: bytes) -> bytes:
        """The body of a request, which :meth:`parse` took, for another server of the format: without what our answers
        have alone."""
        return raw

    def read(self, body: Body) -> SampledAnswer:
        """The first choice of another server's whole answer; :func:`adapters.dialects.answer_in` translates what this
        raises for a malformed one.

        Raises:
            UpstreamError: it has no end.
        """
        ...

    def read_stream(self, events: Iterable[Body]) -> SampledAnswer:
        """The same of the events of a stream."""
        ...

    def error(self, exc: SwarmGatewayError) -> Body:
        """The error body for ``exc``."""
        return exc.body()
