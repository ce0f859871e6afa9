"""What both servers' ``GET /metrics`` is written with: histograms to observe with, and Prometheus' text form.

Invariant: observing takes no lock and allocates nothing, so it belongs to one event loop; text is made at the scrape.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

#: The values of one series' labels.
Labels = tuple[str, ...]


class Histogram:
    """Counts of values up to each bound and beyond; ``bounds`` are inclusive upper ones, ascending."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count ``value``."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, int]]:
        """``(bound, values at most that)``, the last one ``+Inf``: Prometheus' buckets."""
        found: list[tuple[str, int]] = []
        running = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            running += count
            found.append((bound, running))
        return found


def exposition(families: Iterable[Metric]) -> Response:
    """The answer that Prometheus reads."""
    return Response(generate_latest(_Families(families)), headers={"content-type": _CONTENT_TYPE})


def gauge(name: str, help: str, value: float) -> Metric:
    """A value that goes up and down."""
    return GaugeMetricFamily(name, help, value)


def gauges(name: str, help: str, labels: Sequence[str], values: Iterable[tuple[Labels, float]]) -> Metric:
    """The same, one for each of ``values``."""
    family = GaugeMetricFamily(name, help, labels=labels)
    for of, value in values:
        family.add_metric(of, value)
    return family


def counter(name: str, help: str, value: float) -> Metric:
    """A value that only grows; its name gets ``_total``."""
    return CounterMetricFamily(name, help, value)


def counters(name: str, help: str, labels: Sequence[str], values: Iterable[tuple[Labels, float]]) -> Metric:
    """The same, one for each of ``values``."""
    family = CounterMetricFamily(name, help, labels=labels)
    for of, value in values:
        family.add_metric(of, value)
    return family


def histogram(name: str, help: str, of: Histogram) -> Metric:
    """How values are distributed."""
    return HistogramMetricFamily(name, help, buckets=of.cumulative(), sum_value=of.total)


def histograms(name: str, help: str, labels: Sequence[str], series: Mapping[Labels, Histogram]) -> Metric:
    """The same, one for each of ``series``."""
    family = HistogramMetricFamily(name, help, labels=labels)
    for of, one in series.items():
        family.add_metric(of, one.cumulative(), one.total)
    return family


class _Families(Collector):
    """The one thing that the text is made of."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families
