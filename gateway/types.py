"""The types that pass between the stages of a request: the request and its outcome, whatever the dialect; and whether
an answer to it is on its way.

Invariant: inside the gateway there is one form, Chat Completions; dialects translate on the way in and out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from adapters.dialects import LLMRequest


@dataclass(frozen=True, slots=True)
class Caller:
    """The owner of a request: the virtual key's id, the routes it opens (``None``: all), how many of its requests are
    served at once (``None``: no bound), and its label, for people. All are empty in a gateway without keys."""

    key_id: str = ""
    routes: frozenset[str] | None = None
    max_in_flight: int | None = None
    label: str = ""

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
    """

    call: LLMRequest
    headers: Mapping[str, str]
    caller: Caller
    path: str
    raw: bytes
    request_id: str
    prospect: Prospect = field(default_factory=Prospect, compare=False)


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
    """A whole answer: a ``chat.completion`` body, and the same as ``chat.completion.chunk`` bodies; ``close`` as of
    :class:`Live`."""

    completion: dict[str, Any]
    chunks: Callable[[], Iterable[dict[str, Any]]]
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    close: Callable[[], Awaitable[None]] | None = None


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
