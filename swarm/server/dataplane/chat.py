"""One chat call through vLLM, plain or streamed, and what is recorded of it.

Invariant: ``finish_reason: "abort"`` (vLLM's word for "the weights are being replaced") never reaches a caller; what is
recorded is what was delivered, token for token.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from swarm.errors import TokenTruthError, UpstreamError
from swarm.server.dataplane.answers import Shaper
from swarm.server.dataplane.recording import Recorder
from swarm.server.dataplane.requests import ChatCall
from swarm.server.dataplane.upstream import Retries, TransientError, Upstream
from swarm.types import ModelCall


class CallLog(Protocol):
    """Where a finished call goes."""

    def record(self, call: ModelCall) -> None: ...

    def quarantine(self, reason: str) -> None: ...


@dataclass(frozen=True)
class ChatSession:
    """Everything one call needs: ``base_url`` of its replica, ``version`` tells the policy version served now."""

    upstream: Upstream
    base_url: str
    call: ChatCall
    attempts: int
    version: Callable[[], int]
    log: CallLog

    async def complete(self) -> tuple[dict[str, Any], int]:
        """The plain answer and the policy version that finished it.

        Raises:
            UpstreamRefusalError: vLLM's 4xx.
            UpstreamError: no answer within the tries.
        """
        retries = Retries(self.attempts)
        while True:
            recorder = Recorder(self.version())
            try:
                answer = await self.upstream.post(f"{self.base_url}/chat/completions", self.call.body)
                choices: list[dict[str, Any]] = answer.get("choices") or []
                if not choices or any(choice.get("finish_reason") in (None, "abort") for choice in choices):
                    raise TransientError("vLLM aborted the call")
            except TransientError as exc:
                await retries.after(exc)
                continue
            recorder.prompt_ids = answer.get("prompt_token_ids")
            recorder.add_choice(choices[0])
            recorder.add_usage(answer.get("usage") or {})
            version = self.version()
            self._record(recorder, version)
            return Shaper(self.call.wants, self.call.model_name).answer(answer), version

    async def stream(self) -> AsyncGenerator[dict[str, Any]]:
        """The chunks for the caller; the call is recorded before the chunk with the finish reason is given out.

        Raises:
            UpstreamRefusalError: vLLM's 4xx.
            UpstreamError: the call could not be completed; chunks may have been given out before.
        """
        retries = Retries(self.attempts)
        shaper = Shaper(self.call.wants, self.call.model_name)
        while True:
            attempt = _ChatAttempt(self, shaper)
            try:
                async with aclosing(attempt.chunks()) as chunks:
                    async for chunk in chunks:
                        yield chunk
                break
            except TransientError as exc:
                if not attempt.delivered:
                    await retries.after(exc)
                    continue
                cut = exc
            try:
                async with aclosing(self._continue(attempt, shaper, retries, cut)) as chunks:
                    async for chunk in chunks:
                        yield chunk
            except UpstreamError:
                # the agent has seen, and may act on, tokens that are in no record
                self.log.quarantine("a stream was cut and could not be continued")
                raise
            break
        self._record(attempt.recorder, self.version())
        for chunk in attempt.ends:
            yield chunk
        if self.call.wants.usage_chunk:
            yield shaper.usage_chunk(attempt.recorder.usage)

    async def _continue(
        self, attempt: _ChatAttempt, shaper: Shaper, retries: Retries, cut: TransientError
    ) -> AsyncGenerator[dict[str, Any]]:
        """Sample on after the tokens that ``attempt`` has delivered, as often as it takes."""
        recorder = attempt.recorder
        prompt_ids = recorder.prompt_ids
        if not (self.call.continuable and attempt.plain and prompt_ids) or recorder.problem:
            raise UpstreamError(
                f"the stream was cut and cannot be continued exactly: {cut.message}", code="stream_cut"
            ) from cut
        while True:
            await retries.after(cut)
            done = len(recorder.response_ids)
            if done >= self.call.room(len(prompt_ids)):
                recorder.finish_reason = "length"
                total = len(prompt_ids) + done
                recorder.add_usage({"prompt_tokens": total, "total_tokens": total}, done)
                attempt.ends.append(shaper.continued({"choices": [{"finish_reason": "length"}]}))
                return
            body = self.call.continuation(prompt_ids, recorder.response_ids)
            try:
                async with aclosing(self.upstream.events(f"{self.base_url}/completions", body)) as chunks:
                    async for chunk in chunks:
                        for choice in chunk.get("choices") or []:
                            recorder.add_completion_choice(choice)
                        if chunk.get("usage"):
                            recorder.add_usage(chunk["usage"], done)
                        if not chunk.get("choices"):
                            continue
                        shaped = shaper.continued(chunk)
                        if _finish_of(chunk) not in (None, "abort"):
                            attempt.ends.append(shaped)
                        else:
                            yield _without_finish(shaped)
                cut = TransientError("vLLM aborted the call")
            except TransientError as exc:
                cut = exc
            if attempt.ends:
                return

    def _record(self, recorder: Recorder, version: int) -> None:
        if not self.call.record:
            return
        try:
            self.log.record(recorder.call(f"call-{uuid.uuid4().hex}", version))
        except TokenTruthError as exc:
            self.log.quarantine(exc.message)


class _ChatAttempt:
    """One try of a streamed chat call."""

    def __init__(self, session: ChatSession, shaper: Shaper) -> None:
        self._session = session
        self._shaper = shaper
        self.recorder = Recorder(session.version())
        #: whether the caller has seen anything of this try
        self.delivered = False
        #: whether all tokens so far became plain text, so that the rest may come as text
        self.plain = True
        #: the chunks with a finish reason, held back until the tokens are recorded
        self.ends: list[dict[str, Any]] = []

    async def chunks(self) -> AsyncGenerator[dict[str, Any]]:
        """All chunks but the last.

        Raises:
            TransientError: aborted or broken off; :attr:`delivered` tells whether anything was given out.
        """
        opening: list[dict[str, Any]] = []
        url = f"{self._session.base_url}/chat/completions"
        try:
            async with aclosing(self._session.upstream.events(url, self._session.call.body)) as events:
                async for chunk in events:
                    self._take_in(chunk)
                    if not chunk.get("choices"):
                        continue  # the usage: given out at the end
                    finish = _finish_of(chunk)
                    shaped = self._shaper.chunk(chunk)
                    if finish == "abort":
                        if self.delivered:
                            yield _without_finish(shaped)
                        raise TransientError("vLLM aborted the call")
                    if finish is None and not self.delivered and not _says_something(shaped):
                        # hold the role back: until it is out, the whole call can be repeated
                        opening.append(shaped)
                        continue
                    self.delivered = True
                    for held in opening:
                        yield held
                    opening.clear()
                    if finish is not None:
                        self.ends.append(shaped)
                    else:
                        yield shaped
        except TransientError:
            if len(self.ends) < self._session.call.samples:
                raise
        if len(self.ends) < self._session.call.samples:
            # aborted before its first token, vLLM sends no finish reason at all
            raise TransientError("vLLM aborted the call")

    def _take_in(self, chunk: dict[str, Any]) -> None:
        if chunk.get("prompt_token_ids") is not None:
            self.recorder.prompt_ids = chunk["prompt_token_ids"]
        if chunk.get("usage"):
            self.recorder.add_usage(chunk["usage"])
        for choice in chunk.get("choices") or []:
            self.recorder.add_choice(choice)
            delta = choice.get("delta") or {}
            # a parser that holds text back sends tokens without content
            held_back = bool(choice.get("token_ids")) and "content" not in delta
            if held_back or any(delta.get(key) for key in delta.keys() - {"role", "content"}):
                self.plain = False


def _finish_of(chunk: dict[str, Any]) -> str | None:
    """``abort`` if any choice was aborted, else the finish reason of the chunk's choice."""
    reasons = [choice.get("finish_reason") for choice in chunk["choices"]]
    return "abort" if "abort" in reasons else next((reason for reason in reasons if reason), None)


def _says_something(chunk: dict[str, Any]) -> bool:
    """Whether a chunk tells the caller more than the role."""
    return any(
        any(value for key, value in (choice.get("delta") or {}).items() if key != "role") for choice in chunk["choices"]
    )


def _without_finish(chunk: dict[str, Any]) -> dict[str, Any]:
    for choice in chunk["choices"]:
        if choice.get("finish_reason") == "abort":
            choice["finish_reason"] = choice["stop_reason"] = None
    return chunk
