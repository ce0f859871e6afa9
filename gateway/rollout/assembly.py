"""The chunks of a streamed choice put together to the answer that they say.

Invariant: what comes out is what the plain call would have given, field by field.
"""

from __future__ import annotations

from typing import Any, cast

from adapters.dialects import Answer
from swarm.errors import UpstreamError

#: Fields of a delta and of a tool call whose parts are joined; of any other field the last one stands.
_JOINED = frozenset({"content", "reasoning_content", "reasoning", "refusal", "arguments"})
_KNOWN_IN_CHUNK = frozenset({"id", "object", "created", "model", "choices", "usage"})
_KNOWN_IN_CHOICE = frozenset({"index", "delta", "finish_reason", "logprobs"})

Fields = dict[str, Any]


class Assembly:
    """One choice; feed it with the chunks of a stream that has no other."""

    def __init__(self) -> None:
        self._model = ""
        self._message: Fields = {"role": "assistant", "content": None}
        self._calls: dict[int, Fields] = {}
        self._logprobs: dict[str, list[Any]] = {}
        self._extra: Fields = {}
        self._more: Fields = {}
        self.finish_reason: str | None = None
        self.usage: Fields = {}

    def take(self, chunk: Fields) -> None:
        """Take in the next chunk."""
        self._model = chunk.get("model") or self._model
        self.usage = chunk.get("usage") or self.usage
        self._more |= {name: value for name, value in chunk.items() if name not in _KNOWN_IN_CHUNK}
        for choice in cast("list[Fields]", chunk.get("choices") or []):
            self._take(choice)

    def answer(self) -> Answer:
        """What the chunks say.

        Raises:
            UpstreamError: the choice has no end.
        """
        if self.finish_reason is None:
            raise UpstreamError("the engine's stream ended before its answer did", code="malformed_answer")
        message = dict(self._message)
        if self._calls:
            message["tool_calls"] = [self._calls[position] for position in sorted(self._calls)]
        return Answer(
            model=self._model,
            message=message,
            finish_reason=self.finish_reason,
            usage=self.usage,
            logprobs=self._logprobs or None,
            choice_extra=self._extra,
            body_extra=self._more,
        )

    def _take(self, choice: Fields) -> None:
        delta: Fields = choice.get("delta") or {}
        for call in cast("list[Fields]", delta.get("tool_calls") or []):
            self._take_call(call)
        _merge(self._message, {name: value for name, value in delta.items() if name != "tool_calls"})
        for name, entries in cast("Fields", choice.get("logprobs") or {}).items():
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

    def _take_call(self, call: Fields) -> None:
        whole = self._calls.setdefault(call.get("index", 0), {"function": {}})
        _merge(whole["function"], call.get("function") or {})
        _merge(whole, {name: value for name, value in call.items() if name not in ("index", "function")})


def _merge(whole: Fields, part: Fields) -> None:
    for name, value in part.items():
        if name in _JOINED and isinstance(value, str):
            whole[name] = (whole.get(name) or "") + value
        elif value is not None or name not in whole:
            whole[name] = value
