"""``Eyes``: everything that looks at a gateway's requests, made from its configuration.

Invariant: what is not configured costs nothing, and what is lives as long as the gateway.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from gateway.config import GatewayConfig
from gateway.observability.logs import AccessLog
from gateway.observability.metrics import Metrics
from gateway.observability.observed import Listener
from gateway.observability.request import Tracer
from gateway.observability.request_log import RequestLog, check_request_log
from gateway.observability.tracing import OtelTracer, check_tracing


class Eyes:
    """An async context, to be entered once.

    Attributes:
        metrics: of all requests.
        tracer: makes spans; ``None``: no tracing.
        request_log: writes requests down; ``None``: nobody does.
        listeners: hear of each request that is over.
        keep: bytes of each request and answer that they get to see.
    """

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self.metrics = Metrics()
        self._otel: OtelTracer | None = None
        self.request_log = RequestLog(config.request_log) if config.request_log is not None else None
        self.keep = config.request_log.max_text_bytes if config.request_log is not None else 0
        listeners: list[Listener] = [AccessLog()] if config.access_log else []
        if self.request_log is not None:
            listeners.append(self.request_log)
        self.listeners = tuple(listeners)

    @property
    def tracer(self) -> Tracer | None:
        return self._otel

    async def __aenter__(self) -> Self:
        if self._config.tracing is not None:
            self._otel = OtelTracer(self._config.tracing)
        if self.request_log is not None:
            self.request_log.start()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self.request_log is not None:
            await asyncio.to_thread(self.request_log.close)
        if self._otel is not None:
            await asyncio.to_thread(self._otel.close)


def check_eyes(config: GatewayConfig) -> None:
    """Raise :class:`ConfigError` where what is to look cannot: tracing is not installed, a log cannot be written."""
    if config.tracing is not None:
        check_tracing()
    if config.request_log is not None:
        check_request_log(config.request_log)
