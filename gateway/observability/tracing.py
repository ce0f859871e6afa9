"""Traces by OpenTelemetry, exported by OTLP; needs the extra ``otel``.

Invariant: spans carry names, times, counts and ids, never prompts or answers. An exporter that cannot reach its
collector blocks only its own thread.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING

from gateway.config.gateway import TracingConfig
from swarm.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

_NEEDED = ("opentelemetry.sdk.trace.export", "opentelemetry.exporter.otlp.proto.http.trace_exporter")
_EXPORT_SECONDS = 5.0
_CLOSE_SECONDS = 5.0


class OtelTracer:
    """Makes the spans of one gateway, where :func:`check_tracing` finds no fault; sets nothing global, so that an
    application's own OpenTelemetry is left alone."""

    def __init__(self, config: TracingConfig) -> None:
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
        self._provider.add_span_processor(BatchSpanProcessor(make_exporter(config)))
        self._tracer = self._provider.get_tracer("swarm-gateway")
        self._propagator = TraceContextTextMapPropagator()

    @contextmanager
    def span(self, name: str, headers: dict[str, str] | None = None) -> Generator[Span]:
        """A span; the parent of spans made inside, also in tasks started there. ``headers`` (W3C ``traceparent``) are
        of a request whose trace it continues. An exception is noted by its type: its message may quote a prompt."""
        from opentelemetry.trace import StatusCode, use_span

        made = self._tracer.start_span(name, self._propagator.extract(headers) if headers else None)
        with use_span(made, end_on_exit=True, record_exception=False, set_status_on_exception=False):
            try:
                yield made
            except BaseException as exc:
                made.set_attribute("error.type", type(exc).__qualname__)
                made.set_status(StatusCode.ERROR)
                raise

    def headers(self) -> dict[str, str]:
        """Headers that make the current span the parent of another server's spans."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier)
        return carrier

    def close(self) -> None:
        """Export the rest, within five seconds; blocks."""
        # shutting down waits long for a collector that is gone
        closing = threading.Thread(target=self._provider.shutdown, name="closing traces", daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)


def check_tracing() -> None:
    """Raise :class:`ConfigError` unless the packages that tracing needs are installed."""
    try:
        for module in _NEEDED:
            import_module(module)
    except ImportError as exc:
        raise ConfigError("tracing needs OpenTelemetry: pip install '.[otel]' in a clone") from exc


def make_exporter(config: TracingConfig) -> SpanExporter:
    """OTLP over HTTP."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    # the default is the environment's OTEL_EXPORTER_OTLP_ENDPOINT, else a collector on this machine
    endpoint = f"{config.endpoint.rstrip('/')}/v1/traces" if config.endpoint else None
    return OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_SECONDS)
