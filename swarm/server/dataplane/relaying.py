"""Calls of vLLM's other addresses, passed on as they are but for the name of the model.

Invariant: an answer that vLLM aborted (its weights are being replaced) never reaches a caller: it is asked for again,
or told as an error where the caller has seen some of it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from swarm.server.dataplane.failures import AbortedError, Retries, TransientError
from swarm.server.dataplane.replicas import Route
from swarm.server.dataplane.upstream import Upstream

Body = dict[str, Any]


@dataclass(frozen=True)
class RelayedCall:
    """One call.

    Args:
        upstream: vLLM's replicas.
        route: the way to one of them.
        path: of vLLM, such as ``/v1/completions``.
        body: for vLLM, with its own name of the model.
        model_name: what the answer calls the model.
        attempts: tries that it gets.
    """

    upstream: Upstream
    route: Route
    path: str
    body: Body
    model_name: str
    attempts: int

    async def complete(self) -> Body:
        """The plain answer.

        Raises:
            UpstreamRefusalError: vLLM's 4xx.
            UpstreamError: no answer within the tries.
            UnavailableError: no engine serves.
        """
        retries = Retries(self.attempts)
        while True:
            try:
                async with self.route.lease(1) as base_url:
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
                    self.route.lease(1) as base_url,
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
