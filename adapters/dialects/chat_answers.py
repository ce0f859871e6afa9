"""Sampled answers as Chat Completions (one body, or the chunks of a stream), as the parts that other dialects need, and
put together again from chunks.

Invariant: joined together, the deltas of a stream say exactly what the plain body says, field by field. However a
stream is cut into chunks, its parts (reasoning, text, tool calls) say what the whole message says, in the model's
order; a whole message has each kind once, in that order.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from adapters.dialects.dialect import DETAILS, KNOWN_IN_BODY, SampledAnswer, text_of
from swarm.errors import UpstreamError

Chunk = dict[str, Any]
Kind = Literal["reasoning", "text", "call"]

#: Fields of a delta and of a tool call whose parts are joined; of any other field the last value stands.
_JOINED = frozenset({"content", "reasoning_content", "reasoning", "refusal", "arguments"})
_KNOWN_IN_CHOICE = frozenset({"index", "delta", "finish_reason", "logprobs"})


@dataclass
class AnswerPart:
    """One part of an answer that may still grow.

    Attributes:
        index: its position in the answer.
        call_id, name: of a tool call; empty otherwise.
    """

    index: int
    kind: Kind
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list[str])

    @property
    def text(self) -> str:
        """The text, or the arguments of a call as the model wrote them."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Step:
    """An event of a part: it opens, continues with ``text``, or is complete."""

    what: Literal["open", "more", "close"]
    part: AnswerPart
    text: str = ""


def parts_of(message: Mapping[str, Any]) -> list[AnswerPart]:
    """The parts of a whole assistant message."""
    unfolding = Unfolding()
    unfolding.take_delta(
        {**message, "tool_calls": [{**call, "index": k} for k, call in enumerate(message.get("tool_calls") or [])]}
    )
    unfolding.close()
    return unfolding.parts


class Unfolding:
    """Follows one choice of a stream.

    Attributes:
        finish_reason, stop_reason: of the choice, once it has ended.
        usage: once a chunk had it.
    """

    def __init__(self) -> None:
        self.parts: list[AnswerPart] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.usage: dict[str, Any] = {}
        self._open: AnswerPart | None = None
        #: index and id of the open call, as its server says them
        self._call: int | None = None
        self._call_id = ""
        #: what came while a call was open, which may go on: vLLM's parsers send the text between two calls late
        self._waiting: list[tuple[Kind, str]] = []

    def take(self, chunk: Mapping[str, Any]) -> list[Step]:
        """The steps of a ``chat.completion.chunk``; the finish reason closes the open part.

        Raises:
            UpstreamError: it continues a tool call that was closed, or begins one without a name.
        """
        if chunk.get("usage"):
            self.usage = chunk["usage"]
        steps: list[Step] = []
        for choice in cast("Sequence[dict[str, Any]]", chunk.get("choices") or ()):
            steps += self.take_delta(choice.get("delta") or {})
            # some servers give an empty one with each chunk
            if choice.get("finish_reason"):
                self.finish_reason = choice["finish_reason"]
                self.stop_reason = choice.get("stop_reason")
                steps += self.close()
        return steps

    def take_delta(self, delta: Mapping[str, Any]) -> list[Step]:
        """The steps of the delta of a choice."""
        steps: list[Step] = []
        # vLLM's current name and its former one; it may send both, with the same text
        self._add(steps, "reasoning", delta.get("reasoning") or delta.get("reasoning_content"))
        # some servers give a text in parts
        self._add(steps, "text", text_of(delta))
        self._add(steps, "text", delta.get("refusal"))
        for call in cast("Sequence[dict[str, Any]]", delta.get("tool_calls") or ()):
            self._add_call(steps, call)
        return steps

    def end(self) -> str:
        """The finish reason of a stream that is over.

        Raises:
            UpstreamError: no chunk had one.
        """
        if self.finish_reason is None:
            raise UpstreamError("the engine's stream has no end", code="malformed_answer")
        return self.finish_reason

    def close(self) -> list[Step]:
        """Close the open part, and after a call what came meanwhile."""
        if (part := self._open) is None:
            return []
        waiting, self._open, self._call, self._waiting = self._waiting, None, None, []
        steps = [Step("close", part)]
        for kind, text in waiting:
            self._add(steps, kind, text)
        return [*steps, *self.close()]

    def _add(self, steps: list[Step], kind: Kind, text: object) -> None:
        if not isinstance(text, str) or not text:
            return
        part = self._open
        if part is not None and part.kind == "call":
            self._waiting.append((kind, text))
            return
        if part is None or part.kind != kind:
            part = self._begin(steps, kind)
        self._more(steps, part, text)

    def _add_call(self, steps: list[Step], call: Mapping[str, Any]) -> None:
        function: Mapping[str, Any] = call.get("function") or {}
        index: int = call.get("index") or 0
        part, call_id, name = self._open, call.get("id"), function.get("name")
        if part is None or index != self._call or begins_another(call, self._call_id):
            if not name:
                raise UpstreamError("the engine streams a tool call without a name", code="malformed_answer")
            # some servers give none, by which a result could name its call
            part = self._begin(steps, "call", call_id or f"call_{uuid.uuid4().hex}", name)
            self._call, self._call_id = index, call_id or ""
        if arguments := function.get("arguments"):
            self._more(steps, part, arguments)

    def _begin(self, steps: list[Step], kind: Kind, call_id: str = "", name: str = "") -> AnswerPart:
        steps += self.close()
        self._open = part = AnswerPart(len(self.parts), kind, call_id, name)
        self.parts.append(part)
        steps.append(Step("open", part))
        return part

    @staticmethod
    def _more(steps: list[Step], part: AnswerPart, text: str) -> None:
        part.pieces.append(text)
        steps.append(Step("more", part, text))


#: A word with the space before it; longer runs without space (Chinese, base64) are split.
_PIECE = re.compile(r"\s*\S{1,24}|\s+")
#: Message fields that are streamed in pieces, in the model's order.
_TEXT_FIELDS = ("reasoning_content", "reasoning", "content")


def completion_of(answers: Sequence[SampledAnswer], answer_id: str) -> dict[str, Any]:
    """The ``chat.completion`` body with one choice per answer, in the given order."""
    return {
        "id": answer_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": answers[0].model,
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", "content": None, **answer.message},
                "logprobs": answer.logprobs,
                "finish_reason": answer.finish_reason,
                **answer.choice_extra,
            }
            for index, answer in enumerate(answers)
        ],
        "usage": total_usage(answers),
        **answers[0].body_extra,
    }


def chunks_of(
    answers: Sequence[SampledAnswer],
    answer_id: str,
    *,
    include_usage: bool,
    continuous_usage: bool = False,
    last: dict[str, Any] | None = None,
) -> Iterator[dict[str, Any]]:
    """The ``chat.completion.chunk`` bodies of a stream, without the closing ``[DONE]``; text goes out in words.

    Args:
        answers: one per choice, in the given order.
        answer_id: the same in every chunk.
        include_usage: end with a chunk without choices that carries the usage.
        continuous_usage: each chunk carries it: by the first one all was sampled.
        last: further top-level fields of the last chunk that has a choice.
    """
    head: dict[str, Any] = {
        "id": answer_id,
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": answers[0].model,
    }
    usage = total_usage(answers)
    tail: dict[str, Any] = {"usage": usage if continuous_usage else None} if include_usage else {}
    first = answers[0].body_extra
    for index, answer in enumerate(answers):
        for delta, logprobs in _deltas(answer):
            choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
            yield {**head, "choices": [choice], **tail, **first}
            first = {}
        finish = {
            "index": index,
            "delta": {},
            "logprobs": None,
            "finish_reason": answer.finish_reason,
            **answer.choice_extra,
        }
        closing = (last or {}) if index == len(answers) - 1 else {}
        yield {**head, "choices": [finish], **tail, **closing}
    if include_usage:
        yield {**head, "choices": [], "usage": usage}


def total_usage(answers: Sequence[SampledAnswer]) -> dict[str, Any]:
    """Usage of the delivered answers: the prompt counts once, completion tokens add up (OpenAI's rule for ``n``)."""
    usage = dict(answers[0].usage)
    if len(answers) > 1:
        usage.pop(DETAILS, None)
        completion = sum(int(answer.usage.get("completion_tokens", 0)) for answer in answers)
        usage["completion_tokens"] = completion
        usage["total_tokens"] = int(usage.get("prompt_tokens", 0)) + completion
    return usage


def _deltas(answer: SampledAnswer) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
    """``(delta, logprobs)`` of one answer in order: role, reasoning, content, other fields, tool calls."""
    message = answer.message
    yield {"role": message.get("role", "assistant"), "content": ""}, None
    for name in _TEXT_FIELDS:
        text = message.get(name)
        if not isinstance(text, str) or not text:
            continue
        if name == "content" and answer.logprobs is not None:
            yield from _with_logprobs(text, answer.logprobs)
            continue
        for piece in _PIECE.findall(text):
            yield {name: piece}, None
    if answer.logprobs is not None and not message.get("content"):
        yield {"content": ""}, answer.logprobs
    rest = {
        key: value
        for key, value in message.items()
        if key not in ("role", "tool_calls", *_TEXT_FIELDS) and value is not None
    }
    if rest:
        yield rest, None
    for position, call in enumerate(cast("list[dict[str, Any]]", message.get("tool_calls") or [])):
        # the call's id, type and name first, then its arguments in pieces
        function = dict(call.get("function") or {})
        arguments = function.pop("arguments", None)
        yield {"tool_calls": [{**call, "index": position, "function": {**function, "arguments": ""}}]}, None
        for piece in _PIECE.findall(arguments) if isinstance(arguments, str) else ():
            yield {"tool_calls": [{"index": position, "function": {"arguments": piece}}]}, None


def _with_logprobs(text: str, logprobs: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
    """One piece per token with its log-probability if the tokens spell the text, else one piece."""
    tokens = cast("list[dict[str, Any]]", logprobs.get("content") or [])
    if "".join(str(token.get("token", "")) for token in tokens) != text:
        yield {"content": text}, logprobs
        return
    for token in tokens:
        yield {"content": token["token"]}, {"content": [token]}


class MessageAssembly:
    """The message of one choice."""

    def __init__(self) -> None:
        self._fields: Chunk = {"role": "assistant", "content": None}
        #: by index, and by number among those of one index
        self._calls: dict[tuple[int, int], Chunk] = {}
        self._numbers: dict[int, int] = {}

    def take(self, delta: Mapping[str, Any]) -> None:
        """Add the next delta."""
        for call in cast("Sequence[Chunk]", delta.get("tool_calls") or ()):
            index: int = call.get("index") or 0
            number = self._numbers.get(index, 0)
            earlier = self._calls.get((index, number))
            if begins_another(call, None if earlier is None else earlier.get("id") or ""):
                number = self._numbers[index] = number + 1
            whole = self._calls.setdefault((index, number), {"function": {}})
            _merge(whole["function"], call.get("function") or {})
            _merge(whole, {name: value for name, value in call.items() if name not in ("index", "function")})
        if isinstance(delta.get("content"), list):
            # some servers give a text in parts
            delta = {**delta, "content": text_of(delta)}
        _merge(self._fields, {name: value for name, value in delta.items() if name != "tool_calls"})

    def message(self) -> Chunk:
        """The message so far."""
        calls = [self._calls[position] for position in sorted(self._calls)]
        return {**self._fields, **({"tool_calls": calls} if calls else {})}


class Assembly:
    """The answer of one choice."""

    def __init__(self) -> None:
        self._body: Chunk = {}
        self._choice: Chunk = {}
        self._message = MessageAssembly()
        self._logprobs: dict[str, list[Any]] = {}
        self.finish_reason: str | None = None

    def take(self, chunk: Chunk) -> None:
        """Add the next chunk."""
        self._body |= {name: value for name, value in chunk.items() if value or name not in KNOWN_IN_BODY}
        for choice in cast("list[Chunk]", chunk.get("choices") or []):
            self._message.take(choice.get("delta") or {})
            for name, entries in cast("Chunk", choice.get("logprobs") or {}).items():
                if isinstance(entries, list):
                    self._logprobs.setdefault(name, []).extend(cast("list[Any]", entries))
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            for name in [name for name in choice if name not in _KNOWN_IN_CHOICE]:
                value = choice[name]
                if isinstance(value, list) and isinstance(self._choice.get(name), list):
                    self._choice[name] = self._choice[name] + value
                elif value is not None or name not in self._choice:
                    self._choice[name] = value

    def answer(self) -> SampledAnswer:
        """The whole answer.

        Raises:
            UpstreamError: the choice has no end.
        """
        if self.finish_reason is None:
            raise UpstreamError("the engine's stream ended before its answer did", code="malformed_answer")
        whole = {"message": self._message.message(), "logprobs": self._logprobs or None}
        choice = {**self._choice, **whole, "finish_reason": self.finish_reason}
        return SampledAnswer.from_completion({**self._body, "choices": [choice]})


def begins_another(call: Mapping[str, Any], open_id: str | None) -> bool:
    """Whether the delta of a call begins another one than the call ``open_id`` of the same index (empty: it has no id;
    ``None``: there is none): some servers give all calls one index, or none."""
    if open_id is None or not (call.get("function") or {}).get("name"):
        return False
    return call.get("id") not in (None, "", open_id) or not open_id


def answer_of_chunks(chunks: Iterable[Chunk]) -> SampledAnswer:
    """The first choice of the whole stream of ``chat.completion.chunk`` bodies.

    Raises:
        UpstreamError: it has no end.
    """
    assembly = Assembly()
    for chunk in chunks:
        choices = cast("list[Chunk]", chunk.get("choices") or [])
        assembly.take({**chunk, "choices": [choice for choice in choices if not choice.get("index")]})
    return assembly.answer()


def _merge(whole: Chunk, part: Mapping[str, Any]) -> None:
    for name, value in part.items():
        if name in _JOINED and isinstance(value, str):
            whole[name] = (whole.get(name) or "") + value
        elif value not in (None, "") or name not in whole:
            whole[name] = value
