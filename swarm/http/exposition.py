"""Prometheus metrics of both servers: a registry per app, families made at the scrape, and the response.

Metrics that are counted as things happen are ``prometheus_client``'s own; values that other parts keep are read at the
scrape by a ``Collector``, which makes its families here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.responses import Response

#: One value, or one per series: its label's value, or all its labels' values.
Values = float | Mapping[str, float] | Mapping[tuple[str, ...], float]


def new_registry() -> CollectorRegistry:
    """A registry of one app, whose counters and histograms have no ``_created`` series."""
    disable_created_metrics()
    return CollectorRegistry()


def exposition(registry: CollectorRegistry) -> Response:
    """The response to a scrape."""
    return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST})


def gauge(name: str, help: str, values: Values, *labels: str) -> Metric:
    """Values that go up and down."""
    return _filled(GaugeMetricFamily(name, help, labels=labels), values)


def counter(name: str, help: str, values: Values, *labels: str) -> Metric:
    """Values that only grow; the name gets ``_total``."""
    return _filled(CounterMetricFamily(name, help, labels=labels), values)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Values) -> Metric:
    if not isinstance(values, Mapping):
        family.add_metric((), values)
        return family
    for key, value in values.items():
        labels: Sequence[str] = (key,) if isinstance(key, str) else key
        family.add_metric(labels, value)
    return family
