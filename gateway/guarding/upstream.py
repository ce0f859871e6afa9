"""A plain OpenAI-compatible upstream: answers without training anything.

Invariant: what it says reaches the application as it came, in the application's dialect; its key goes to it alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Self

from gateway.config import UpstreamConfig
from gateway.forms import Incoming, Outcome, Relayed


class Upstream:
    """One upstream behind its breaker; an async context manager."""

    def __init__(self, config: UpstreamConfig, timeout: float) -> None:
        """
        Args:
            config: where it is.
            timeout: seconds that an answer may take to begin, and a stream to be silent.
        """
        raise NotImplementedError

    @property
    def available(self) -> bool:
        """Whether a request would be sent there now."""
        raise NotImplementedError

    async def relay(self, incoming: Incoming, reason: str) -> Outcome:
        """Send ``incoming`` on in its own dialect; or as a chat, where the upstream does not speak that dialect, whose
        outcome is then rendered like any other.

        Args:
            reason: why nothing is trained; sent as ``x-swarm-drop-reason``, empty for none.

        Raises:
            UnavailableError: it cannot be reached, or its breaker is open.
            UpstreamError: it broke off, gave no answer in time, or refuses the gateway's key.
        """
        raise NotImplementedError

    async def forward(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes, *, query: str = ""
    ) -> Relayed:
        """Send any other request on (embeddings, ...); ``path`` begins with ``/v1``. Raises as :meth:`relay`."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        raise NotImplementedError
