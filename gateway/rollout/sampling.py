"""Samples the answers to a request at the swarm server: at the address of an episode, of a group, or of the engine.

Invariant: a call is repeated only where nothing can have been sampled; a second recorded call would be trained too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from adapters.dialects import ChatDialect, SampledAnswer
from adapters.dialects.jsons import error_in, object_in
from adapters.dialects.sse import data_in
from gateway.observability.request import trace_headers
from reward_hooks import Candidate, HookContext, Submission
from swarm.client import EpisodeEndpoint, EpisodeGroup
from swarm.concurrency import backoff
from swarm.errors import (
    FATAL_REQUEST,
    FatalRequestError,
    HookError,
    RelayedError,
    SwarmGatewayError,
    UnavailableError,
    UpstreamError,
)
from swarm.http.client import Answer as HttpAnswer
from swarm.http.client import ConnectionBrokenError, HttpClient, LiveAnswer, retry_after
from swarm.protocol import COMPLETION_TOKENS, OUTLIVE, PLACES, POLICY_VERSION, SAMPLES

#: Statuses of requests that are at fault themselves; other 4xx concern the episode.
_CALLERS_FAULT = frozenset({400, 413, 422})
#: Statuses of calls that were not begun and may be repeated.
_NOT_NOW = frozenset({429, 503})
_LONGEST_PAUSE = 2.0
#: Statuses of the data plane for an episode that is over or not ours.
_EPISODE_OVER = frozenset({401, 403, 404, 409, 410})
#: Codes of an episode that cannot be sampled at any more.
_GONE = frozenset({"episode_deleted", "engine_offline", "server_unreachable"})

Chunk = dict[str, Any]


class EpisodeLostError(UnavailableError):
    """The episode or its address is gone: another group may serve the request."""

    default_code = "episode_lost"


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer; latency in seconds."""

    answer: SampledAnswer
    latency: float
    policy_version: int | None


@dataclass(frozen=True, slots=True)
class UnrecordedGroup:
    """A group of ``size`` without episodes, at the engine's own address: its answers are sampled like those of a
    claimed group, and nothing of them is recorded."""

    base_url: str
    api_key: str = field(repr=False)
    size: int = 1

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> UnrecordedGroup:
        """Where the answer at ``index`` is sampled alone."""
        return self


#: Where to sample: an OpenAI base URL and its key.
Address = EpisodeEndpoint | EpisodeGroup | UnrecordedGroup


@dataclass(frozen=True, slots=True)
class Shaped:
    """The group of one request before it is claimed.

    Attributes:
        group_id: names the group in logs and in the answer's id.
        submission: the request bodies and their task.
        bodies: the same as JSON; each samples one answer.
        context: for the hooks.
        shares_call: whether one call may sample all answers.
        takes_partial: whether the job trains groups that lack answers.
        drop: why the group will not be trained, if that is known already.
        failure: of the submit hook.
    """

    group_id: str
    submission: Submission
    bodies: list[bytes]
    context: HookContext
    shares_call: bool
    takes_partial: bool
    drop: str | None
    failure: HookError | None = None

    def untrained(self, reason: str, size: int) -> Shaped:
        """The same for a group without episodes, of its first ``size`` answers if it has more; ``reason``: why."""
        return replace(
            self,
            submission=self.submission.model_copy(update={"requests": self.submission.requests[:size]}),
            bodies=self.bodies[:size],
            context=self.context.model_copy(update={"num_repeat": min(size, self.context.num_repeat)}),
            drop=self.drop if self.failure is not None else reason,
        )

    @property
    def may_train(self) -> bool:
        """Whether nothing is known yet that keeps the group from being trained."""
        return self.drop is None

    @property
    def answer_id(self) -> str:
        """The ``id`` of the resulting ``chat.completion``."""
        return f"{ChatDialect.id_prefix}{self.group_id}"


class LiveSample(NamedTuple):
    """An answer while it is sampled. Its chunks raise :class:`UpstreamError` where the stream holds an error, breaks
    off, or lasts beyond the deadline."""

    policy_version: int | None
    chunks: AsyncIterator[Chunk]


@dataclass(frozen=True)
class Sampler:
    """Samples over one pool of connections; deadlines are on the event loop's clock."""

    http: HttpClient

    async def sample(self, episode: Address, body: bytes, deadline: float) -> Sample:
        """Send ``body``, JSON of a plain (not streamed) request, to the episode's chat completions and read the answer.

        Raises:
            RelayedError: the engine finds fault with the request.
            EpisodeLostError: the episode is over, e.g. after a weight sync, or could not be served twice in a row.
            UpstreamError: anything else; status 504 at the deadline.
        """
        headers = _headers(episode)
        if isinstance(episode, UnrecordedGroup):
            headers[SAMPLES] = "1"
        answer, latency = await self._timed(episode, body, deadline, headers)
        return Sample(SampledAnswer.from_completion(object_in(answer.content)), latency, _version(answer.headers))

    async def sample_group(
        self, group: EpisodeGroup | UnrecordedGroup, indices: Sequence[int], body: bytes, deadline: float
    ) -> list[Sample]:
        """Sample an answer for the episodes ``indices`` of ``group``, in one call to the address of the group, which
        computes their prompt once; ``body`` has no ``n``. One sample per index, in their order; the latency of each is
        that of the call. Raises as :meth:`sample`; there are either all answers or none."""
        headers = _headers(group)
        if isinstance(group, UnrecordedGroup):
            headers[SAMPLES] = str(len(indices))
        elif len(indices) < len(group):
            headers[PLACES] = ",".join(map(str, indices))
        answer, latency = await self._timed(group, body, deadline, headers)
        counts = [int(count) for count in answer.headers.get(COMPLETION_TOKENS, "").split(",") if count.isdigit()]
        if len(counts) != len(indices):
            raise UpstreamError(f"the group's answer counts {len(counts)} choices", code="malformed_answer")
        version = _version(answer.headers)
        return [
            Sample(answer_of_choice, latency, version)
            for answer_of_choice in SampledAnswer.from_choices(object_in(answer.content), counts)
        ]

    async def complete(self, address: Address, body: bytes, deadline: float) -> tuple[dict[str, Any], int | None]:
        """The whole ``chat.completion`` that ``address`` gives, with all its choices, and its policy version; raises as
        :meth:`sample`, and :class:`UnavailableError` at once where that tries again."""
        answer = await self._post(address, body, deadline, _headers(address))
        data = object_in(answer.content) or {}
        SampledAnswer.from_completion(data)
        return data, _version(answer.headers)

    @asynccontextmanager
    async def stream(self, address: Address, body: bytes, deadline: float) -> AsyncGenerator[LiveSample]:
        """A streamed answer from its headers on, whole even if the engine goes on to its next weights without the
        episode. Raises as :meth:`sample`, and within the block where a connection breaks."""
        begun, headers = False, _headers(address) | {OUTLIVE: "1"}
        try:
            async with self.http.posted(_url(address), body, headers, seconds=_until(deadline)) as answer:
                if answer.status != 200:
                    raise _error_of(answer.status, answer.headers, await answer.read())
                begun = True
                yield LiveSample(_version(answer.headers), _chunks(answer))
        except TimeoutError:
            raise _too_late() from None
        except ConnectionBrokenError as exc:
            if begun:
                raise UpstreamError(f"the engine's answer broke off: {exc}", code="stream_cut") from exc
            raise _broken(exc) from exc

    async def answer_at(self, engine: Address, path: str, body: bytes, deadline: float) -> HttpAnswer:
        """The engine's answer at another ``path`` of its server, whatever its status.

        Raises:
            UnavailableError: the address cannot be reached.
            UpstreamError: status 504 at the deadline.
        """
        return await self._send(engine.base_url.removesuffix("/v1") + path, body, deadline, _headers(engine))

    async def _timed(
        self, address: Address, body: bytes, deadline: float, headers: Mapping[str, str]
    ) -> tuple[HttpAnswer, float]:
        """The answer and its latency; a call that was not begun is repeated once."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            return await self._post(address, body, deadline, headers), loop.time() - started
        except EpisodeLostError:
            raise
        except UnavailableError as exc:
            pause = backoff(1, exc.retry_after or 0.0, _LONGEST_PAUSE)
        if loop.time() + pause >= deadline:
            raise _too_late()
        await asyncio.sleep(pause)
        try:
            return await self._post(address, body, deadline, headers), loop.time() - started
        except UnavailableError as exc:
            raise EpisodeLostError(exc.message, code=exc.code if exc.code in _GONE else None) from exc

    async def _post(self, address: Address, body: bytes, deadline: float, headers: Mapping[str, str]) -> HttpAnswer:
        answer = await self._send(_url(address), body, deadline, headers)
        if answer.status != 200:
            raise _error_of(answer.status, answer.headers, answer.content)
        return answer

    async def _send(self, url: str, body: bytes, deadline: float, headers: Mapping[str, str]) -> HttpAnswer:
        try:
            return await self.http.post(url, body, headers, _until(deadline))
        except TimeoutError:
            raise _too_late() from None
        except ConnectionBrokenError as exc:
            raise _broken(exc) from exc


def candidate_of(answer: SampledAnswer, seconds: float, **more: Any) -> Candidate:
    """``answer``, which took ``seconds``, for hooks; ``more``: what else is known of it."""
    return Candidate(
        message=answer.message,
        text=answer.text,
        tool_calls=answer.message.get("tool_calls") or [],
        finish_reason=answer.finish_reason,
        completion_tokens=count_of(answer, "completion_tokens") or 0,
        prompt_tokens=count_of(answer, "prompt_tokens") or 0,
        latency_seconds=seconds,
        **more,
    )


def count_of(answer: SampledAnswer, name: str) -> int | None:
    """A count of its usage; ``None`` where its server says none."""
    count = answer.usage.get(name)
    return count if isinstance(count, int) and 0 <= count < 2**53 else None


def _too_late() -> UpstreamError:
    """The error of a sample at its deadline."""
    return UpstreamError("no answer was sampled before the deadline", code="sample_timeout", status=504)


def _until(deadline: float) -> float:
    return deadline - asyncio.get_running_loop().time()


def _url(address: Address) -> str:
    return f"{address.base_url}/chat/completions"


def _headers(address: Address) -> dict[str, str]:
    headers = {"content-type": "application/json", **trace_headers()}
    if address.api_key:
        headers["authorization"] = f"Bearer {address.api_key}"
    return headers


async def _chunks(answer: LiveAnswer) -> AsyncIterator[Chunk]:
    try:
        async for event in data_in(answer.parts()):
            yield _chunk_of(event)
    except TimeoutError:
        raise _too_late() from None


def _chunk_of(event: str) -> Chunk:
    chunk = object_in(event)
    if chunk is None:
        raise UpstreamError("the engine's stream holds something other than a chunk", code="malformed_answer")
    if (error := chunk.get("error")) is not None:
        message = error.get("message") if isinstance(error, dict) else error
        raise UpstreamError(f"the engine failed: {message}", code="engine_failed")
    return chunk


def _broken(exc: ConnectionBrokenError) -> UnavailableError:
    if exc.unsent:
        return UnavailableError(
            f"the episode's address cannot be reached: {exc}", code="server_unreachable", retry_after=0.2
        )
    return EpisodeLostError(f"the connection to the episode broke: {exc}")


def _error_of(status: int, headers: Mapping[str, str], content: bytes) -> SwarmGatewayError:
    error = error_in(content)
    code = error.get("code")
    # a 404: a job with another model has begun since; another group cannot serve it either
    if status in _CALLERS_FAULT or (status == 404 and code == "model_not_found"):
        return RelayedError(status, error or {"message": content[:500].decode(errors="replace")})
    message = str(error.get("message", f"status {status}"))
    if code == FATAL_REQUEST:
        return FatalRequestError(message)
    if status in (502, 503) and code is None:
        # a proxy's, whose server is away
        code = "server_unreachable"
    if status in _EPISODE_OVER or code in _GONE:
        return EpisodeLostError(f"the episode cannot be used any more: {message}", code=code if code in _GONE else None)
    if status in _NOT_NOW and headers.get("x-should-retry") != "false":
        return UnavailableError(
            f"the engine cannot serve now: {message}",
            code=code if isinstance(code, str) else None,
            retry_after=retry_after(headers) or 0.5,
        )
    return UpstreamError(f"the engine failed: {message}", code="engine_failed")


def _version(headers: Mapping[str, str]) -> int | None:
    version = headers.get(POLICY_VERSION, "")
    return int(version) if version.isdigit() else None
