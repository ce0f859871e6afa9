"""The types that pass between the stages of a request: the request and its outcome, whatever the dialect.

Invariant: inside the gateway there is one form, Chat Completions; dialects translate on the way in and out.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
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
    """

    call: LLMRequest
    headers: Mapping[str, str]
    caller: Caller
    path: str
    raw: bytes
    request_id: str


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
