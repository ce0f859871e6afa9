"""``Observed``: what passes between one caller and the gateway, noted as it passes.

Invariant: of what was said no more than ``keep`` bytes each way are held.
"""

from __future__ import annotations

import time
from typing import Literal, Protocol

from starlette.types import Message

from gateway.observability.request import Seen
from swarm.http.asgi import header

#: ``ok``; ``refused`` (4xx), ``overloaded`` (429), ``unavailable`` (502 to 504), ``failed``; ``broken``: by an error in
#: the midst of an answer; ``disconnected``: the caller left.
OutcomeName = Literal["ok", "refused", "overloaded", "unavailable", "failed", "broken", "disconnected"]

#: What keeps a silent stream alive, in the dialects' forms: comments and pings.
_KEEPALIVES = (b":", b"event: ping", b'data: {"type":"ping"', b'data: {"type": "ping"')


class Observed:
    """One request and its answer.

    Attributes:
        status: of the answer; 0: none began.
        streamed: whether it is a stream of events.
        asked, answer: the first ``keep`` bytes of each body.
        first_seconds: from the request's arrival to the first event of a stream, keep-alives apart.
        seconds: to the end of the answer; set by :meth:`end`, as ``outcome`` is.
    """

    __slots__ = (
        "answer",
        "asked",
        "first_seconds",
        "gone",
        "keep",
        "method",
        "outcome",
        "parts",
        "path",
        "seconds",
        "seen",
        "status",
        "streamed",
    )

    def __init__(self, seen: Seen, method: str, path: str, keep: int) -> None:
        self.seen = seen
        self.method = method
        self.path = path
        self.keep = keep
        self.asked = bytearray()
        self.answer = bytearray()
        self.status = 0
        self.streamed = False
        self.parts = 0
        self.gone = False
        self.first_seconds: float | None = None
        self.seconds = 0.0
        self.outcome: OutcomeName = "failed"

    @property
    def live(self) -> bool:
        """Whether the answer went out while it was made; one that was judged first is only replayed."""
        return self.seen.policy != "best" and (self.streamed or self.parts > 1)

    def sent(self, message: Message) -> None:
        """Note a part of the answer."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            kind = header(message.get("headers", ()), b"content-type") or b""
            self.streamed = kind.startswith(b"text/event-stream")
            return
        body: bytes = message.get("body", b"")
        if not body:
            return
        self.parts += 1
        if self.streamed and self.first_seconds is None and not body.startswith(_KEEPALIVES):
            self.first_seconds = time.perf_counter() - self.seen.started
        if len(self.answer) < self.keep:
            self.answer += body[: self.keep - len(self.answer)]

    def received(self, message: Message) -> None:
        """Note a part of the request, or that its caller left before the answer was out."""
        if message["type"] == "http.disconnect":
            self.gone = True
        elif len(self.asked) < self.keep:
            self.asked += message.get("body", b"")[: self.keep - len(self.asked)]

    def end(self, *, whole: bool) -> None:
        """The answer is out (``whole``), or nobody waits for the rest."""
        self.seconds = self.seen.end()
        self.outcome = self._outcome(whole)

    def _outcome(self, whole: bool) -> OutcomeName:
        if not whole:
            return "disconnected" if self.gone else "failed"
        if self.status < 400:
            return "broken" if self.seen.failed else "ok"
        if self.status == 429:
            return "overloaded"
        if self.status < 500:
            return "refused"
        return "unavailable" if self.status in (502, 503, 504) else "failed"


class Listener(Protocol):
    """Is told of each request that is over."""

    def request_over(self, observed: Observed) -> None:
        """One is; called within the request, so it must not wait."""
        ...
