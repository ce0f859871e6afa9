"""Sampled answers as Chat Completions: one body, or the chunks of a stream.

Invariant: joined together, the deltas of a stream say exactly what the plain body would have said.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from typing import Any, cast

from adapters.dialects.forms import Answer

#: A word with the space before it; longer runs without space (Chinese, base64) go out in parts.
_PIECE = re.compile(r"\s*\S{1,24}|\s+")
#: Message fields that are streamed in pieces, in the order in which a model produces them.
_TEXT_FIELDS = ("reasoning_content", "reasoning", "content")


def completion_of(answers: Sequence[Answer], answer_id: str) -> dict[str, Any]:
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
    answers: Sequence[Answer],
    answer_id: str,
    *,
    include_usage: bool,
    last: dict[str, Any] | None = None,
    pieces: Sequence[Sequence[int] | None] | None = None,
) -> Iterator[dict[str, Any]]:
    """The ``chat.completion.chunk`` bodies of a stream, without the closing ``[DONE]``.

    Args:
        answers: one per choice, in the given order.
        answer_id: the same in every chunk.
        include_usage: end with a chunk without choices that carries the usage.
        last: further top-level fields of the last chunk that has a choice.
        pieces: of each answer the lengths, in characters, of the parts its content is to go out in; where there are
            none, or they are not the content's, it goes out in words.
    """
    head: dict[str, Any] = {
        "id": answer_id,
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": answers[0].model,
    }
    tail: dict[str, Any] = {"usage": None} if include_usage else {}
    first = answers[0].body_extra
    for index, answer in enumerate(answers):
        for delta, logprobs in _deltas(answer, pieces[index] if pieces else None):
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
        yield {**head, "choices": [], "usage": total_usage(answers)}


def total_usage(answers: Sequence[Answer]) -> dict[str, Any]:
    """Usage of the delivered answers: the prompt counts once, completion tokens add up (OpenAI's rule for ``n``)."""
    usage = dict(answers[0].usage)
    if len(answers) > 1:
        completion = sum(int(answer.usage.get("completion_tokens", 0)) for answer in answers)
        usage["completion_tokens"] = completion
        usage["total_tokens"] = int(usage.get("prompt_tokens", 0)) + completion
    return usage


def _deltas(answer: Answer, pieces: Sequence[int] | None) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
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
        for piece in _cut(text, pieces if name == "content" else None):
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


def _cut(text: str, pieces: Sequence[int] | None) -> Iterator[str]:
    if pieces is None or sum(pieces) != len(text):
        yield from _PIECE.findall(text)
        return
    start = 0
    for length in pieces:
        if length > 0:
            yield text[start : start + length]
            start += length


def _with_logprobs(text: str, logprobs: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
    """One piece per token with its log-probability, where the tokens spell the text; else all in one piece."""
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
