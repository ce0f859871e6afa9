"""One chat call through vLLM, plain or streamed, and what is recorded of it.

Invariant: ``finish_reason: "abort"`` (vLLM's word for "the weights are being replaced") never reaches a caller; what is
recorded is what was delivered, token for token, and it is on disk before the end of the answer leaves.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from swarm.errors import TokenTruthError, UpstreamError
from swarm.server.dataplane.answers import Shaper
from swarm.server.dataplane.failures import AbortedError, Retries, TransientError
from swarm.server.dataplane.merging import merged
from swarm.server.dataplane.plain import PlainAnswer, read
from swarm.server.dataplane.recording import Recorder
from swarm.server.dataplane.replicas import Route
from swarm.server.dataplane.requests import ChatCall
from swarm.server.dataplane.streaming import Attempt, Chunk, without_abort
from swarm.server.dataplane.upstream import Upstream
from swarm.tokens import ModelCall


class CallLog(Protocol):
    """Where a finished call goes; ``choice`` is the index of one of its answers."""

    def record(self, calls: Mapping[int, ModelCall]) -> None: ...

    def quarantine(self, choice: int, problem: TokenTruthError) -> None: ...

    async def synced(self) -> None: ...


class StreamCutError(UpstreamError):
    """A stream was cut and could not be continued; the choices concerned are quarantined."""

    default_code = "stream_cut"


@dataclass(frozen=True, slots=True)
class Completion:
    """A plain answer, the policy version that finished it, and how many tokens each choice has, in order."""

    answer: dict[str, Any]
    version: int
    tokens: list[int]


@dataclass(frozen=True)
class ChatSession:
    """Everything one call needs: ``version`` tells the policy version served now."""

    upstream: Upstream
    route: Route
    call: ChatCall
    attempts: int
    version: Callable[[], int]
    log: CallLog

    async def complete(self) -> Completion:
        """The plain answer; the call is recorded.

        Raises:
            UpstreamRefusalError: vLLM's 4xx.
            UpstreamError: no answer within the tries.
            UnavailableError: no engine serves, or the disk does not take the record.
        """
        retries = Retries(self.attempts)
        while True:
            recorder = Recorder(self.version(), self.call.samples)
            try:
                async with self.route.lease(self.call.samples) as base_url:
                    answer = await self.upstream.ask(base_url + self.call.path, self.call.body, self._read)
                    choices: list[dict[str, Any]] = answer.body.get("choices") or []
                    aborted = any(choice.get("finish_reason") in (None, "abort") for choice in choices)
                    if aborted or len(choices) < self.call.samples:
                        raise AbortedError
            except TransientError as exc:
                await retries.after(exc)
                continue
            recorder.add(answer.body, answer.sampled)
            version = self.version()
            async with self._recorded(recorder, version):
                shaped = Shaper(self.call.wants, self.call.model_name).answer(answer.body)
            return Completion(shaped, version, [choice.span()[1] for choice in recorder.choices])

    def _read(self, content: bytes) -> PlainAnswer:
        return read(content, self.call)

    async def stream(self) -> AsyncGenerator[list[Chunk]]:
        """The chunks for the caller, those together that came together; the call is recorded before a chunk with a
        finish reason is given out.

        Raises:
            UpstreamRefusalError: vLLM's 4xx.
            UpstreamError: the call could not be completed; chunks may have been given out before.
            StreamCutError: the same of some choices, while the others are complete.
            UnavailableError: no engine serves, or the disk does not take the record.
        """
        retries = Retries(self.attempts)
        shaper = Shaper(self.call.wants, self.call.model_name)
        while True:
            attempt = Attempt(self.call, shaper, self.version())
            cut: TransientError = AbortedError()
            try:
                async with self.route.lease(self.call.samples) as base_url:
                    events = self.upstream.events(base_url + self.call.path, self.call.body)
                    async with aclosing(events):
                        async for together in events:
                            ready: list[Chunk] = []
                            try:
                                for event in together:
                                    ready += attempt.take(self.call.chunk(event))
                            except UpstreamError:
                                if ready:
                                    yield ready
                                raise
                            if ready:
                                yield ready
                    # aborted before its first token, a choice has no finish reason at all
                    if attempt.cut():
                        raise cut
            except TransientError as exc:
                if attempt.cut() and not attempt.delivered:
                    await retries.after(exc)
                    continue
                cut = exc
            break
        failures: dict[int, UpstreamError] = {}
        sources = [self._continue(attempt, index, shaper, cut, failures) for index in attempt.cut()]
        async with aclosing(merged(*sources)) as chunks:
            async for chunk in chunks:
                yield [chunk]
        async with self._recorded(attempt.recorder, self.version(), failures):
            if ends := attempt.ends():
                yield ends
        for failure in failures.values():
            raise StreamCutError(failure.message) from failure
        if self.call.wants.usage_chunk:
            yield [shaper.usage_chunk(attempt.recorder.usage())]

    async def _continue(
        self, attempt: Attempt, index: int, shaper: Shaper, cut: TransientError, failures: dict[int, UpstreamError]
    ) -> AsyncGenerator[Chunk]:
        """Sample on after the tokens that choice ``index`` has, as often as it takes; notes in ``failures`` if it
        cannot be."""
        attempt.recorder.begin_continuation(index)
        try:
            if not attempt.continuable(index):
                raise UpstreamError(f"the stream was cut and cannot be continued exactly: {cut.message}")
            async with aclosing(self._continuation(attempt, index, shaper, cut)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except UpstreamError as exc:
            # the agent has seen, and may act on, tokens that are in no record
            failures[index] = exc
            problem = f"a stream was cut and could not be continued: {exc.message}"
            self.log.quarantine(index, TokenTruthError(problem, code="stream_cut"))

    async def _continuation(
        self, attempt: Attempt, index: int, shaper: Shaper, cut: TransientError
    ) -> AsyncGenerator[Chunk]:
        choice = attempt.recorder.choices[index]
        prompt_ids = attempt.recorder.prompt_ids or []
        retries = Retries(self.attempts)
        while True:
            await retries.after(cut)
            done = len(choice.response_ids)
            if done >= self.call.room(len(prompt_ids)):
                choice.finish_at("length")
                attempt.end(index, shaper.continued({"choices": [{"finish_reason": "length"}]}, index))
                return
            body = self.call.continuation(prompt_ids, choice.response_ids)
            try:
                async with self.route.lease(1) as base_url:
                    events = self.upstream.events(f"{base_url}/completions", body)
                    async with aclosing(events):
                        async for together in events:
                            for event in together:
                                if (shaped := self._continued(attempt, index, shaper, event, done)) is not None:
                                    yield shaped
                    if index in attempt.cut():
                        raise AbortedError
            except TransientError as exc:
                cut = exc
            if index not in attempt.cut():
                return

    def _continued(self, attempt: Attempt, index: int, shaper: Shaper, event: Chunk, done: int) -> Chunk | None:
        """Take in a chunk of a continuation that began after ``done`` tokens; what of it is for the caller now."""
        choice, prompt_ids = attempt.recorder.choices[index], attempt.recorder.prompt_ids or []
        for part in event.get("choices") or []:
            choice.add_continuation(part, prompt_ids)
        if event.get("usage"):
            choice.count_continuation(event["usage"], len(prompt_ids), done)
        if not event.get("choices"):
            return None
        shaped = without_abort(shaper.continued(event, index))
        if shaped["choices"][0]["finish_reason"] is None:
            return shaped
        attempt.end(index, shaped)
        return None

    @asynccontextmanager
    async def _recorded(self, recorder: Recorder, version: int, failures: Collection[int] = ()) -> AsyncGenerator[None]:
        """Record what is not among ``failures``, wait for the disk, and see the end of the answer out."""
        if not self.call.record:
            yield
            return
        calls: dict[int, ModelCall] = {}
        for index, call in enumerate(recorder.calls(version)):
            if index in failures:
                continue
            if self.call.not_text:
                call = TokenTruthError(
                    f"the conversation holds a part that is not text ({self.call.not_text:.40}); only text is trained",
                    code="not_text",
                )
            if isinstance(call, TokenTruthError):
                self.log.quarantine(index, call)
            else:
                calls[index] = call
        self.log.record(calls)
        try:
            await self.log.synced()
            yield
        except BaseException:
            # also the caller's leaving: it has not seen what stands in the record
            problem = TokenTruthError("an answer was recorded but could not be delivered", code="undelivered")
            for index in range(self.call.samples):
                self.log.quarantine(index, problem)
            raise
