"""A chat answer as a row of parts (reasoning, text, tool calls), from a whole message or from a stream's chunks.

Invariant: however a stream is cut into chunks, the parts it ends with say what the whole message says, in the order in
which the model wrote them; a whole message has each kind once, in the order above.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from swarm.errors import UpstreamError

Kind = Literal["reasoning", "text", "call"]


@dataclass
class Part:
    """One part, as far as it has come.

    Attributes:
        index: its place in the answer.
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
    """What happens to a part: it opens, goes on with ``text``, or is whole."""

    what: Literal["open", "more", "close"]
    part: Part
    text: str = ""


def only_choice(body: Mapping[str, Any]) -> dict[str, Any]:
    """The one choice of a ``chat.completion``.

    Raises:
        UpstreamError: it has none.
    """
    match body:
        case {"choices": [{"message": dict()} as choice]}:
            return cast("dict[str, Any]", choice)
        case _:
            raise UpstreamError("the engine's answer is no chat completion", code="malformed_answer")


def parts_of(message: Mapping[str, Any]) -> list[Part]:
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
        head: ``id``, ``created`` and ``model`` of the first chunk; empty before it.
        finish_reason, stop_reason: of the choice, once it has ended.
        usage: once it was told.
    """

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.head: dict[str, Any] = {}
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.usage: dict[str, Any] = {}
        self._open: Part | None = None
        self._call: int | None = None

    def take(self, chunk: Mapping[str, Any]) -> list[Step]:
        """What a ``chat.completion.chunk`` brings; the part that is open at the finish reason is whole with it.

        Raises:
            UpstreamError: it goes on with a tool call that was left, or begins one without a name.
        """
        if not self.head:
            self.head = {key: chunk.get(key) for key in ("id", "created", "model")}
        if chunk.get("usage"):
            self.usage = chunk["usage"]
        steps: list[Step] = []
        for choice in cast("Sequence[dict[str, Any]]", chunk.get("choices") or ()):
            steps += self.take_delta(choice.get("delta") or {})
            if choice.get("finish_reason") is not None:
                self.finish_reason = choice["finish_reason"]
                self.stop_reason = choice.get("stop_reason")
                steps += self.close()
        return steps

    def take_delta(self, delta: Mapping[str, Any]) -> list[Step]:
        """What the delta of a choice brings."""
        steps: list[Step] = []
        # vLLM's present name and its former one; it may send both, with the same text
        self._add(steps, "reasoning", delta.get("reasoning") or delta.get("reasoning_content"))
        self._add(steps, "text", delta.get("content"))
        for call in cast("Sequence[dict[str, Any]]", delta.get("tool_calls") or ()):
            self._add_call(steps, call)
        return steps

    def end(self) -> str:
        """The finish reason of a stream that is over.

        Raises:
            UpstreamError: no chunk told one.
        """
        if self.finish_reason is None:
            raise UpstreamError("the engine's stream has no end", code="malformed_answer")
        return self.finish_reason

    def close(self) -> list[Step]:
        """The open part is whole."""
        part, self._open, self._call = self._open, None, None
        return [] if part is None else [Step("close", part)]

    def _add(self, steps: list[Step], kind: Kind, text: object) -> None:
        if not isinstance(text, str) or not text:
            return
        part = self._open
        if part is None or part.kind != kind:
            part = self._begin(steps, Part(len(self.parts), kind))
        self._more(steps, part, text)

    def _add_call(self, steps: list[Step], call: Mapping[str, Any]) -> None:
        function: Mapping[str, Any] = call.get("function") or {}
        index: int = call.get("index", 0)
        part = self._open
        if part is None or index != self._call:
            call_id, name = call.get("id"), function.get("name")
            if not call_id or not name:
                raise UpstreamError("the engine streams a tool call without an id or a name", code="malformed_answer")
            part = self._begin(steps, Part(len(self.parts), "call", call_id, name))
            self._call = index
        if arguments := function.get("arguments"):
            self._more(steps, part, arguments)

    def _begin(self, steps: list[Step], part: Part) -> Part:
        steps += self.close()
        self._open = part
        self.parts.append(part)
        steps.append(Step("open", part))
        return part

    @staticmethod
    def _more(steps: list[Step], part: Part, text: str) -> None:
        part.pieces.append(text)
        steps.append(Step("more", part, text))
