"""What every request under ``/v1`` passes to be measured, traced, and told of when it is over.

Invariant: what passes is never changed and never kept waiting; an error in here would be one of the request, so nothing
in here depends on what the request says.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.observability.observed import Observed
from gateway.observability.request import Seen, Span, seeing, trace_headers
from swarm.http.asgi import RawHeaders, header

if TYPE_CHECKING:
    from gateway.observability.telemetry import Eyes

_MEASURED = "/v1/"
#: https://www.w3.org/TR/trace-context/#traceparent-header; ids of zeros only are none
_TRACEPARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


class SeeingMiddleware:
    """Wraps the app; who looks are the ``eyes`` of the gateway in the request's state."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(_MEASURED):
            await self.app(scope, receive, send)
            return
        state = scope["state"]
        eyes: Eyes = state["gateway"].eyes
        tracer = eyes.tracer
        seen = Seen(state["request_id"], eyes.metrics, tracer, _traceparent(scope["headers"]))
        observed = Observed(seen, scope["method"], scope["path"], eyes.keep)
        whole = False

        async def sending(message: Message) -> None:
            nonlocal whole
            await send(message)
            observed.sent(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                whole = True
                _over(eyes, observed, span, whole=True)

        async def receiving() -> Message:
            message = await receive()
            if not whole:
                observed.received(message)
            return message

        spanning: AbstractContextManager[Span | None] = nullcontext()
        if tracer is not None:
            spanning = tracer.span(f"{scope['method']} request", _trace(seen, scope["headers"]))
        with seeing(seen), spanning as span:
            if span is not None and not span.recording:
                # spans that nobody sees would cost half of those that somebody does
                seen.traceparent, seen.tracer = trace_headers().get("traceparent", ""), None
            try:
                await self.app(scope, receiving, sending)
            except Exception:
                # which is answered outside of all middleware
                observed.status = observed.status or 500
                raise
            finally:
                if not whole:
                    _over(eyes, observed, span, whole=False)


def _over(eyes: Eyes, observed: Observed, span: Span | None, *, whole: bool) -> None:
    observed.end(whole=whole)
    seen, metrics = observed.seen, eyes.metrics
    if observed.first_seconds is not None:
        metrics.first_token(seen, observed.first_seconds)
    metrics.over(seen, observed.seconds, observed.outcome, live=observed.live)
    if span is not None:
        for name, value in (
            ("http.response.status_code", observed.status),
            ("gateway.request_id", seen.request_id),
            ("gateway.route", seen.route),
            ("gateway.policy", seen.policy),
            ("gateway.outcome", observed.outcome),
        ):
            span.set(name, value)
    for listener in eyes.listeners:
        listener.request_over(observed)


def _traceparent(headers: RawHeaders) -> str:
    """The caller's, if it is one."""
    given = header(headers, b"traceparent")
    return given.decode() if given is not None and _TRACEPARENT.fullmatch(given) else ""


def _trace(seen: Seen, headers: RawHeaders) -> dict[str, str]:
    """What the caller says of the trace that its request belongs to."""
    if not seen.traceparent:
        return {}
    state = header(headers, b"tracestate") or b""
    return {"traceparent": seen.traceparent, "tracestate": state.decode("latin-1")}
