"""The way to vLLM: pooled connections, and errors told apart by what helps.

Invariant: whatever vLLM or the network does comes out as one of two errors: its own refusal (passed on as it is), or
something a retry may cure.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, cast

import httpx

from swarm.errors import UpstreamError
from swarm.server.dataplane.failures import TransientError, UnreachableError, UpstreamRefusalError
from swarm.server.dataplane.jsons import decode, encode
from swarm.server.dataplane.replicas import Replicas
from swarm.server.dataplane.sse import SseDecoder

#: vLLM's server drops idle connections after 5 s; reusing one in that moment would fail
_KEEPALIVE_SECONDS = 4.0
_JSON = {"content-type": "application/json"}
_RETRIED_STATUSES = frozenset({500, 502, 503, 504})


class Upstream:
    """A client of vLLM's replicas; :meth:`close` it."""

    def __init__(self) -> None:
        # calls are bounded by the deadline around them: silence is normal while weights are synced
        self._client = httpx.AsyncClient(
            limits=httpx.Limits(max_keepalive_connections=512, keepalive_expiry=_KEEPALIVE_SECONDS),
            timeout=httpx.Timeout(None, connect=5.0),
            # a proxy set for the outside world must not see the engine's traffic
            trust_env=False,
            # only ever http://, and loading certificates takes 0.1 s
            verify=False,
        )
        #: where the calls go
        self.replicas = Replicas(self._client)

    async def close(self) -> None:
        await self.replicas.close()
        await self._client.aclose()

    async def post(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        """The JSON answer to ``body``.

        Raises:
            UpstreamRefusalError: a 4xx.
            TransientError: a 5xx or a broken connection.
        """
        try:
            response = await self._client.post(url, content=encode(body), headers=_JSON)
        except httpx.TransportError as exc:
            raise _unreachable(exc) from exc
        if response.status_code != 200:
            raise _failure(response)
        try:
            answer: Any = decode(response.content)
        except ValueError as exc:
            raise TransientError(f"vLLM's answer is not JSON: {exc}") from exc
        if not isinstance(answer, dict):
            raise TransientError(f"vLLM's answer is no object: {response.text[:500]}")
        return cast("dict[str, Any]", answer)

    async def events(self, url: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """The chunks of the streamed answer to ``body``; it ends after ``[DONE]``.

        Raises:
            UpstreamRefusalError: a 4xx, by status or as an error event.
            TransientError: a 5xx, an error event, or a stream that breaks off.
        """
        try:
            async with self._client.stream("POST", url, content=encode(body), headers=_JSON) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise _failure(response)
                decoder = SseDecoder()
                async for data in response.aiter_bytes():
                    for event in decoder.feed(data):
                        if event == "[DONE]":
                            return
                        yield _chunk(event)
        except httpx.TransportError as exc:
            raise _unreachable(exc) from exc
        raise TransientError("vLLM's stream broke off")


def _chunk(event: str) -> dict[str, Any]:
    try:
        chunk: Any = decode(event)
    except ValueError as exc:
        raise TransientError(f"vLLM sent a chunk that is not JSON: {exc}") from exc
    if not isinstance(chunk, dict):
        raise TransientError(f"vLLM sent a chunk that is no object: {event[:500]}")
    shaped = cast("dict[str, Any]", chunk)
    if "error" in shaped:
        code: Any = shaped["error"].get("code") if isinstance(shaped["error"], dict) else None
        if isinstance(code, int) and 400 <= code < 500:
            raise UpstreamRefusalError(code, {"error": shaped["error"]})
        raise TransientError(f"vLLM failed: {event[:500]}")
    return shaped


def _unreachable(exc: httpx.TransportError) -> TransientError:
    kind = UnreachableError if isinstance(exc, httpx.ConnectError | httpx.ConnectTimeout) else TransientError
    return kind(f"the connection to vLLM failed: {type(exc).__name__}: {exc}")


def _failure(response: httpx.Response) -> UpstreamError:
    text = response.text
    if response.status_code in _RETRIED_STATUSES:
        return TransientError(f"vLLM answered {response.status_code}: {text[:500]}")
    try:
        payload: Any = response.json()
    except ValueError:
        payload = None
    if not isinstance(payload, dict) or "error" not in payload:
        payload = {"error": {"message": text[:2000], "type": "invalid_request_error", "param": None, "code": None}}
    return UpstreamRefusalError(response.status_code, payload)
