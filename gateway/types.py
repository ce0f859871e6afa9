"""The types that pass between the stages of a request: the request and its outcome, whatever the dialect; and whether
an answer to it is on its way.

Invariant: inside the gateway there is one form, Chat Completions; dialects translate on the way in and out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from adapters.dialects import ChatDialect, Dialect, LLMRequest, left_out_header
from gateway.data.consent import Consent
from swarm.evidence.pairs import Side
from swarm.job import TrainJob
from swarm.protocol import EpisodeType
from swarm.sampling import not_as_asked


@dataclass(frozen=True, slots=True)
class Caller:
    """The owner of a request: the virtual key's id, the routes it opens (``None``: all), how many of its requests are
    served at once (``None``: no bound), its label, for people, whether what it sends may be trained (``None``: it does
    not say), and the side that answers it in a canary (``None``: drawn). All are empty in a gateway without keys."""

    key_id: str = ""
    routes: frozenset[str] | None = None
    max_in_flight: int | None = None
    label: str = ""
    train: bool | None = None
    side: Side | None = None

    def opens(self, route: str) -> bool:
        """Whether its key opens the route of this name."""
        return self.routes is None or route in self.routes


class Prospect:
    """Whether an answer to one request is on its way. Until it is, the request's stream sends no headers, so that an
    error has a status and an SDK may ask again; from then on the stream is kept alive.

    Attributes:
        needed: how many answers make up the response.
    """

    def __init__(self) -> None:
        self.needed = 1
        self._parts: dict[object, Callable[[], float | None]] = {}
        self._followed: Prospect | None = None

    def since(self) -> float | None:
        """When, on the loop's clock, the whole answer came under way; ``None``: it may still fail for want of an
        engine."""
        if self._followed is not None:
            return self._followed.since()
        times = [time for part in self._parts.values() if (time := part()) is not None]
        return max(times) if len(times) >= self.needed else None

    def follow(self, other: Prospect) -> None:
        """The answer will be that of another request."""
        self._followed = other

    @contextmanager
    def sampling(self) -> Generator[None]:
        """An answer is sampled inside; unless that fails, it stays under way."""
        began, part = asyncio.get_running_loop().time(), object()
        self._parts[part] = lambda: began
        try:
            yield
        except BaseException:
            del self._parts[part]
            raise

    @contextmanager
    def waiting(self, patience: float, away: Callable[[], object]) -> Generator[None]:
        """Inside, an answer waits for its turn: after ``patience`` seconds it counts as under way, except while
        ``away()`` says that nobody could sample it."""
        loop, part = asyncio.get_running_loop(), object()
        ripe = loop.time() + patience
        self._parts[part] = lambda: ripe if loop.time() >= ripe and not away() else None
        try:
            yield
        finally:
            del self._parts[part]


@dataclass(slots=True)
class LeftOut:
    """What is left out of one request. It grows while the request is answered, and what it has when the headers of the
    answer leave is in them.

    Attributes:
        dialect: of the request.
        headers: of the answer.
        note: called with all lines whenever there are more.
        lines: one for each field, with the reason.
    """

    dialect: Dialect = field(default_factory=ChatDialect)
    headers: dict[str, str] = field(default_factory=dict[str, str])
    note: Callable[[Sequence[str]], None] | None = None
    lines: list[str] = field(default_factory=list[str])

    def add(self, lines: Iterable[str]) -> None:
        """Add those of ``lines`` that are new."""
        new = [line for line in dict.fromkeys(lines) if line not in self.lines]
        if not new:
            return
        self.lines += new
        self.headers |= left_out_header(self.lines)
        if self.note is not None:
            self.note(self.lines)

    def not_as_asked(self, body: Mapping[str, Any], job: TrainJob | None, *, episode_type: EpisodeType | None) -> None:
        """Add the fields of ``body``, in chat form, that the answer does not heed: see :mod:`swarm.sampling`."""
        if job is not None:
            self.add(self.dialect.notes_of(not_as_asked(body, job, episode_type=episode_type)))


@dataclass(frozen=True, slots=True)
class Incoming:
    """One request of an application.

    Attributes:
        call: the internal form.
        headers: names in lower case, without secrets; hooks see them.
        caller: the owner of its key.
        path: of the dialect, such as ``/v1/messages``; the same path of an upstream speaks the same dialect.
        raw: the body as it came.
        request_id: names the request in logs and traces.
        prospect: of its answer.
        left_out: what its answer says is left out of it.
        consent: whether its texts may be kept.
        values: what the placeholders in ``call`` stand for; ``raw`` has the values themselves.
        placed: whether it has its place on the route already, as a part of a request.
        query: of its address, without the question mark; an upstream that speaks the dialect gets it.
    """

    call: LLMRequest
    headers: Mapping[str, str]
    caller: Caller
    path: str
    raw: bytes
    request_id: str
    prospect: Prospect = field(default_factory=Prospect, compare=False)
    left_out: LeftOut = field(default_factory=LeftOut)
    consent: Consent = field(default_factory=Consent, compare=False)
    values: Mapping[str, str] = field(default_factory=dict[str, str], compare=False, repr=False)
    placed: bool = False
    query: str = ""


@dataclass(frozen=True, slots=True)
class AnyRequest:
    """A request to forward as it came; ``path`` begins with ``/v1``, ``query`` has no question mark."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    body: bytes
    model: str | None
    caller: Caller


@dataclass(frozen=True, slots=True)
class Decided:
    """A whole answer: a ``chat.completion`` body, and where a stream was asked for, the same as
    ``chat.completion.chunk`` bodies; ``close`` as of :class:`Live`."""

    completion: dict[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    close: Callable[[], Awaitable[None]] | None = None
    chunks: Callable[[], Iterable[dict[str, Any]]] = tuple


@dataclass(frozen=True, slots=True)
class Live:
    """An answer that is being sampled: ``chat.completion.chunk`` bodies as they come, the last with the usage if that
    was asked for; ``close`` is called when they are sent or given up."""

    chunks: AsyncIterator[dict[str, Any]]
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    close: Callable[[], Awaitable[None]] | None = None


@dataclass(frozen=True, slots=True)
class Relayed:
    """An upstream's own answer in the dialect that was asked: its status and bytes go out as they came; ``close`` as of
    :class:`Live`."""

    status: int
    headers: Mapping[str, str]
    body: bytes | AsyncIterator[bytes]
    close: Callable[[], Awaitable[None]] | None = None


Outcome = Decided | Live | Relayed


def stream_of(outcome: Outcome) -> AsyncIterator[Any] | None:
    """What is still to come of it, chunks or bytes; ``None``: it is there as a whole."""
    if isinstance(outcome, Live):
        return outcome.chunks
    body = outcome.body if isinstance(outcome, Relayed) else b""
    return None if isinstance(body, bytes) else body
