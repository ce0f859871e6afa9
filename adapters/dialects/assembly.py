"""A streamed answer of Chat Completions, put together to what the plain call would have given, field by field."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from adapters.dialects.dialect import KNOWN_IN_BODY, SampledAnswer, text_of
from swarm.errors import UpstreamError

#: Fields of a delta and of a tool call whose parts are joined; of any other field the last value stands.
_JOINED = frozenset({"content", "reasoning_content", "reasoning", "refusal", "arguments"})
_KNOWN_IN_CHOICE = frozenset({"index", "delta", "finish_reason", "logprobs"})

Chunk = dict[str, Any]


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
        self._model = ""
        self._message = MessageAssembly()
        self._logprobs: dict[str, list[Any]] = {}
        self._extra: Chunk = {}
        self._more: Chunk = {}
        self.finish_reason: str | None = None
        self.usage: Chunk = {}

    def take(self, chunk: Chunk) -> None:
        """Add the next chunk."""
        self._model = chunk.get("model") or self._model
        self.usage = chunk.get("usage") or self.usage
        self._more |= {name: value for name, value in chunk.items() if name not in KNOWN_IN_BODY}
        for choice in cast("list[Chunk]", chunk.get("choices") or []):
            self._take(choice)

    def answer(self) -> SampledAnswer:
        """The whole answer.

        Raises:
            UpstreamError: the choice has no end.
        """
        if self.finish_reason is None:
            raise UpstreamError("the engine's stream ended before its answer did", code="malformed_answer")
        return SampledAnswer(
            model=self._model,
            message=self._message.message(),
            finish_reason=self.finish_reason,
            usage=self.usage,
            logprobs=self._logprobs or None,
            choice_extra=self._extra,
            body_extra=self._more,
        )

    def _take(self, choice: Chunk) -> None:
        self._message.take(choice.get("delta") or {})
        for name, entries in cast("Chunk", choice.get("logprobs") or {}).items():
            if isinstance(entries, list):
                self._logprobs.setdefault(name, []).extend(cast("list[Any]", entries))
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        for name, value in choice.items():
            if name in _KNOWN_IN_CHOICE:
                continue
            if isinstance(value, list) and isinstance(self._extra.get(name), list):
                self._extra[name] = self._extra[name] + value
            elif value is not None or name not in self._extra:
                self._extra[name] = value


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
