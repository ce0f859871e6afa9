"""The answer of an upstream that was asked by a chat, for an application of another dialect.

Invariant: what comes out is what the fan-out gives too, so that every dialect can be rendered from it.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, cast

from adapters.dialects import Answer, ChatDialect
from adapters.dialects.sse import SseDecoder
from gateway.types import Decided, Live, Relayed
from swarm.errors import RelayedError, UnavailableError, UpstreamError

_NO_ROUTE = frozenset({404, 405, 501})


def speaks_no(relayed: Relayed) -> bool:
    """Whether an answer says that there is no such address, rather than no such model."""
    if relayed.status not in _NO_ROUTE:
        return False
    error = _error(relayed.body)
    return "model" not in f"{error.get('code')} {error.get('message')}".lower()


def read_chat(relayed: Relayed, headers: Mapping[str, str]) -> Decided | Live:
    """The outcome that a chat's answer is.

    Args:
        relayed: whole, or a stream of events.
        headers: of the outcome.

    Raises:
        RelayedError, UnavailableError, UpstreamError: it is an error.
    """
    if relayed.status != 200:
        raise _failure(relayed)
    if not isinstance(relayed.body, bytes):
        return Live(_chunks(relayed.body), headers, relayed.close)
    completion = _object(relayed.body)
    answer = Answer.from_completion(completion)

    async def chunks() -> AsyncGenerator[dict[str, Any]]:
        for chunk in ChatDialect().chunks([answer], str(completion.get("id", "")), include_usage=True):
            yield chunk

    return Decided(completion, chunks, headers)


async def _chunks(body: AsyncIterator[bytes]) -> AsyncGenerator[dict[str, Any]]:
    decoder = SseDecoder()
    async for part in body:
        for event in decoder.feed(part):
            if event == "[DONE]":
                return
            chunk = _object(event.encode())
            if "error" in chunk:
                raise UpstreamError(str(_error(event.encode()).get("message")), code="upstream_error")
            yield chunk


def _failure(relayed: Relayed) -> RelayedError | UnavailableError | UpstreamError:
    error = _error(relayed.body)
    message = str(error.get("message") or f"the upstream answered {relayed.status}")
    if relayed.status in (429, 503):
        pause = relayed.headers.get("retry-after", "")
        return UnavailableError(message, code="upstream_busy", retry_after=float(pause) if pause.isdecimal() else 1.0)
    if relayed.status < 500:
        return RelayedError(relayed.status, {**error, "message": message})
    return UpstreamError(message, code="upstream_failed")


def _error(body: bytes | AsyncIterator[bytes]) -> dict[str, Any]:
    try:
        error = json.loads(body)["error"] if isinstance(body, bytes) else None
    except (ValueError, LookupError, TypeError):
        error = None
    return cast("dict[str, Any]", error) if isinstance(error, dict) else {}


def _object(body: bytes) -> dict[str, Any]:
    try:
        data: Any = json.loads(body)
    except ValueError as exc:
        raise UpstreamError(f"the upstream's answer is not JSON: {exc}", code="malformed_answer") from exc
    if not isinstance(data, dict):
        raise UpstreamError("the upstream's answer is no JSON object", code="malformed_answer")
    return cast("dict[str, Any]", data)
