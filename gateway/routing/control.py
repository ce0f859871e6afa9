"""The swarm client's requests over the gateway's own connections, which cost a fraction of httpx's time.

Invariant: whatever breaks comes out as httpx would have named it, for the client decides by that what it may repeat.
"""

from __future__ import annotations

import asyncio

import httpx

from swarm.client.flows import Send
from swarm.client.policy import Outcome, Reply
from swarm.http.client import ConnectionBrokenError, HttpClient


class ControlSender:
    """A :class:`swarm.client.transport.AsyncSender`; ``http`` is its own, and closed with it."""

    def __init__(self, http: HttpClient) -> None:
        self._http = http

    async def send(self, step: Send) -> Outcome:
        try:
            async with asyncio.timeout(step.seconds):
                answer = await self._http.request(step.method, step.url, step.content, step.headers)
        except ConnectionBrokenError as exc:
            return (httpx.ConnectError if exc.unsent else httpx.ReadError)(str(exc))
        except TimeoutError:
            return httpx.ReadTimeout(f"the answer took longer than {step.seconds:g} s")
        return Reply(answer.status, dict(answer.headers), answer.content)

    async def close(self) -> None:
        await self._http.close()
