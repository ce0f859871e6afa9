"""One attempt of a streamed chat call as a state machine without I/O: vLLM's chunks in, the caller's chunks out.

Invariant: nothing is delivered before a choice has content, so that the whole call can be repeated; chunks with a
finish reason are held back until their tokens are recorded.
"""

from __future__ import annotations

from swarm.server.dataplane.answers import Body, Shaper
from swarm.server.dataplane.recording import Recorder
from swarm.server.dataplane.requests import ChatCall


class Attempt:
    """One attempt; feed it with :meth:`take`.

    Args:
        call: what is asked for.
        shaper: shared by all attempts of the call.
        version: the policy version that is served when the attempt begins.
    """

    def __init__(self, call: ChatCall, shaper: Shaper, version: int) -> None:
        self.recorder = Recorder(version, call.samples)
        #: whether the caller has seen anything of this attempt
        self.delivered = False
        self._call = call
        self._shaper = shaper
        self._opening: list[Body] = []
        self._ends: dict[int, Body] = {}
        # choices with a token that did not become plain text, so that the rest cannot be sampled as text
        self._parsed: set[int] = set()

    def take(self, chunk: Body) -> list[Body]:
        """The chunks for the caller after vLLM's ``chunk``."""
        self.recorder.add(chunk)
        choices: list[Body] = chunk.get("choices") or []
        for choice in choices:
            self._look_at(choice)
        if not choices:
            return []  # the usage: delivered at the end
        shaped = self._shaper.chunk(chunk)
        if len(choices) == 1:
            return self._choose(shaped, choices[0])
        return [out for choice in shaped["choices"] for out in self._choose(shaped | {"choices": [choice]}, choice)]

    def cut(self) -> list[int]:
        """The choices that have no end yet."""
        return [index for index in range(self._call.samples) if index not in self._ends]

    def end(self, index: int, chunk: Body) -> None:
        """``chunk`` is the last one of choice ``index``."""
        self._ends[index] = chunk

    def ends(self) -> list[Body]:
        """The chunks to deliver once the call is recorded, ends last."""
        return [*self._opening, *self._ends.values()]

    def continuable(self, index: int) -> bool:
        """Whether to sample on after the tokens of choice ``index`` gives exactly what one call would have given."""
        whole = self.recorder.choices[index].problem is None and bool(self.recorder.prompt_ids)
        return self._call.continuable and index not in self._parsed and whole

    def _look_at(self, choice: Body) -> None:
        delta: Body = choice.get("delta") or {}
        if len(delta) == 1 and "content" in delta:
            return
        # a parser that holds text back sends tokens without content
        held_back = bool(choice.get("token_ids")) and "content" not in delta
        if held_back or any(delta.get(key) for key in delta.keys() - {"role", "content"}):
            self._parsed.add(choice.get("index", 0))

    def _choose(self, chunk: Body, choice: Body) -> list[Body]:
        """Deliver ``chunk``, whose only choice is ``choice``, or hold it back."""
        finish: str | None = choice.get("finish_reason")
        if finish not in (None, "abort"):
            self._ends[choice.get("index", 0)] = chunk
            return []
        says = _says_something(choice)
        if finish == "abort":
            chunk = without_abort(chunk)
        # after an abort the call is repeated, if nothing is delivered yet
        if not self.delivered and (finish == "abort" or not says):
            self._opening.append(chunk)
            return []
        self.delivered = True
        if not self._opening:
            return [chunk]
        ready = [*self._opening, chunk]
        self._opening.clear()
        return ready


def without_abort(chunk: Body) -> Body:
    """``chunk``, whose choices are not over although vLLM aborted them."""
    for choice in chunk["choices"]:
        if choice.get("finish_reason") == "abort":
            choice["finish_reason"] = choice["stop_reason"] = None
    return chunk


def _says_something(choice: Body) -> bool:
    """Whether a choice has more than the role."""
    delta: Body = choice.get("delta") or {}
    return bool(delta.get("content")) or any(value for key, value in delta.items() if key != "role")
