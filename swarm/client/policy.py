"""When a call is repeated, and after how long: the one retry policy of both clients.

Invariant: every retry is counted and bounded in number and in time, and delayed with jitter but for one: a connection
that broke is replaced at once, once per call. All calls of the swarm wire may be repeated: reads and commands by
nature, claims and ends because they carry the same idempotency key each time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import httpx

#: Answers that say "not now": the server, or a proxy in front of it, did not act on the request.
_NOT_NOW = frozenset({502, 503, 504})


@dataclass(frozen=True)
class Reply:
    """A complete HTTP answer; header names are lower-case."""

    status: int
    headers: dict[str, str]
    content: bytes


#: What sending a request leads to. An error is a value here so that flows can decide about it.
Outcome = Reply | httpx.RequestError


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential backoff with jitter.

    The k-th delay is uniform in [d/2, d] with d = min(``cap``, ``base`` * 2**k) seconds, or what ``retry-after`` asks
    for if that is longer. It ends after ``attempts`` tries or ``total`` seconds, whichever comes first.
    """

    attempts: int = 10
    base: float = 0.2
    cap: float = 5.0
    total: float = 60.0

    def delay(self, failures: int, retry_after: float = 0.0) -> float:
        """Seconds to wait after the ``failures``-th failure in a row (1 for the first)."""
        ceiling = min(self.cap, self.base * 2 ** (failures - 1))
        return max(ceiling * random.uniform(0.5, 1.0), retry_after)


def is_broken_connection(outcome: Outcome) -> bool:
    """Whether the connection broke under the request, as one kept alive does when its server was restarted."""
    return isinstance(outcome, httpx.RemoteProtocolError | httpx.ReadError | httpx.WriteError)


def may_retry(outcome: Outcome) -> bool:
    """Whether repeating the call unchanged can lead to another outcome.

    ``x-should-retry`` is final where the server says it; then ``retry-after``; then the status.
    """
    if isinstance(outcome, httpx.RequestError):
        return isinstance(outcome, httpx.TransportError) and not isinstance(outcome, httpx.UnsupportedProtocol)
    if outcome.status < 400:
        return False
    said = outcome.headers.get("x-should-retry")
    if said in ("true", "false"):
        return said == "true"
    return "retry-after" in outcome.headers or outcome.status in _NOT_NOW


def retry_after(outcome: Outcome) -> float:
    """Seconds that the answer asks to wait; 0 where it does not say (or says it as a date)."""
    if isinstance(outcome, httpx.RequestError):
        return 0.0
    try:
        seconds = float(outcome.headers.get("retry-after", 0))
    except ValueError:
        return 0.0
    return seconds if 0 <= seconds < float("inf") else 0.0
