"""``Telemetry``: metrics, traces and logs of a gateway's requests, and the middleware that records each under ``/v1``.

Invariant: messages pass unchanged and without delay, and nothing here can fail on what a request contains.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote
from weakref import WeakSet

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.config.gateway import GatewayConfig
from gateway.data.consent import refusal_in
from gateway.observability.request import Metrics, RequestRecord, recording, trace_headers
from gateway.observability.request_log import RequestLog, check_request_log
from gateway.observability.tracing import OtelTracer, check_tracing
from swarm.http.asgi import RawHeaders, header
from swarm.types import Notes

if TYPE_CHECKING:
    from opentelemetry.trace import Span

access = logging.getLogger("gateway.access")

_RECORDED = "/v1/"
#: https://www.w3.org/TR/trace-context/#traceparent-header; ids of zeros only are invalid
_TRACEPARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


class Telemetry:
    """An async context, to be entered once.

    Attributes:
        metrics: of all requests.
        tracer: makes spans; ``None``: no tracing.
        request_log: writes requests to a file; ``None``: nobody does.
        keep: bytes of each request and response that a record keeps.
        under_way: requests for which anything is under way.
    """

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self.metrics = Metrics()
        self.tracer: OtelTracer | None = None
        self.request_log = RequestLog(config.request_log) if config.request_log is not None else None
        self.under_way: WeakSet[RequestRecord] = WeakSet()
        self.keep = config.request_log.max_text_bytes if config.request_log is not None else 0

    def forget(self, fits: Callable[[Notes], bool]) -> None:
        """Requests under way that ``fits``, now or once more is known of them, leave nothing behind."""
        for record in self.under_way:
            record.deletions.append(fits)

    def request_over(self, record: RequestRecord, span: Span | None) -> None:
        """Count, trace and log a request that ended; it runs inside the request, so it does not wait."""
        metrics, route, policy = self.metrics, record.route, record.policy
        if record.first_seconds is not None:
            metrics.first_token(route, policy).observe(record.first_seconds)
        metrics.requests(route, policy, record.outcome).inc()
        metrics.seconds(route, policy).observe(record.seconds)
        # without a policy no pipeline answered: a list of models, feedback, a refusal; and of a response that was
        # streamed while it was sampled nobody can tell the gateway's time from the engine's
        if record.outcome == "ok" and policy and not record.live:
            metrics.overhead(route, policy).observe(record.own_seconds)
        if span is not None:
            named = {"request_id": record.request_id, "route": route, "policy": policy, "outcome": record.outcome}
            span.set_attributes({f"gateway.{name}": text for name, text in named.items()})
            span.set_attribute("http.response.status_code", record.status)
        if self._config.access_log:
            _log_access(record)
        if self.request_log is not None and not record.deleted:
            self.request_log.request_over(record)
        # timers and tasks behind the answer keep the record
        record.request.clear()
        record.response.clear()

    async def __aenter__(self) -> Self:
        if self._config.tracing is not None:
            self.tracer = OtelTracer(self._config.tracing)
        if self.request_log is not None:
            self.request_log.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.request_log is not None:
            await asyncio.to_thread(self.request_log.close)
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)


def check_telemetry(config: GatewayConfig) -> None:
    """Raise :class:`ConfigError` if tracing is not installed or the request log cannot be written."""
    if config.tracing is not None:
        check_tracing()
    if config.request_log is not None:
        check_request_log(config.request_log)


class TelemetryMiddleware:
    """Wraps the app; the request's state has the ``gateway`` with its telemetry."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(_RECORDED):
            await self.app(scope, receive, send)
            return
        state, headers = scope["state"], scope["headers"]
        telemetry: Telemetry = state["gateway"].telemetry
        tracer = telemetry.tracer
        record = RequestRecord(
            state["request_id"],
            telemetry.metrics,
            tracer,
            _traceparent(headers),
            scope["method"],
            scope["path"],
            telemetry.keep,
            texts=_may_keep(state["gateway"].routes.plan.config, headers),
        )
        telemetry.under_way.add(record)

        async def sending(message: Message) -> None:
            await send(message)
            record.sent(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                record.end(whole=True)
                telemetry.request_over(record, span)

        async def receiving() -> Message:
            message = await receive()
            if not record.ended:
                record.received(message)
            return message

        spanning: AbstractContextManager[Span | None] = nullcontext()
        if tracer is not None:
            spanning = tracer.span(f"{record.method} request", _trace(record, headers))
        with recording(record), spanning as span:
            if span is not None and not span.is_recording():
                # a trace that is not sampled needs its headers alone, no spans
                record.traceparent, record.tracer = trace_headers().get("traceparent", ""), None
            try:
                await self.app(scope, receiving, sending)
            except Exception:
                # the server outside of all middleware answers it
                record.status = record.status or 500
                raise
            finally:
                if not record.ended:
                    record.end(whole=False)
                    telemetry.request_over(record, span)


def _log_access(record: RequestRecord) -> None:
    # the caller's text; quoted, it cannot begin a line of its own
    path = quote(record.path)
    fields: dict[str, Any] = {
        "method": record.method,
        "path": path,
        "status": record.status,
        "outcome": record.outcome,
        "policy": record.policy,
        "seconds": round(record.seconds, 4),
        "own_seconds": round(record.own_seconds, 4),
    }
    if record.first_seconds is not None:
        fields["first_token_seconds"] = round(record.first_seconds, 4)
    more = {"error_code": record.error_code, "left_out": record.left_out}
    fields |= {name: value for name, value in more.items() if value}
    line = ("%s %s %d %s %.3f s", record.method, path, record.status, record.outcome, record.seconds)
    access.info(*line, extra={"fields": fields})


def _may_keep(config: GatewayConfig, headers: RawHeaders) -> bool:
    """Whether texts may be written before the route of the request is known."""
    if refusal_in(headers):
        return False
    rules = [route.data for route in config.routes or [config]]
    return all(data.consent == "opt_out" and data.redact == "none" for data in rules)


def _traceparent(headers: RawHeaders) -> str:
    """The caller's, if it is valid."""
    sent = header(headers, b"traceparent")
    return sent.decode() if sent is not None and _TRACEPARENT.fullmatch(sent) else ""


def _trace(record: RequestRecord, headers: RawHeaders) -> dict[str, str]:
    """The headers of the trace that the request belongs to."""
    if not record.traceparent:
        return {}
    state = header(headers, b"tracestate") or b""
    return {"traceparent": record.traceparent, "tracestate": state.decode("latin-1")}
