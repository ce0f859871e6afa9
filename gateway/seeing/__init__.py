"""What is seen from outside: metrics, traces, logs. Other packages use only :mod:`gateway.seeing.request`."""

from gateway.seeing.request import answered_by, failed, metadata, phase, span, trace_headers, trace_id

__all__ = ["answered_by", "failed", "metadata", "phase", "span", "trace_headers", "trace_id"]
