"""Calls of vLLM's other routes, forwarded unchanged except for the name of the model.

Invariant: an answer that vLLM aborted (it replaces its weights) never reaches a caller: the call is repeated, or fails
if the caller has seen a part of the answer.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from swarm.server.dataplane.replicas import Placement
from swarm.server.dataplane.upstream import AbortedError, Body, Retries, TransientError, Upstream


@dataclass(frozen=True)
class RelayedCall:
    """One call.

    Args:
        upstream: the client of vLLM.
        placement: chooses the replica of each attempt.
        path: vLLM's, such as ``/v1/completions``.
        body: the request for vLLM, with vLLM's name of the model.
        model_name: the model's name in the answer.
        attempts: how often the call is tried.
    """

    upstream: Upstream
    placement: Placement
    path: str
    body: Body
    model_name: str
    attempts: int

    async def complete(self) -> Body:
        """The plain answer.

        Raises:
            UpstreamRefusalError: vLLM's 4xx.
            UpstreamError: no answer within the attempts.
            UnavailableError: no engine serves.
        """
        retries = Retries(self.attempts)
        while True:
            try:
                async with self.placement.lease(1) as base_url:
                    answer = await self.upstream.post(self._url(base_url), self.body)
                    if _aborted(answer):
                        raise AbortedError
            except TransientError as exc:
                await retries.after(exc)
                continue
            return self._named(answer)

    async def stream(self) -> AsyncGenerator[Body]:
        """The events of a streamed answer; errors as of :meth:`complete`, also between two events."""
        retries = Retries(self.attempts)
        begun = False
        while True:
            try:
                async with (
                    self.placement.lease(1) as base_url,
                    aclosing(self.upstream.events(self._url(base_url), self.body)) as events,
                ):
                    async for together in events:
                        for event in together:
                            if _aborted(event):
                                raise AbortedError
                            begun = True
                            yield self._named(event)
                return
            except TransientError as exc:
                if begun:
                    raise
                await retries.after(exc)

    def _url(self, base_url: str) -> str:
        return base_url.removesuffix("/v1") + self.path

    def _named(self, answer: Body) -> Body:
        return answer | {"model": self.model_name} if "model" in answer else answer


def _aborted(answer: Body) -> bool:
    choices: list[Body] = answer.get("choices") or []
    return any(choice.get("finish_reason") == "abort" for choice in choices)
