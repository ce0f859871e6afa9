"""Spans that are kept instead of sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from gateway.observability import tracing

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan


class Exported:
    """The spans of a gateway; whole once it is closed."""

    def __init__(self) -> None:
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        self.exporter = InMemorySpanExporter()

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self.exporter.get_finished_spans()

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]

    @property
    def trace_ids(self) -> set[str]:
        return {f"{span.get_span_context().trace_id:032x}" for span in self.spans}

    def json(self) -> str:
        return "".join(span.to_json() for span in self.spans)


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Exported:
    exported = Exported()
    monkeypatch.setattr(tracing, "make_exporter", lambda config: exported.exporter)
    return exported
