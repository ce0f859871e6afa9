"""Policy ``first``: the first answer goes out as it is sampled, the others begin after its first token (or the whole
answer where that is not streamed), and all are judged in the background.

Invariant: what is streamed is what its episode recorded; a stream that breaks off ends with an error and is never
trained.

With ``n`` > 1 the first n answers go out, each as the choice of its number.

Policy ``single``: one unrecorded answer of the engine, which has no episode, so nothing of it is trained. An error that
says that nothing was sampled is true; the engine's own words reach the application as they came.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, TypeVar

from adapters.dialects import LLMRequest, to_json
from adapters.dialects.chat_answers import Assembly, completion_of, total_usage
from adapters.dialects.jsons import encode
from gateway.observability.request import phase
from gateway.rollout.answering import run_with_group
from gateway.rollout.group import GroupRun
from gateway.rollout.return_policy import GroupReport
from gateway.rollout.sampling import Chunk, EpisodeLostError, Sample
from gateway.rollout.server import Training, Waiting
from gateway.sessions.sessions import SessionLink
from gateway.stats import DropReason
from gateway.types import Decided, Incoming, Live
from swarm.errors import SwarmGatewayError, UnavailableError, UpstreamError
from swarm.http.client import Answer

T = TypeVar("T")

#: Fields of every chunk.
_HEAD = ("id", "object", "created", "model", "system_fingerprint")


async def first(
    training: Training,
    incoming: Incoming,
    session: SessionLink | None,
    behind: Callable[[GroupRun], None] | None = None,
    within: float | None = None,
) -> Live | Decided:
    """Answer 0 of a group: live where a stream was asked for, else whole as soon as it is there.

    Arguments and errors as of :func:`gateway.rollout.answering.run_with_group`; a failure after the first chunk ends
    the stream with an error. ``within`` bounds the wait for the first chunk. With ``behind`` a group is sampled also
    where none can be trained.
    """

    async def use(run: GroupRun) -> Live | Decided:
        return await (_Broadcast(run, incoming).begin() if incoming.call.stream else _whole(run, incoming))

    fans_out = behind is not None
    return await run_with_group(training, incoming, session, use, fans_out=fans_out, behind=behind, within=within)


async def _whole(run: GroupRun, incoming: Incoming) -> Decided:
    count = incoming.call.choices
    run.sample(range(count), apart=True)
    with phase("sample"):
        while run.sampling:
            await run.progress()
    delivered = [index for index in range(count) if index in run.samples]
    if not delivered:
        raise run.failure()
    run.sample(range(count, len(run.shaped.bodies)))
    answers = [run.samples[index].answer for index in delivered]
    run.deliver(answers[0].message, None, len(delivered))
    run.settle((), None, delivered)
    report = _report(run, run.samples[delivered[0]].policy_version)
    return Decided(completion_of(answers, run.shaped.answer_id), report.headers())


def _report(run: GroupRun, version: int | None) -> GroupReport:
    """What is known of a group that goes on."""
    return GroupReport(policy_version=version) if run.shaped.may_train else _untrained(version, run.shaped.drop)


def _untrained(version: int | None, reason: str | None) -> GroupReport:
    return GroupReport(policy_version=version, trained=False, drop_reason=reason)


class _Broadcast:
    """The streams of the delivered answers, as one."""

    def __init__(self, run: GroupRun, incoming: Incoming) -> None:
        self._run = run
        self._count = incoming.call.choices
        self._include_usage = incoming.call.include_usage
        asked = incoming.call.body.get("stream_options") if self._include_usage else None
        self._options: dict[str, Any] = {**(asked or {}), "include_usage": True}
        self._assemblies = [Assembly() for _ in range(self._count)]
        # unbounded: it holds no more than the answers themselves, and a slow reader delays nobody
        self._parts: asyncio.Queue[Chunk | SwarmGatewayError | None] = asyncio.Queue()
        self._opened: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._head: Chunk = {}
        self._begun = False
        self._whole = False
        self._left = False

    async def begin(self) -> Live:
        """Start the delivered answers, and the others after the first token; return with the first chunk.

        The others find the prompt in the engine's prefix cache by then, and do not compete for the first token.

        Raises:
            SwarmGatewayError: there is no first chunk.
        """
        run = self._run
        for index in range(self._count):
            run.start([index], partial(self._stream, index))
        with phase("sample"):
            version = await self._opened
        run.settle((), None, range(self._count))
        return Live(self._chunks(), _report(run, version).headers(), self._close)

    async def _stream(self, index: int) -> list[Sample]:
        """Sample the answer at ``index`` and pass its chunks on as they come."""
        run, loop = self._run, asyncio.get_running_loop()
        started = loop.time()
        try:
            body = _streamed(run.shaped.bodies[index], self._options)
            async with run.swarm.sampler.stream(run.episodes[index], body, run.deadline) as live:
                async for chunk in live.chunks:
                    self._take(index, chunk)
                    if not self._opened.done():
                        self._opened.set_result(live.policy_version)
                        self._begun = True
                        run.sample(range(self._count, len(run.shaped.bodies)))
            sample = Sample(self._assemblies[index].answer(), loop.time() - started, live.policy_version)
        except BaseException as exc:
            error = self._error_of(exc)
            if not self._opened.done():
                self._opened.set_exception(error)
            self._parts.put_nowait(error)
            # before the first chunk another group may serve the request
            if self._begun and (session := run.session) is not None:
                session.gave_up()
            if isinstance(exc, asyncio.CancelledError):
                raise
            raise error from exc
        self._parts.put_nowait(None)
        return [sample]

    def _error_of(self, exc: BaseException) -> SwarmGatewayError:
        """The user's error for ``exc``; an :class:`EpisodeLostError` where another group can help."""
        if isinstance(exc, UnavailableError) and not self._opened.done():
            return exc if isinstance(exc, EpisodeLostError) else EpisodeLostError(exc.message)
        given_up = UpstreamError("the answer was given up", code="stream_cut")
        return exc if isinstance(exc, SwarmGatewayError) else given_up

    def _take(self, index: int, chunk: Chunk) -> None:
        assembly = self._assemblies[index]
        assembly.take(chunk)
        choices: list[Chunk] = chunk.get("choices") or []
        if not choices:
            return  # the usage goes out at the end, for all answers together
        shaped = {**chunk, "id": self._run.shaped.answer_id}
        if index:
            shaped["choices"] = [{**choice, "index": index} for choice in choices]
        if self._include_usage:
            shaped.setdefault("usage", None)
        self._head = {name: shaped[name] for name in _HEAD if name in shaped}
        if assembly.finish_reason is not None and all(other.finish_reason for other in self._assemblies):
            self._deliver()
            version = self._opened.result() if self._opened.done() else None
            shaped["swarm"] = _report(self._run, version).as_dict()
        self._parts.put_nowait(shaped)

    def _deliver(self) -> None:
        """The answers are whole: a caller who leaves now got them."""
        if not self._whole:
            self._whole = True
            self._run.deliver(self._assemblies[0].answer().message, None, self._count)
            if self._left and self._run.session is not None:
                self._run.session.abandoned()

    async def _chunks(self) -> AsyncIterator[Chunk]:
        left = self._count
        while left:
            part = await self._parts.get()
            if part is None:
                left -= 1
            elif isinstance(part, SwarmGatewayError):
                # the user's answer is broken, so the others have nothing to be compared with
                self._run.cancel(DropReason.SAMPLE)
                raise part
            else:
                yield part
        if self._include_usage:
            answers = [assembly.answer() for assembly in self._assemblies]
            yield {**self._head, "choices": [], "usage": total_usage(answers)}

    async def _close(self) -> None:
        self._left = True
        if not self._whole and self._run.training.settings.on_disconnect == "cancel":
            self._run.cancel(DropReason.CANCELLED)


def _streamed(body: bytes, options: dict[str, Any]) -> bytes:
    """The ``body`` of a plain request, a JSON object with fields, as that of a stream."""
    return body[:-1] + b',"stream":true,"stream_options":' + encode(options) + b"}"


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
    return Decided(completion, _untrained(version, reason).headers())


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
        report = _untrained(sample.policy_version, reason)
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
