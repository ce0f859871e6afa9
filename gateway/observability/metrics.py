"""What this gateway measures of its requests; read by ``GET /metrics`` beside what its parts count themselves.

Invariant: the number of time series does not grow with requests, callers or sessions: labels are routes, policies,
phases and kinds of outcome.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from prometheus_client.core import Metric

from gateway.observability.request import PhaseName, Seen
from swarm.http.exposition import Histogram, Labels, counters, histograms

#: Seconds. The gateway's own time is told finely, what it waits for coarsely.
_OVERHEAD = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0)
_WAITS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    """One per gateway, of one event loop. Times are seconds."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, str, str]] = Counter()
        self._seconds = _by_waits()
        self._first = _by_waits()
        self._phases = _by_waits()
        self._overhead = defaultdict[Labels, Histogram](lambda: Histogram(_OVERHEAD))

    def phase(self, route: str, name: PhaseName, seconds: float) -> None:
        """A phase of a request of ``route`` is over."""
        self._phases[route, name].observe(seconds)

    def first_token(self, seen: Seen, seconds: float) -> None:
        """The first event of a stream went out."""
        self._first[seen.route, seen.policy].observe(seconds)

    def over(self, seen: Seen, seconds: float, outcome: str, *, live: bool) -> None:
        """A request is over, after ``seconds``; ``live``: its answer went out while it was sampled, so that nobody can
        tell the gateway's own time from the engine's."""
        self._requests[seen.route, seen.policy, outcome] += 1
        self._seconds[seen.route, seen.policy].observe(seconds)
        # what has no policy was answered by no pipeline: a list of models, feedback, a refusal
        if outcome == "ok" and seen.policy and not live:
            self._overhead[seen.route, seen.policy].observe(max(0.0, seconds - seen.away))

    def families(self) -> Iterator[Metric]:
        """All of it, for one scrape."""
        yield counters(
            "gateway_requests",
            "Requests under /v1, by how they were answered and what became of them",
            ("route", "policy", "outcome"),
            self._requests.items(),
        )
        yield histograms("gateway_request_seconds", "To the answer's end", ("route", "policy"), self._seconds)
        yield histograms(
            "gateway_overhead_seconds",
            "Of that, what the gateway itself took: not its phases, nor streams that went out as they were sampled",
            ("route", "policy"),
            self._overhead,
        )
        yield histograms(
            "gateway_first_token_seconds",
            "To the first event of a stream, keep-alives apart",
            ("route", "policy"),
            self._first,
        )
        yield histograms(
            "gateway_phase_seconds",
            "Spent in a phase: queue, join, claim, sample, hook (reward hooks), submit, upstream",
            ("route", "phase"),
            self._phases,
        )


def _by_waits() -> defaultdict[Labels, Histogram]:
    return defaultdict[Labels, Histogram](lambda: Histogram(_WAITS))
