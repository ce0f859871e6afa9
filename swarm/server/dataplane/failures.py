"""How a call to vLLM fails, told apart by what helps, and how often it is tried.

Invariant: every retry is counted and paused for.
"""

from __future__ import annotations

import asyncio
import random
import re
from typing import Any

from swarm.errors import ContextLengthError, RequestError, UpstreamError
from swarm.job import TrainJob

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0


class UpstreamRefusalError(UpstreamError):
    """vLLM refused the request (a context too long, a bad field): its status and body go to the caller.

    ``param`` is where the prompt stood: ``messages``, ``prompt`` or ``input``.
    """

    def __init__(self, status: int, payload: dict[str, Any], param: str = "messages") -> None:
        super().__init__(f"vLLM answered {status}")
        self.status = status
        self.param = param
        self._payload = payload

    def body(self) -> dict[str, Any]:
        return self._payload


class TransientError(UpstreamError):
    """vLLM aborted, failed or could not be reached; the same request may succeed in a moment."""


class AbortedError(TransientError):
    """vLLM aborted the call: it is replacing its weights."""

    def __init__(self) -> None:
        super().__init__("vLLM aborted the call")


class UnreachableError(TransientError):
    """No connection to this replica could be made; nothing was sent."""


#: what vLLM 0.28 says where prompt and answer do not fit (``renderers/params.py``, ``v1/engine/input_processor.py``)
_TOO_LONG = re.compile(
    r"maximum context length is (?P<limit>\d+) tokens\. However, you requested (?P<answer>\d+) output tokens and your "
    r"prompt contains (?:(?P<least>at least )?(?P<prompt>\d+) input tokens|\d+ characters \(more than \d+ characters, "
    r"which is the upper bound for (?P<room>\d+) input tokens)"
    r"|prompt \(length (?P<length>\d+)\).* is longer than the maximum model length of (?P<most>\d+)"
)


def too_long(refusal: UpstreamRefusalError, job: TrainJob) -> RequestError | None:
    """``refusal`` in words that SDKs look for, if it says that the prompt, or it and the answer, are too long."""
    error: Any = refusal.body().get("error")
    found = _TOO_LONG.search(str(error.get("message"))) if isinstance(error, dict) else None
    if found is None:
        return None
    limit, answer = int(found["limit"] or found["most"]), int(found["answer"] or 0)
    # by characters vLLM refuses before it counts tokens
    prompt = int(found["prompt"] or found["length"] or int(found["room"]) + 1)
    at_least = found["least"] is not None or found["room"] is not None
    if at_least and answer:
        # it read no more of the prompt than would leave room for the answer
        limit, answer = limit - answer, 0
    fits = prompt < limit
    return ContextLengthError(
        limit=limit,
        prompt_tokens=prompt,
        answer_tokens=answer if fits else 0,
        at_least=at_least,
        param=refusal.param,
        hint=(
            f"Whoever runs the training job can raise job.max_prompt_length (now {job.max_prompt_length}; with "
            f"job.max_response_length, {job.max_response_length}, it makes the context)."
        ),
    )


class Retries:
    """The tries of one call: a cap, and pauses that double up to two seconds, with jitter."""

    def __init__(self, attempts: int) -> None:
        self._left = attempts
        self._pause = _FIRST_PAUSE

    async def after(self, error: TransientError) -> None:
        """Pause before the next try.

        Raises:
            UpstreamError: that was the last one.
        """
        self._left -= 1
        if self._left <= 0:
            raise UpstreamError(f"the engine could not complete the call: {error.message}") from error
        await asyncio.sleep(self._pause * random.uniform(0.5, 1.0))
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
