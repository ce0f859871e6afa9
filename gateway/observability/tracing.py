"""Traces by OpenTelemetry, sent by OTLP; needs the extra ``otel``.

Invariant: spans carry names, times, counts and ids, never what was said. An exporter that cannot reach its collector
costs its own thread's time and nobody else's.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING

from gateway.config.observability import TracingConfig
from gateway.observability.request import Span
from swarm.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import Tracer as SdkTracer

_NEEDED = ("opentelemetry.sdk.trace.export", "opentelemetry.exporter.otlp.proto.http.trace_exporter")
_EXPORT_SECONDS = 5.0
_CLOSE_SECONDS = 5.0


class OtelTracer:
    """Spans of one gateway; nothing global is set, so that an application's own OpenTelemetry is left alone.

    Args:
        config: where they go.
        exporter: instead of OTLP over HTTP.

    Raises:
        ConfigError: the extra is not installed.
    """

    def __init__(self, config: TracingConfig, exporter: SpanExporter | None = None) -> None:
        check_tracing()
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = TracerProvider(
            resource=Resource.create({"service.name": config.service_name}),
            sampler=ParentBased(TraceIdRatioBased(config.sampled)),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter or _exporter(config)))
        self._tracer = self._provider.get_tracer("swarm-gateway")
        self._propagator = TraceContextTextMapPropagator()

    def span(self, name: str, headers: dict[str, str] | None = None) -> AbstractContextManager[Span]:
        """See :class:`gateway.observability.request.Tracer`."""
        return _Entered(self._tracer, name, self._propagator.extract(headers) if headers else None)

    def headers(self) -> dict[str, str]:
        """See :class:`gateway.observability.request.Tracer`."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier)
        return carrier

    def close(self) -> None:
        """Send what is left, within five seconds; blocks."""
        # shutting down waits for a collector that may be gone for longer than anyone wants to wait
        closing = threading.Thread(target=self._provider.shutdown, name="closing traces", daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)


def check_tracing() -> None:
    """Raise :class:`ConfigError` unless what tracing needs is installed."""
    try:
        for module in _NEEDED:
            import_module(module)
    except ImportError as exc:
        raise ConfigError("tracing needs OpenTelemetry: pip install 'swarm-gateway[otel]'") from exc


class _Entered(AbstractContextManager[Span]):
    """One span, which is the parent of others while it is entered."""

    def __init__(self, tracer: SdkTracer, name: str, context: Context | None) -> None:
        self._tracer = tracer
        self._name = name
        self._context = context

    def __enter__(self) -> Span:
        from opentelemetry.trace import use_span

        self._span = self._tracer.start_span(self._name, self._context)
        self._using = use_span(self._span, end_on_exit=True, record_exception=False, set_status_on_exception=False)
        self._using.__enter__()
        return _Span(self._span)

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._using.__exit__(None, None, None)


class _Span:
    """Adapts OpenTelemetry's."""

    def __init__(self, span: OtelSpan) -> None:
        self._span = span

    @property
    def recording(self) -> bool:
        """See :class:`gateway.observability.request.Span`."""
        return self._span.is_recording()

    def set(self, name: str, value: str | int | float | bool) -> None:
        """See :class:`gateway.observability.request.Span`."""
        self._span.set_attribute(name, value)

    def failed(self, exc: BaseException) -> None:
        """See :class:`gateway.observability.request.Span`."""
        from opentelemetry.trace import StatusCode

        self._span.set_attribute("error.type", type(exc).__qualname__)
        self._span.set_status(StatusCode.ERROR)


def _exporter(config: TracingConfig) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    # without an address it is the environment's (OTEL_EXPORTER_OTLP_ENDPOINT), else the collector on this machine
    endpoint = f"{config.endpoint.rstrip('/')}/v1/traces" if config.endpoint else None
    return OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_SECONDS)
