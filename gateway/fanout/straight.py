"""Straight to the engine without an episode: nothing is recorded, nothing is trained."""

from __future__ import annotations

from gateway.fanout.ports import Route
from gateway.forms import Decided, Incoming, Live, Relayed


async def straight(route: Route, incoming: Incoming) -> Live | Decided:
    """One call of the swarm's engine (with ``n`` as asked); live where a stream was asked for.

    Raises:
        RelayedError: the engine finds fault with the request.
        UnavailableError: no engine can serve now; nothing was sampled.
        UpstreamError: it failed, or the deadline of a sample passed.
    """
    raise NotImplementedError


async def passed(route: Route, path: str, body: bytes) -> Relayed:
    """What the engine answers to ``body`` at another of its addresses (``/v1/completions``, ``/v1/embeddings``,
    ``/tokenize``); the model name in it is replaced by the one that is served.

    Raises: as :func:`straight`; but the engine's own refusal is an answer like any other.
    """
    raise NotImplementedError
