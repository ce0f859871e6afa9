"""Traces and the request log of a gateway.

Invariant: words of users are written nowhere unless it is configured here.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from swarm.types import Model


class TracingConfig(Model):
    """OpenTelemetry traces; needs ``pip install 'swarm-gateway[otel]'``."""

    endpoint: str | None = Field(
        default=None,
        pattern=r"^https?://",
        description="of an OTLP collector over HTTP, without /v1/traces; default: OTEL_EXPORTER_OTLP_ENDPOINT",
    )
    service_name: str = Field(default="swarm-gateway", min_length=1)
    sampled: float = Field(
        default=1.0, ge=0, le=1, description="share of requests; one that comes with a trace follows that one's choice"
    )


class RequestLogConfig(Model):
    """Every request and its response as one line of JSON; it holds what users said."""

    path: Path
    max_bytes: int = Field(default=100 * 1024 * 1024, ge=1024, description="of one file, then it is rotated")
    files: int = Field(default=5, ge=1, le=1000, description="that are kept, the current one included")
    max_text_bytes: int = Field(
        default=256 * 1024, ge=1024, description="of each request and each answer; the rest is cut"
    )
