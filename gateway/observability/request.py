"""``RequestRecord``: one request under ``/v1`` as telemetry sees it, with its metrics and spans.

Invariant: noting changes nothing. Outside of a request, and without tracing, every function here does next to nothing
and never fails. Work that goes on behind a response (stragglers, submission) belongs to the request that started it.
The number of time series does not grow with requests, callers or sessions: labels are routes, policies, phases and
outcomes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from prometheus_client import Counter, Histogram
from starlette.types import Message

from adapters.dialects import DIALECTS
from swarm.http.asgi import header
from swarm.http.exposition import new_registry
from swarm.types import Notes

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from gateway.observability.tracing import OtelTracer

#: ``queue``: waiting for a place. ``join``: waiting for an earlier request's response. ``claim``: for episodes.
#: ``sample``: for the answers that the response needs. ``hook``: in reward hooks. ``submit``: until the swarm server
#: acknowledges. ``upstream``: for a plain upstream's answer.
PhaseName = Literal["queue", "join", "claim", "sample", "hook", "submit", "upstream"]

#: ``ok``; ``refused`` (4xx), ``overloaded`` (429), ``unavailable`` (502 to 504), ``failed``; ``broken``: an error in
#: the middle of a response; ``disconnected``: the caller left.
OutcomeName = Literal["ok", "refused", "overloaded", "unavailable", "failed", "broken", "disconnected"]

#: Beginnings of the keep-alives of a silent stream.
_KEEPALIVES = tuple(beginning for dialect in DIALECTS for beginning in dialect.keepalives)

#: Buckets in seconds: fine ones for the gateway's own time, coarse ones for waits.
_OVERHEAD = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0)
_WAITS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    """The metrics of one gateway's requests in seconds, each called with the values of its labels, and the ``registry``
    that ``GET /metrics`` reads."""

    def __init__(self) -> None:
        self.registry = registry = new_registry()

        def histogram(name: str, about: str, second: str, buckets: Sequence[float]) -> Callable[..., Histogram]:
            labels = ("route", second)
            return cache(Histogram(f"gateway_{name}_seconds", about, labels, buckets=buckets, registry=registry).labels)

        about = "Requests under /v1, by how they were answered and their outcome"
        labels = ("route", "policy", "outcome")
        self.requests = cache(Counter("gateway_requests", about, labels, registry=registry).labels)
        self.seconds = histogram("request", "Until the end of the response", "policy", _WAITS)
        about = "The gateway's own part of that: without phases, and without responses streamed as they were sampled"
        self.overhead = histogram("overhead", about, "policy", _OVERHEAD)
        about = "Until the first event of a stream, keep-alives apart"
        self.first_token = histogram("first_token", about, "policy", _WAITS)
        about = "Spent in a phase: queue, join, claim, sample, hook (reward hooks), submit, upstream"
        self.phase = histogram("phase", about, "phase", _WAITS)


@dataclass(eq=False, slots=True, weakref_slot=True)
class RequestRecord:
    """One request and its response; times are seconds, and texts are empty until they are known.

    Attributes:
        tracer: makes its spans; ``None``: it is not traced, or not sampled.
        traceparent: the caller's, passed on to other servers where there is no tracer.
        policy: how it was answered: ``best``, ``first``, ``single``, ``upstream``, ``joined``.
        error_code: of the error that the caller gets.
        left_out: fields of the request that the answer does not heed.
        key: id of the caller's key.
        user: digest of the end user's name.
        texts: whether its texts may be written anywhere.
        deletions: whose data was deleted since it came.
        phase_seconds: time in which at least one phase was running, until the end of the response.
        status: HTTP status; 0: no response began.
        streamed: whether the response is a stream of events.
        request, response: the first ``keep`` bytes of each body.
        first_seconds: from arrival to the first event of a stream, keep-alives apart.
        seconds, outcome: from arrival to the end of the response; set by :meth:`end`.
        ended: whether that was called.
    """

    request_id: str
    metrics: Metrics
    tracer: OtelTracer | None = None
    traceparent: str = ""
    method: str = ""
    path: str = ""
    keep: int = 0
    route: str = ""
    policy: str = ""
    error_code: str = ""
    left_out: Sequence[str] = ()
    key: str = ""
    user: str = ""
    session: str = ""
    texts: bool = True
    deletions: list[Callable[[Notes], bool]] = field(default_factory=list[Callable[[Notes], bool]])
    status: int = 0
    streamed: bool = False
    request: bytearray = field(default_factory=bytearray)
    response: bytearray = field(default_factory=bytearray)
    first_seconds: float | None = None
    seconds: float = 0.0
    outcome: OutcomeName = "failed"
    phase_seconds: float = 0.0
    ended: bool = False
    _began: float = field(default_factory=time.perf_counter)
    _disconnected: bool = False
    _parts: int = 0
    _running_phases: int = 0
    _phases_began: float = 0.0

    @property
    def live(self) -> bool:
        """Whether the response was streamed while it was sampled; policy ``best`` replays a judged answer."""
        return self.policy != "best" and (self.streamed or self._parts > 1)

    @property
    def own_seconds(self) -> float:
        """The gateway's own part of :attr:`seconds`."""
        return max(0.0, self.seconds - self.phase_seconds)

    def notes(self) -> Notes:
        """Whose request it is."""
        return Notes(request_id=self.request_id, key=self.key, user=self.user, session=self.session)

    @property
    def deleted(self) -> bool:
        """Whether the data of whoever sent it was deleted since it came."""
        return any(fits(self.notes()) for fits in self.deletions)

    def sent(self, message: Message) -> None:
        """Note a part of the response."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            media_type = header(message.get("headers", ()), b"content-type") or b""
            self.streamed = media_type.startswith(b"text/event-stream")
            return
        body: bytes = message.get("body", b"")
        if not body:
            return
        self._parts += 1
        if self.streamed and self.first_seconds is None and not body.startswith(_KEEPALIVES):
            self.first_seconds = time.perf_counter() - self._began
        if len(self.response) < self.keep:
            self.response += body[: self.keep - len(self.response)]

    def received(self, message: Message) -> None:
        """Note a part of the request, or that the caller disconnected before the end of the response."""
        if message["type"] == "http.disconnect":
            self._disconnected = True
        elif len(self.request) < self.keep:
            self.request += message.get("body", b"")[: self.keep - len(self.request)]

    def begin_phase(self, now: float) -> None:
        """A phase begins; phases may overlap."""
        if self._running_phases == 0:
            self._phases_began = now
        self._running_phases += 1

    def end_phase(self, now: float) -> None:
        """A phase ends."""
        self._running_phases -= 1
        if self._running_phases == 0 and not self.ended:
            self.phase_seconds += now - self._phases_began

    def end(self, *, whole: bool) -> None:
        """The response is sent (``whole``), or nobody waits for the rest."""
        now = time.perf_counter()
        if self._running_phases and not self.ended:
            self.phase_seconds += now - self._phases_began
        self.ended = True
        self.seconds = now - self._began
        self.outcome = self._outcome(whole)

    def _outcome(self, whole: bool) -> OutcomeName:
        if not whole:
            return "disconnected" if self._disconnected else "failed"
        if self.status < 400:
            return "broken" if self.error_code else "ok"
        if self.status == 429:
            return "overloaded"
        if self.status < 500:
            return "refused"
        return "unavailable" if self.status in (502, 503, 504) else "failed"


_NO_SPAN = nullcontext[None]()
_current: ContextVar[RequestRecord | None] = ContextVar("gateway_request", default=None)


def current() -> RequestRecord | None:
    """The request that this task works for."""
    return _current.get()


@contextmanager
def recording(record: RequestRecord) -> Generator[None]:
    """Everything inside, and in tasks started there, belongs to ``record``."""
    token = _current.set(record)
    try:
        yield
    finally:
        _current.reset(token)


def note(**facts: Any) -> None:
    """Set attributes of the record of the request that this task works for, if it works for one."""
    if (record := _current.get()) is not None:
        for name, fact in facts.items():
            setattr(record, name, fact)


def deleted() -> bool:
    """Whether the data of whoever sent the request was deleted since it came."""
    return (record := _current.get()) is not None and record.deleted


class phase:
    """Count the time inside as a phase, not as the gateway's own, and make it a span of the trace, if there is one."""

    def __init__(self, name: PhaseName) -> None:
        self._name = name

    def __enter__(self) -> Span | None:
        self._record = record = _current.get()
        if record is None:
            return None
        self._span = span(self._name)
        self._began = time.perf_counter()
        record.begin_phase(self._began)
        return self._span.__enter__()

    def __exit__(self, *exc: Any) -> None:
        if (record := self._record) is not None:
            self._span.__exit__(*exc)
            now = time.perf_counter()
            record.end_phase(now)
            record.metrics.phase(record.route, self._name).observe(now - self._began)


def span(name: str) -> AbstractContextManager[Span | None]:
    """Make the time inside a span of the trace, if there is one."""
    record = _current.get()
    return _NO_SPAN if record is None or record.tracer is None else record.tracer.span(name)


def trace_headers() -> dict[str, str]:
    """Trace headers for requests sent on behalf of this one: of our span, or the caller's own."""
    record = _current.get()
    if record is None:
        return {}
    if record.tracer is not None:
        return record.tracer.headers()
    return {"traceparent": record.traceparent} if record.traceparent else {}


def trace_id() -> str:
    """Id of the trace that this request belongs to; empty without one."""
    return trace_headers().get("traceparent", "")[3:35]


def notes() -> Notes:
    """The notes about the request that each of its episodes carries."""
    record = _current.get()
    if record is None:
        return Notes()
    trace = trace_headers().get("traceparent", "")
    return record.notes().model_copy(update={"route": record.route, "traceparent": trace})
