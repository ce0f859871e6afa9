"""``POST /v1/chat/completions``: through the swarm, else through the fallback, else a 503 that says when to come back.

Invariant: an error answer means that nothing of the request was trained.

What became of the request's group is told in headers of a plain answer (``x-swarm-policy-version``, ``x-swarm-reward``,
``x-swarm-reward-mean``, ``x-swarm-trained``: ``true``, ``false``, or ``pending`` while the swarm server has not yet
acknowledged, and ``x-swarm-drop-reason``). A stream says it in the ``swarm`` object of the chunk that carries the last
``finish_reason`` (clients skip a field that they do not know), and in the same headers too when the group was done
before they had to leave, which they do with the first keep-alive.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterable
from typing import Any

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from adapters.dialects import ChatDialect, LLMRequest
from gateway.config import GatewayConfig
from gateway.exchange import Exchange, Reply, sse_headers
from gateway.fallback import Fallback
from gateway.fanout.episodes import Episodes, Serving, Waiting
from gateway.fanout.group import FanOut, GroupResult
from gateway.fanout.sampling import EpisodeLostError
from gateway.stats import DropReason, Stats
from swarm.errors import NotFoundError, OverloadedError, SwarmGatewayError, UnavailableError, UpstreamError
from swarm.http.asgi import read_json

#: Events that go out in one write: a long answer is thousands of them.
_EVENTS_PER_WRITE = 16
#: Each lost group was aborted, so repeating costs samples but never trains twice.
_GROUPS_PER_REQUEST = 3
#: Headers whose name says so much never reach a hook; one too many dropped is the lesser mistake.
_SECRET_HEADER = re.compile(r"auth|cookie|credential|key|passw|secret|session|token")


class ChatRoute:
    """ASGI endpoint; holds a place among ``max_in_flight`` for as long as a request is served."""

    def __init__(
        self, config: GatewayConfig, episodes: Episodes, fan_out: FanOut, fallback: Fallback | None, stats: Stats
    ) -> None:
        self._config = config
        self._episodes = episodes
        self._fan_out = fan_out
        self._fallback = fallback
        self._stats = stats
        self._dialect = ChatDialect()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stats = self._stats
        stats.requests += 1
        if stats.in_flight >= self._config.max_in_flight:
            raise OverloadedError(f"{stats.in_flight} requests are being served, which is the limit", retry_after=1.0)
        stats.in_flight += 1
        try:
            request = Request(scope, receive)
            call = self._dialect.parse(await read_json(request, self._config.max_body_bytes))
            headers = {name: value for name, value in request.headers.items() if not _SECRET_HEADER.search(name)}
            exchange = Exchange(
                lambda: self._answer(call, headers),
                keepalive=self._config.keepalive_seconds if call.stream else None,
                on_error=self._count_error,
            )
            await exchange(scope, receive, send)
        finally:
            stats.in_flight -= 1

    async def _answer(self, call: LLMRequest, headers: dict[str, str]) -> Reply:
        try:
            return self._reply(call, await self._run(call, headers))
        except (UnavailableError, UpstreamError) as exc:
            return await self._fall_back(call, exc)

    async def _run(self, call: LLMRequest, headers: dict[str, str]) -> GroupResult:
        """Run a group; and another when it was lost as a whole to a weight sync or a restart of the engine."""
        waited = Waiting(self._config)
        for left in reversed(range(_GROUPS_PER_REQUEST)):
            serving = await self._episodes.wait_for_job(waited)
            check_model(call.model, serving, self._config)
            try:
                return await self._fan_out.run(self._dialect, call, headers, waited, serving)
            except EpisodeLostError as exc:
                if not left:
                    raise
                # sampling has taken its time; the wait for the next group is a new one
                waited = Waiting(self._config)
                await waited.after(exc)
        raise AssertionError("unreachable")

    def _reply(self, call: LLMRequest, result: GroupResult) -> Reply:
        answer_id = f"chatcmpl-{result.group_id}"
        if not call.stream:
            body = self._dialect.completion(result.answers, answer_id)
            return Reply(_dump(body), headers={"content-type": "application/json", **result.headers()})
        chunks = self._dialect.chunks(
            result.answers, answer_id, include_usage=call.include_usage, last={"swarm": result.report()}
        )
        return Reply(_events(chunks), headers={**sse_headers(), **result.headers()})

    async def _fall_back(self, call: LLMRequest, error: UnavailableError | UpstreamError) -> Reply:
        if self._fallback is None:
            raise error
        reason = error.code or DropReason.UNAVAILABLE
        self._stats.fallbacks[reason] += 1
        return await self._fallback.chat_completions(call.body, reason)

    def _count_error(self, error: SwarmGatewayError) -> None:
        self._stats.errors[error.code or error.type] += 1


def check_model(name: str | None, serving: Serving, config: GatewayConfig) -> None:
    """Raise :class:`NotFoundError` unless ``name`` is the model that is served, an alias of it, or left out."""
    if name and serving.model and name not in (serving.model, *config.model_aliases):
        raise NotFoundError(
            f"The model `{name}` does not exist. This gateway serves `{serving.model}`: ask for that, or add `{name}` "
            "to the gateway's model_aliases (or make it the job's served_model_name).",
            code="model_not_found",
            param="model",
        )


async def _events(chunks: Iterable[dict[str, Any]]) -> AsyncIterator[bytes]:
    events: list[bytes] = []
    for chunk in chunks:
        events.append(b"data: " + _dump(chunk) + b"\n\n")
        if len(events) == _EVENTS_PER_WRITE:
            yield b"".join(events)
            events.clear()
    events.append(b"data: [DONE]\n\n")
    yield b"".join(events)


def _dump(body: dict[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
