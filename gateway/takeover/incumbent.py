"""An incumbent's answer on its way to the user, overheard.

Invariant: what the user gets is what the incumbent sent, as it came: nothing is added to it, changed or held back. Only
an answer that reached its end is overheard.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

from adapters.dialects import SampledAnswer, answer_in
from adapters.dialects.chat_answers import answer_of_chunks
from adapters.dialects.dialect import unreadable
from gateway.types import Decided, Live, Outcome, Relayed
from swarm.errors import UpstreamError
from swarm.evidence.pairs import Side

#: Says who answered, and where in [0, 1) the conversation was drawn.
SOURCE, POSITION = "x-swarm-source", "x-swarm-position"
CHALLENGER: Side = "challenger"
INCUMBENT: Side = "incumbent"
#: Bytes of an answer, or chunks of a translated one, beyond which it is not kept.
MAX_BYTES, MAX_CHUNKS = 4 * 1024 * 1024, 50_000

#: How OpenRouter and Mistral end an answer of status 200 that broke off.
_FAILED = "error"

T = TypeVar("T")
#: Reads the answer; raises :class:`swarm.errors.UpstreamError` where it cannot.
Read = Callable[[], SampledAnswer]


class Overheard:
    """One answer as it passes; ``seconds`` and ``read`` are set once it is whole.

    Args:
        path: of its dialect.
        done: called once the answer is delivered whole, or given up.

    Attributes:
        seconds: from the beginning of this object to the last byte.
        read: gives the answer; ``None``: it is not whole, too long, or an error.
    """

    def __init__(self, path: str, done: Callable[[Overheard], None]) -> None:
        self._path = path
        self._done = done
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self.seconds = 0.0
        self.read: Read | None = None
        #: gives what has passed so far of a stream
        self._passed: Read | None = None

    def outcome(self, outcome: Outcome) -> Outcome:
        """The same outcome for the user; ``done`` follows its ``close``."""
        path = self._path
        match outcome:
            case Relayed(status=200, body=bytes() as body):
                self._whole(lambda: answer_in(path, [body], streamed=False))
            case Relayed(status=200, body=body) if not isinstance(body, bytes):
                parts: list[bytes] = []
                body = self._passing(body, parts, len, MAX_BYTES, lambda: answer_in(path, parts, streamed=True))
                outcome = replace(outcome, body=body)
            case Live():
                chunks: list[dict[str, Any]] = []
                passing = self._passing(
                    outcome.chunks, chunks, lambda _: 1, MAX_CHUNKS, lambda: answer_of_chunks(chunks)
                )
                outcome = replace(outcome, chunks=passing)
            case Decided():
                completion = outcome.completion
                self._whole(lambda: SampledAnswer.from_completion(completion))
            case _:
                pass
        close = outcome.close

        async def closed() -> None:
            try:
                if close is not None:
                    await close()
            finally:
                if self.read is None and self._passed is not None:
                    # OpenAI's SDK leaves at [DONE], and some applications at the finish reason
                    with suppress(UpstreamError):
                        _readable(self._passed)
                        self._whole(self._passed)
                self._done(self)

        return replace(outcome, close=closed)

    def _whole(self, read: Read) -> None:
        self.seconds, self.read = self._loop.time() - self._began, partial(_readable, read)

    async def _passing(
        self, parts: AsyncIterator[T], kept: list[T], size: Callable[[T], int], most: int, read: Read
    ) -> AsyncIterator[T]:
        total, self._passed = 0, read
        async for part in parts:
            total += size(part)
            if total <= most:
                kept.append(part)
            else:
                self._passed = None
            yield part
        if total <= most:
            self._whole(read)


def _readable(read: Read) -> SampledAnswer:
    """What ``read`` gives, if it is such that a hook can be given it."""
    try:
        answer = read()
    except (LookupError, TypeError, ValueError, AttributeError) as exc:
        raise unreadable(f"it is malformed ({type(exc).__name__}: {exc})") from exc
    usage, finish = cast("Any", answer.usage), cast("Any", answer.finish_reason)
    if finish == _FAILED:
        raise unreadable("it ends with an error")
    calls: Any = answer.message.get("tool_calls") or []
    if not (isinstance(usage, dict) and isinstance(finish, str) and isinstance(calls, list)):
        raise unreadable("its usage, its finish_reason or its tool_calls are malformed")
    for call in cast("list[Any]", calls):
        if not isinstance(call, dict) or not isinstance(cast("Any", call.get("function") or {}), dict):
            raise unreadable("one of its tool calls is malformed")
    return answer
