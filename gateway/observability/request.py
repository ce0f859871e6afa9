"""What is seen of one request on its way: where its time goes, and which trace it belongs to.

Invariant: looking changes nothing. Outside of a request, and without tracing, every call here does next to nothing and
never fails. What goes on behind an answer (stragglers, submission) belongs to the request that began it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import TracebackType
from typing import Literal, Protocol, Self

#: ``queue``: for a place. ``join``: for what an earlier request gets. ``claim``: for episodes. ``sample``: until the
#: answers that are waited for are there. ``hook``: in reward hooks. ``submit``: until the swarm server acknowledges.
#: ``upstream``: a plain upstream's answer.
PhaseName = Literal["queue", "join", "claim", "sample", "hook", "submit", "upstream"]


class Span(Protocol):
    """One stretch of a trace."""

    @property
    def recording(self) -> bool:
        """Whether anybody will see it, and those inside it."""
        ...

    def set(self, name: str, value: str | int | float | bool) -> None:
        """Note an attribute."""
        ...

    def failed(self, exc: BaseException) -> None:
        """It ended with an error; only its kind is noted, its words may quote a prompt."""
        ...


class Tracer(Protocol):
    """Makes spans; the one that is entered is the parent of those made inside, also in tasks begun there."""

    def span(self, name: str, headers: dict[str, str] | None = None) -> AbstractContextManager[Span]:
        """A span; ``headers`` are those of a request that may tell of a trace to go on with (W3C ``traceparent``)."""
        ...

    def headers(self) -> dict[str, str]:
        """What tells another server of the span that is entered."""
        ...


class Meter(Protocol):
    """Is told of phases that are over; seconds."""

    def phase(self, route: str, name: PhaseName, seconds: float) -> None: ...


class Seen:
    """One request. Moments are :func:`time.perf_counter`'s.

    Attributes:
        route: name of the route, once it is known.
        policy: how it was answered in fact: ``best``, ``first``, ``straight``, ``upstream``, ``joined``; or ``""``.
        failed: the code of the error that the caller got to see; or ``""``.
        left_out: what of the request could not be carried to the model.
        tracer: ``None``: nobody traces it, or this one is not sampled.
        traceparent: what other servers are told where there is no tracer.
        away: seconds in which at least one phase was under way, until the answer was out.
    """

    __slots__ = (
        "_at_once",
        "_since",
        "away",
        "failed",
        "left_out",
        "meter",
        "over",
        "policy",
        "request_id",
        "route",
        "started",
        "traceparent",
        "tracer",
    )  # fmt: skip

    def __init__(self, request_id: str, meter: Meter, tracer: Tracer | None = None, traceparent: str = "") -> None:
        self.request_id = request_id
        self.meter = meter
        self.tracer = tracer
        self.traceparent = traceparent
        self.started = time.perf_counter()
        self.route = ""
        self.policy = ""
        self.failed = ""
        self.left_out: Sequence[str] = ()
        self.away = 0.0
        self.over = False
        self._at_once = 0
        self._since = 0.0

    def leave(self, now: float) -> None:
        """A phase begins."""
        if self._at_once == 0:
            self._since = now
        self._at_once += 1

    def back(self, now: float) -> None:
        """A phase is over."""
        self._at_once -= 1
        if self._at_once == 0 and not self.over:
            self.away += now - self._since

    def end(self) -> float:
        """The answer is out; returns how long it took."""
        now = time.perf_counter()
        if self._at_once and not self.over:
            self.away += now - self._since
        self.over = True
        return now - self.started


_current: ContextVar[Seen | None] = ContextVar("gateway_request", default=None)


def current() -> Seen | None:
    """The request that this task works for."""
    return _current.get()


class seeing(AbstractContextManager[None]):
    """``with seeing(seen):`` what happens inside, and in tasks begun there, is seen of ``seen``."""

    def __init__(self, seen: Seen) -> None:
        self._token = _current.set(seen)

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        _current.reset(self._token)


def answered_by(route: str, policy: str = "") -> None:
    """Note the route, and how the request is answered once that is known."""
    if (seen := _current.get()) is not None:
        seen.route = route
        seen.policy = policy or seen.policy


def failed(code: str) -> None:
    """Note an error that the caller gets to see."""
    if (seen := _current.get()) is not None:
        seen.failed = code


def note_left_out(left_out: Sequence[str]) -> None:
    """Note what of the request could not be carried to the model."""
    if (seen := _current.get()) is not None:
        seen.left_out = left_out


class phase(AbstractContextManager["phase"]):
    """``with phase("claim"):`` this time is spent there and not in the gateway itself; and a span of its trace."""

    __slots__ = ("_name", "_seen", "_since", "_span", "_spanning")

    def __init__(self, name: PhaseName) -> None:
        self._name: PhaseName = name
        self._seen: Seen | None = None
        self._since = 0.0
        self._spanning: AbstractContextManager[Span] | None = None
        self._span: Span | None = None

    def set(self, name: str, value: str | int | float | bool) -> None:
        """Note an attribute of its span."""
        if self._span is not None:
            self._span.set(name, value)

    def __enter__(self) -> Self:
        self._seen = seen = _current.get()
        if seen is not None:
            self._since = time.perf_counter()
            seen.leave(self._since)
            if seen.tracer is not None:
                self._spanning = seen.tracer.span(self._name)
                self._span = self._spanning.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        seen = self._seen
        if seen is None:
            return
        now = time.perf_counter()
        seen.back(now)
        seen.meter.phase(seen.route, self._name, now - self._since)
        if self._spanning is not None and self._span is not None:
            if exc is not None:
                self._span.failed(exc)
            self._spanning.__exit__(None, None, None)


class span(AbstractContextManager["Span | None"]):
    """``with span("sample 3"):`` a stretch of the trace that is not counted by itself."""

    __slots__ = ("_name", "_span", "_spanning")

    def __init__(self, name: str) -> None:
        self._name = name
        self._spanning: AbstractContextManager[Span] | None = None
        self._span: Span | None = None

    def __enter__(self) -> Span | None:
        seen = _current.get()
        if seen is not None and seen.tracer is not None:
            self._spanning = seen.tracer.span(self._name)
            self._span = self._spanning.__enter__()
        return self._span

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if self._spanning is not None and self._span is not None:
            if exc is not None:
                self._span.failed(exc)
            self._spanning.__exit__(None, None, None)


def trace_headers() -> dict[str, str]:
    """What a request sent on behalf of this one says of its trace: ours, or the caller's as it came."""
    seen = _current.get()
    if seen is None:
        return {}
    if seen.tracer is not None:
        return seen.tracer.headers()
    return {"traceparent": seen.traceparent} if seen.traceparent else {}


def trace_id() -> str:
    """Of the trace that this request belongs to; empty where there is none."""
    return trace_headers().get("traceparent", "")[3:35]


def metadata() -> dict[str, str]:
    """What an episode's output says of where it came from: ``request_id``, and ``traceparent`` if there is a trace."""
    seen = _current.get()
    if seen is None:
        return {}
    trace = trace_headers().get("traceparent")
    return {"request_id": seen.request_id} | ({"traceparent": trace} if trace else {})
