"""Prometheus metrics of requests; times are seconds.

Invariant: the number of time series does not grow with requests, callers or sessions: labels are routes, policies,
phases and outcomes.
"""

from __future__ import annotations

from prometheus_client import Counter, Histogram

from swarm.http.exposition import new_registry

#: Buckets: fine ones for the gateway's own time, coarse ones for waits.
_OVERHEAD = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0)
_WAITS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_ROUTE_POLICY = ("route", "policy")


class Metrics:
    """The metrics of one gateway, and the ``registry`` that ``GET /metrics`` reads."""

    def __init__(self) -> None:
        self.registry = registry = new_registry()
        self.requests = Counter(
            "gateway_requests",
            "Requests under /v1, by how they were answered and their outcome",
            ("route", "policy", "outcome"),
            registry=registry,
        )
        self.seconds = Histogram(
            "gateway_request_seconds", "Until the end of the response", _ROUTE_POLICY, buckets=_WAITS, registry=registry
        )
        self.overhead = Histogram(
            "gateway_overhead_seconds",
            "The gateway's own part of that: without phases, and without responses streamed as they were sampled",
            _ROUTE_POLICY,
            buckets=_OVERHEAD,
            registry=registry,
        )
        self.first_token = Histogram(
            "gateway_first_token_seconds",
            "Until the first event of a stream, keep-alives apart",
            _ROUTE_POLICY,
            buckets=_WAITS,
            registry=registry,
        )
        self._phases = Histogram(
            "gateway_phase_seconds",
            "Spent in a phase: queue, join, claim, sample, hook (reward hooks), submit, upstream",
            ("route", "phase"),
            buckets=_WAITS,
            registry=registry,
        )

    def phase(self, route: str, name: str, seconds: float) -> None:
        """A phase of a request of ``route`` ended."""
        self._phases.labels(route, name).observe(seconds)
