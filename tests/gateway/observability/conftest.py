"""Spans that are kept instead of sent."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gateway.observability import tracing


class Exported(InMemorySpanExporter):
    """Whole once the gateway is closed."""

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.get_finished_spans() if span.name == name]

    @property
    def trace_ids(self) -> set[str]:
        return {f"{span.get_span_context().trace_id:032x}" for span in self.get_finished_spans()}

    def json(self) -> str:
        return "".join(span.to_json() for span in self.get_finished_spans())


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Exported:
    exporter = Exported()
    monkeypatch.setattr(tracing, "make_exporter", lambda config: exporter)
    return exporter
