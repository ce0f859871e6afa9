"""Prometheus' text, read back by Prometheus' own reader."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from swarm.http.exposition import Histogram, counter, counters, exposition, gauge, gauges, histogram, histograms


def test_buckets_are_cumulative_and_inclusive() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert histogram.cumulative() == [("1.0", 2), ("2.0", 3), ("+Inf", 4)]
    assert histogram.total == 12.0


def test_everything_is_read_back() -> None:
    waits = Histogram((1.0, 2.0))
    waits.observe(1.5)
    answer = exposition(
        [
            gauge("g", "a gauge", 1.5),
            gauges("gs", "gauges", ["a", "b"], [(("x", 'y"\n'), 2.0)]),
            counter("c", "a counter", 3),
            counters("cs", "counters", ["a"], [(("x",), 4)]),
            histogram("h", "a histogram", waits),
            histograms("hs", "histograms", ["a"], {("x",): waits}),
        ]
    )
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = text_string_to_metric_families(bytes(answer.body).decode())
    found = {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}
    assert found == {
        ("g",): 1.5,
        ("gs", "x", 'y"\n'): 2.0,
        ("c_total",): 3,
        ("cs_total", "x"): 4,
        ("h_bucket", "1.0"): 0,
        ("h_bucket", "2.0"): 1,
        ("h_bucket", "+Inf"): 1,
        ("h_count",): 1,
        ("h_sum",): 1.5,
        ("hs_bucket", "x", "1.0"): 0,
        ("hs_bucket", "x", "2.0"): 1,
        ("hs_bucket", "x", "+Inf"): 1,
        ("hs_count", "x"): 1,
        ("hs_sum", "x"): 1.5,
    }
