"""Policy ``first``: the first answer goes out as it is sampled, the others begin behind its first token, and all are
judged behind.

Invariant: what is streamed is what its episode recorded; a stream that breaks off is told as an error and never
trained.

With ``n`` > 1 the first n answers go out, each as the choice of its number.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from adapters.dialects.chat_answers import chunks_of, completion_of, total_usage
from gateway.observability.request import phase
from gateway.rollout.assembly import Assembly
from gateway.rollout.group import GroupRun
from gateway.rollout.group_retry import outliving, with_group
from gateway.rollout.lead import Lead
from gateway.rollout.ports import Link, Route
from gateway.rollout.report import GroupReport
from gateway.rollout.sampling import Chunk, EpisodeLostError, Sample, too_late
from gateway.stats import DropReason
from gateway.types import Decided, Incoming, Live
from swarm.errors import SwarmGatewayError, UnavailableError, UpstreamError


async def first(route: Route, incoming: Incoming, session: Link | None) -> Live | Decided:
    """Answer 0 of a group: live where a stream was asked for, else whole as soon as it is there.

    Arguments and errors as of :func:`gateway.rollout.best.best`; a failure after the first chunk ends the stream with
    an error.
    """

    async def use(run: GroupRun) -> Live | Decided:
        if incoming.call.stream:
            return await _Broadcast(run, incoming, session).begin()
        return await _whole(run, incoming, session)

    return await outliving(route, with_group(route, incoming, session, use), session)


async def _whole(run: GroupRun, incoming: Incoming, session: Link | None) -> Decided:
    count = incoming.call.choices
    lead = Lead()
    run.start_each(range(count), pieces=False)
    _start_others(run, count, lead)
    with phase("sample"):
        while run.sampling and any(run.outcomes[place] is None for place in range(count)):
            await run.progress()
    lead.end()
    delivered = [place for place in range(count) if place in run.samples]
    if not delivered:
        raise run.failure()
    answers = [run.samples[place].answer for place in delivered]
    if session is not None:
        session.delivered(run.shaped.answer_id, answers[0].message, None, choices=len(delivered))
    run.settle((), None, delivered)

    async def chunks() -> AsyncIterator[Chunk]:
        for chunk in chunks_of(answers, run.shaped.answer_id, include_usage=incoming.call.include_usage):
            yield chunk

    report = GroupReport(policy_version=run.samples[delivered[0]].policy_version)
    return Decided(completion_of(answers, run.shaped.answer_id), chunks, report.headers())


class _Broadcast:
    """The streams of the answers that go out, as one."""

    def __init__(self, run: GroupRun, incoming: Incoming, session: Link | None) -> None:
        self._run = run
        self._session = session
        self._count = incoming.call.choices
        self._include_usage = incoming.call.include_usage
        self._assemblies = [Assembly() for _ in range(self._count)]
        # without a bound: it holds no more than the answers themselves, and a slow reader holds nobody up
        self._parts: asyncio.Queue[Chunk | SwarmGatewayError | None] = asyncio.Queue()
        self._opened: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._lead = Lead()
        self._head: Chunk = {}
        self._whole = False
        self._left = False

    async def begin(self) -> Live:
        """Start what goes out, and the others behind; the outcome once the first stream has its first chunk.

        Raises:
            SwarmGatewayError: there is none.
        """
        run = self._run
        for place in range(self._count):
            run.start(place, self._stream)
        # what goes out is asked for before anything else is begun
        try:
            await asyncio.sleep(0)
        except BaseException:
            self._opened.cancel()
            raise
        _start_others(run, self._count, self._lead)
        with phase("sample"):
            version = await self._opened
        run.settle((), None, range(self._count))
        return Live(self._chunks(), GroupReport(policy_version=version).headers(), self._close)

    async def _stream(self, place: int) -> Sample:
        """Sample the answer at ``place`` and pass its chunks on as they come."""
        run, loop = self._run, asyncio.get_running_loop()
        started = loop.time()
        try:
            async with (
                asyncio.timeout_at(run.deadline),
                run.swarm.sampler.stream(run.claimed.episodes[place], _streamed(run.shaped.bodies[place])) as live,
            ):
                async for chunk in live.chunks():
                    self._take(place, chunk)
                    if not self._opened.done():
                        self._opened.set_result(live.policy_version)
                        self._lead.end()
            sample = Sample(self._assemblies[place].answer(), loop.time() - started, live.policy_version)
        except BaseException as exc:
            error = self._told(exc)
            self._lead.end()
            if not self._opened.done():
                self._opened.set_exception(error)
            self._parts.put_nowait(error)
            if isinstance(exc, asyncio.CancelledError):
                raise
            raise error from exc
        self._parts.put_nowait(None)
        return sample

    def _told(self, exc: BaseException) -> SwarmGatewayError:
        """What the user is told of ``exc``; what another group can cure is an :class:`EpisodeLostError`."""
        match exc:
            case TimeoutError():
                return too_late()
            case EpisodeLostError() if not self._opened.done():
                return exc
            case UnavailableError() if not self._opened.done():
                return EpisodeLostError(exc.message)
            case SwarmGatewayError():
                return exc
            case _:
                return UpstreamError("the answer was given up", code="stream_cut")

    def _take(self, place: int, chunk: Chunk) -> None:
        assembly = self._assemblies[place]
        assembly.take(chunk)
        choices: list[Chunk] = chunk.get("choices") or []
        if not choices:
            return  # the usage: told at the end, for all answers together
        shaped = {**chunk, "id": self._run.shaped.answer_id}
        if place:
            shaped["choices"] = [{**choice, "index": place} for choice in choices]
        if self._include_usage:
            shaped.setdefault("usage", None)
        self._head = {name: shaped.get(name) for name in ("id", "object", "created", "model")}
        if assembly.finish_reason is not None and all(one.finish_reason for one in self._assemblies):
            self._deliver()
            version = self._opened.result() if self._opened.done() else None
            shaped["swarm"] = GroupReport(policy_version=version).as_dict()
        self._parts.put_nowait(shaped)

    def _deliver(self) -> None:
        """The answers are whole: whoever leaves now had them."""
        if not self._whole:
            self._whole = True
            if self._session is not None:
                message = self._assemblies[0].answer().message
                self._session.delivered(self._run.shaped.answer_id, message, None, choices=self._count)
                if self._left:
                    self._session.abandoned()

    async def _chunks(self) -> AsyncIterator[Chunk]:
        left = self._count
        while left:
            part = await self._parts.get()
            if part is None:
                left -= 1
            elif isinstance(part, SwarmGatewayError):
                # the answer is broken; what the others would be compared with is not what the user got
                self._run.cancel(DropReason.SAMPLE)
                raise part
            else:
                yield part
        if self._include_usage:
            answers = [assembly.answer() for assembly in self._assemblies]
            yield {**self._head, "choices": [], "usage": total_usage(answers)}

    async def _close(self) -> None:
        self._left = True
        if not self._whole and self._run.route.settings.on_disconnect == "cancel":
            self._run.cancel(DropReason.CANCELLED)


def _start_others(run: GroupRun, count: int, lead: Lead) -> None:
    """Begin to sample what does not go out, all but the first ``count`` answers, behind the ``lead`` of those."""
    others = range(count, len(run.shaped.bodies))
    if len(others) > 1 and run.shares_call:
        run.start_together(others, pieces=False, after=lead.over)
    else:
        run.start_each(others, pieces=False, after=lead.over)


def _streamed(body: bytes) -> bytes:
    """A plain request's ``body``, a JSON object that is not empty, as that of a stream."""
    return body[:-1] + b',"stream":true,"stream_options":{"include_usage":true}}'
