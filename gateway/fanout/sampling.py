"""Sample one answer through one episode's own address, or an answer for each episode through their group's.

Invariant: a call is repeated only where nothing can have been sampled; a second recorded call would be trained too.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from adapters.dialects import Answer
from swarm.client import EpisodeEndpoint, EpisodeGroup
from swarm.errors import RelayedError, SwarmGatewayError, UnavailableError, UpstreamError

#: Statuses by which the engine finds fault with the caller's own request; other 4xx concern the episode.
_CALLERS_FAULT = frozenset({400, 413, 422})
#: Statuses that say: not begun, come back.
_NOT_NOW = frozenset({429, 503})
#: Exceptions after which the request was certainly not read.
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
_LONGEST_PAUSE = 2.0
#: Statuses by which the data plane says that the episode is over or not ours.
_EPISODE_OVER = frozenset({401, 403, 404, 409, 410})
#: Codes of a 503 that no second try of this episode can cure.
_GONE = frozenset({"episode_deleted", "engine_offline"})

#: The header by which the group's answer says how many tokens each choice has, in order.
_COMPLETION_TOKENS = "x-swarm-completion-tokens"


class EpisodeLostError(UnavailableError):
    """The episode went away, or its address did: another group may serve the request, this episode never will."""

    default_code = "episode_lost"


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer with what is known about how it came to be; latency in seconds."""

    answer: Answer
    latency: float
    policy_version: int | None


class _Address(Protocol):
    @property
    def base_url(self) -> str: ...

    @property
    def api_key(self) -> str: ...


class Sampler:
    """Samples over one pooled HTTP client."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def sample(self, episode: EpisodeEndpoint, body: bytes, deadline: float) -> Sample:
        """Send ``body`` to the episode's chat completions and read the answer.

        Args:
            episode: a claimed episode.
            body: JSON of a plain (not streamed) Chat Completions request.
            deadline: on the event loop's clock.

        Raises:
            RelayedError: the engine finds fault with the request.
            EpisodeLostError: the episode is over, e.g. because the engine stopped or went on to its next weights, or it
                could not be served twice in a row.
            UpstreamError: anything else, the deadline included (status 504).
        """
        response, latency = await self._timed(episode, body, deadline)
        return Sample(Answer.from_completion(_json(response)), latency, _version(response))

    async def sample_group(self, group: EpisodeGroup, body: bytes, deadline: float) -> list[Sample]:
        """Sample an answer for each episode of ``group`` in one call, which computes their prompt once.

        Args:
            group: with an address of its own.
            body: see :meth:`sample`; without ``n``.
            deadline: on the event loop's clock.

        Returns:
            One sample per episode, in their order; the latency of each is that of the call.

        Raises:
            As :meth:`sample`; there are either all answers or none.
        """
        response, latency = await self._timed(group, body, deadline)
        counts = [int(count) for count in response.headers.get(_COMPLETION_TOKENS, "").split(",") if count.isdigit()]
        if len(counts) != len(group):
            raise UpstreamError(f"the group's answer counts {len(counts)} choices", code="malformed_answer")
        version = _version(response)
        return [Sample(answer, latency, version) for answer in Answer.from_choices(_json(response), counts)]

    async def _timed(self, address: _Address, body: bytes, deadline: float) -> tuple[httpx.Response, float]:
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            async with asyncio.timeout_at(deadline):
                response = await self._post_twice(address, body)
        except TimeoutError:
            late = UpstreamError("no answer was sampled before the deadline", code="sample_timeout")
            late.status = 504
            raise late from None
        return response, loop.time() - started

    async def _post_twice(self, address: _Address, body: bytes) -> httpx.Response:
        try:
            return await self._post(address, body)
        except EpisodeLostError:
            raise
        except UnavailableError as exc:
            pause = min(exc.retry_after or 0, _LONGEST_PAUSE)
        await asyncio.sleep(pause * random.uniform(0.5, 1.0))
        try:
            return await self._post(address, body)
        except UnavailableError as exc:
            raise EpisodeLostError(exc.message) from exc

    async def _post(self, address: _Address, body: bytes) -> httpx.Response:
        try:
            response = await self._http.post(
                f"{address.base_url}/chat/completions",
                content=body,
                headers={"authorization": f"Bearer {address.api_key}", "content-type": "application/json"},
            )
        except _NOT_SENT as exc:
            raise UnavailableError(f"the episode's address cannot be reached: {exc}", retry_after=0.2) from exc
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            reason = str(exc) or type(exc).__name__
            raise EpisodeLostError(f"the connection to the episode broke: {reason}") from exc
        if response.status_code != 200:
            raise _error_of(response)
        return response


def _error_of(response: httpx.Response) -> SwarmGatewayError:
    status = response.status_code
    data = _json(response)
    error: Any = data.get("error") if isinstance(data, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    # a job with another model has begun since the request was read; another group cannot serve it either
    if status in _CALLERS_FAULT or (status == 404 and code == "model_not_found"):
        return RelayedError(status, error if isinstance(error, dict) else {"message": response.text[:500]})
    message = str(error.get("message")) if isinstance(error, dict) else f"status {status}"
    if status in _EPISODE_OVER or code in _GONE:
        return EpisodeLostError(f"the episode cannot be used any more: {message}")
    if status in _NOT_NOW and response.headers.get("x-should-retry") != "false":
        pause = response.headers.get("retry-after", "")
        return UnavailableError(
            f"the engine cannot serve now: {message}", retry_after=float(pause) if pause.isdigit() else 0.5
        )
    return UpstreamError(f"the engine failed: {message}", code="engine_failed")


def _version(response: httpx.Response) -> int | None:
    version = response.headers.get("x-swarm-policy-version", "")
    return int(version) if version.isdigit() else None


def _json(response: httpx.Response) -> Any:
    try:
        return json.loads(response.content)
    except ValueError:
        return None
