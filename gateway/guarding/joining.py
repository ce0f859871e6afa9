"""Retries of one request share one outcome, so that an SDK that asks again trains nothing twice.

Invariant: work that nobody waits for any more is cancelled; one caller's leaving never cancels another's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from gateway.forms import Incoming, Outcome
from gateway.guarding.admission import Guarded


class Joining:
    """All requests in flight that a retry may join; of one event loop."""

    async def run(self, incoming: Incoming, route: Guarded, produce: Callable[[], Awaitable[Outcome]]) -> Outcome:
        """The outcome of ``produce()``, or of an earlier request of which this one is a retry.

        Args:
            produce: makes the outcome; called once for all who join. It takes its place (admission) itself: who joins
                needs none, and work that waits for its retry keeps its own. It is cancelled when the last of its
                callers has left.

        Raises:
            ConflictError: an ``idempotency-key`` came before with another body.
        """
        raise NotImplementedError
