"""Answer through another OpenAI-compatible upstream while the swarm cannot; never trained.

Invariant: the upstream's status and bytes reach the application as they came.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx

from adapters.dialects import to_json
from gateway.config import UpstreamConfig
from gateway.exchange import Reply
from swarm.errors import UnavailableError

_PASSED_ON = ("content-type", "retry-after", "x-should-retry", "x-ratelimit-remaining-requests", "cache-control")


class Fallback:
    """One upstream, over the gateway's pooled HTTP client."""

    def __init__(self, http: httpx.AsyncClient, config: UpstreamConfig) -> None:
        self._http = http
        self._config = config

    async def chat_completions(self, body: dict[str, Any], reason: str) -> Reply:
        """Send ``body`` on and stream back what comes.

        Args:
            body: the application's request, plain or streamed.
            reason: why the swarm did not answer; sent as ``x-swarm-drop-reason``.

        Raises:
            UnavailableError: the upstream cannot be reached either.
        """
        config = self._config
        key = config.api_key.get_secret_value()
        request = self._http.build_request(
            "POST",
            f"{config.base_url.rstrip('/')}/chat/completions",
            content=to_json({**body, "model": config.model} if config.model else body),
            headers={"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {}),
        )
        try:
            response = await self._http.send(request, stream=bool(body.get("stream")))
        except httpx.HTTPError as exc:
            raise UnavailableError(f"neither the swarm nor the fallback upstream can be reached ({reason})") from exc
        headers = {name: response.headers[name] for name in _PASSED_ON if name in response.headers}
        headers |= {"x-swarm-trained": "false", "x-swarm-drop-reason": reason}
        whole = response.content if response.is_closed else _parts(response)
        return Reply(body=whole, status=response.status_code, headers=headers, close=response.aclose)


async def _parts(response: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for part in response.aiter_bytes():
            yield part
    except httpx.HTTPError as exc:
        raise UnavailableError(f"the fallback upstream broke off: {exc or type(exc).__name__}") from exc
