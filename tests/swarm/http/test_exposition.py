"""Prometheus' text, read back by Prometheus' own reader."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Histogram
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from swarm.http.exposition import counter, exposition, gauge, new_registry


class Collected(Collector):
    def collect(self) -> Iterator[Metric]:
        yield gauge("g", "a gauge", 1.5)
        yield gauge("gs", "gauges", {("x", 'y"\n'): 2.0}, "a", "b")
        yield counter("c", "a counter", 3)
        yield counter("cs", "counters", {"x": 4}, "a")


def test_everything_is_read_back() -> None:
    registry = new_registry()
    registry.register(Collected())
    Histogram("h", "a histogram", buckets=(1.0, 2.0), registry=registry).observe(1.0)
    answer = exposition(registry)
    assert answer.headers["content-type"].startswith("text/plain; version=")
    families = text_string_to_metric_families(bytes(answer.body).decode())
    found = {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}
    assert found == {
        ("g",): 1.5,
        ("gs", "x", 'y"\n'): 2.0,
        ("c_total",): 3,
        ("cs_total", "x"): 4,
        ("h_bucket", "1.0"): 1,
        ("h_bucket", "2.0"): 1,
        ("h_bucket", "+Inf"): 1,
        ("h_count",): 1,
        ("h_sum",): 1,
    }
