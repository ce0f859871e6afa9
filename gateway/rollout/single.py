"""Policy ``single``: one unrecorded answer of the engine. It has no episode, so nothing of it is trained.

Invariant: an error that says that nothing was sampled is true; the engine's own words reach the application as they
came.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from typing import TypeVar

from adapters.dialects import LLMRequest, to_json
from adapters.dialects import SampledAnswer as Completion
from adapters.dialects.chat_answers import chunks_of
from gateway.rollout.return_policy import GroupReport
from gateway.rollout.sampling import Chunk, EpisodeLostError
from gateway.rollout.server import Training, Waiting
from gateway.types import Decided, Incoming, Live
from swarm.errors import UnavailableError
from swarm.http.client import Answer

T = TypeVar("T")


async def single(
    training: Training, incoming: Incoming, reason: str | None = None, *, patient: bool = True
) -> Live | Decided:
    """One call of the swarm's engine, with ``n`` as asked; live where a stream was asked for.

    Args:
        reason: why it is not trained, if that is to be told.
        patient: wait for an engine that cannot serve now, as a claim would; else try once.

    Raises:
        RelayedError: the engine finds fault with the request.
        UnavailableError: no engine serves within the bounds for claims; nothing was sampled.
        UpstreamError: it failed, or the deadline of a sample passed.
    """
    swarm, call = training.swarm, incoming.call
    # the engine has one model, under whatever name the application knows it
    body = to_json({**call.body, "model": swarm.report.model})
    incoming.left_out.not_as_asked(call.body, swarm.report.job, episode_type=None)
    if call.stream:
        return await _awake(training, incoming, lambda: _live(training, call, body, reason), patient=patient)
    completion, version = await _awake(
        training, incoming, lambda: swarm.sampler.complete(swarm.engine, body, _deadline(training)), patient=patient
    )

    def chunks() -> Iterator[Chunk]:
        answers = [Completion.from_completion({**completion, "choices": [choice]}) for choice in completion["choices"]]
        return chunks_of(answers, str(completion.get("id")), include_usage=call.include_usage)

    return Decided(completion, chunks, _report(version, reason).headers())


async def engine_answer(training: Training, path: str, body: bytes) -> Answer:
    """The engine's answer to ``body`` (JSON) at another of its addresses, such as ``/tokenize``, whatever its status.

    Raises:
        UnavailableError: it cannot be reached; nothing was sampled.
        UpstreamError: the deadline of a sample passed.
    """
    swarm = training.swarm
    try:
        return await swarm.sampler.answer_at(swarm.engine, path, body, _deadline(training))
    except EpisodeLostError as exc:
        raise _not_now(exc) from exc


async def _awake(training: Training, incoming: Incoming, begin: Callable[[], Awaitable[T]], *, patient: bool) -> T:
    """The result of ``begin`` once an engine serves; it does not while it boots or trains on the same device."""
    waited = Waiting(training.settings)
    while True:
        try:
            with incoming.prospect.sampling():
                return await begin()
        except UnavailableError as exc:
            refused = not isinstance(exc, EpisodeLostError) or exc.code in ("engine_offline", "server_unreachable")
            error = _not_now(exc)
            if not (refused and patient):
                raise error from exc
        await waited.after(error)


async def _live(training: Training, call: LLMRequest, body: bytes, reason: str | None) -> Live:
    async with AsyncExitStack() as held:
        stream = training.swarm.sampler.stream(training.swarm.engine, body, _deadline(training))
        sample = await held.enter_async_context(stream)
        opened = held.pop_all()
        report = _report(sample.policy_version, reason)
        return Live(_reported(sample.chunks, call.choices, report), report.headers(), opened.aclose)


async def _reported(chunks: AsyncIterator[Chunk], choices: int, report: GroupReport) -> AsyncIterator[Chunk]:
    """``chunks``, of which the one that ends the last of the ``choices`` has the report."""
    async for chunk in chunks:
        ended = sum(choice.get("finish_reason") is not None for choice in chunk.get("choices") or ())
        choices -= ended
        yield {**chunk, "swarm": report.as_dict()} if ended and not choices else chunk


def _deadline(training: Training) -> float:
    return asyncio.get_running_loop().time() + training.settings.sample_timeout_seconds


def _not_now(exc: UnavailableError) -> UnavailableError:
    return UnavailableError(
        f"the engine cannot serve now: {exc.message}", code=exc.code, retry_after=exc.retry_after or 5.0
    )


def _report(version: int | None, reason: str | None) -> GroupReport:
    return GroupReport(policy_version=version, trained=False, drop_reason=reason)
