"""Answer through another OpenAI-compatible upstream while the swarm cannot; never trained.

Invariant: the upstream's status and bytes reach the application as they came.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Self

import httpx

from adapters.dialects import to_json
from gateway.config import UpstreamConfig
from gateway.forms import Incoming, Relayed
from swarm.errors import UnavailableError

_PASSED_ON = ("content-type", "retry-after", "x-should-retry", "x-ratelimit-remaining-requests", "cache-control")
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=3.0)


class Upstream:
    """One upstream; an async context manager."""

    def __init__(self, config: UpstreamConfig, timeout: float) -> None:
        self._http = httpx.AsyncClient(timeout=httpx.Timeout(timeout, connect=5.0), limits=_LIMITS)
        self._config = config

    async def relay(self, incoming: Incoming, reason: str) -> Relayed:
        """Send ``incoming`` on and stream back what comes.

        Args:
            incoming: the application's request, plain or streamed.
            reason: why the swarm did not answer; sent as ``x-swarm-drop-reason``, empty for none.

        Raises:
            UnavailableError: the upstream cannot be reached either.
        """
        body, model = incoming.call.body, self._config.model
        relayed = await self.forward(
            "POST", "/v1/chat/completions", {}, to_json({**body, "model": model} if model else body)
        )
        headers = {**relayed.headers, "x-swarm-trained": "false"} | ({"x-swarm-drop-reason": reason} if reason else {})
        return Relayed(relayed.status, headers, relayed.body, relayed.close)

    async def forward(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Relayed:
        """Send any request on; ``path`` begins with ``/v1``. Raises as :meth:`relay`."""
        key = self._config.api_key.get_secret_value()
        request = self._http.build_request(
            method,
            self._config.base_url.rstrip("/") + path.removeprefix("/v1"),
            content=body,
            headers={"content-type": "application/json", **headers}
            | ({"authorization": f"Bearer {key}"} if key else {}),
        )
        try:
            response = await self._http.send(request, stream=True)
        except httpx.HTTPError as exc:
            raise UnavailableError("neither the swarm nor the fallback upstream can be reached") from exc
        passed = {name: response.headers[name] for name in _PASSED_ON if name in response.headers}
        return Relayed(response.status_code, passed, _parts(response), response.aclose)

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._http.__aexit__(exc_type, exc, tb)


async def _parts(response: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for part in response.aiter_bytes():
            yield part
    except httpx.HTTPError as exc:
        raise UnavailableError(f"the fallback upstream broke off: {exc or type(exc).__name__}") from exc
