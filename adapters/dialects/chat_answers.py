"""Sampled answers as Chat Completions (one body, or the chunks of a stream), and as the parts that other dialects need.

Invariant: joined together, the deltas of a stream say exactly what the plain body says. However a stream is cut into
chunks, its parts (reasoning, text, tool calls) say what the whole message says, in the model's order; a whole message
has each kind once, in that order.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from adapters.dialects.assembly import begins_another
from adapters.dialects.dialect import DETAILS, SampledAnswer, text_of
from swarm.errors import UpstreamError

Kind = Literal["reasoning", "text", "call"]


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
        head: ``id``, ``created`` and ``model`` of the first chunk with a choice; empty before it.
        finish_reason, stop_reason: of the choice, once it has ended.
        usage: once a chunk had it.
    """

    def __init__(self) -> None:
        self.parts: list[AnswerPart] = []
        self.head: dict[str, Any] = {}
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
        if not self.head and chunk.get("choices"):
            self.head = {key: chunk.get(key) for key in ("id", "created", "model")}
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
        for delta in _tool_call_deltas(call, position):
            yield {"tool_calls": [delta]}, None


def _with_logprobs(text: str, logprobs: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
    """One piece per token with its log-probability if the tokens spell the text, else one piece."""
    tokens = cast("list[dict[str, Any]]", logprobs.get("content") or [])
    if "".join(str(token.get("token", "")) for token in tokens) != text:
        yield {"content": text}, logprobs
        return
    for token in tokens:
        yield {"content": token["token"]}, {"content": [token]}


def _tool_call_deltas(call: dict[str, Any], position: int) -> Iterator[dict[str, Any]]:
    """The call's id, type and name first, then its arguments in pieces."""
    function = dict(call.get("function") or {})
    arguments = function.pop("arguments", None)
    yield {**call, "index": position, "function": {**function, "arguments": ""}}
    if isinstance(arguments, str):
        for piece in _PIECE.findall(arguments):
            yield {"index": position, "function": {"arguments": piece}}
