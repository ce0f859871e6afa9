"""What every dialect can do, and how the events of a streamed answer become bytes.

Invariant: put together as the dialect's own SDKs do, the bytes of a stream say exactly what the plain body would have
said.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from adapters.dialects.forms import LLMRequest
from adapters.dialects.sse import encode_named
from swarm.errors import SwarmGatewayError

Body = dict[str, Any]


class EventStream(Protocol):
    """Makes the bytes of one streamed answer from the chunks of a chat completion."""

    @property
    def keepalive(self) -> bytes:
        """What may stand between two events, and before the first, without meaning anything."""
        ...

    def take(self, chunk: Mapping[str, Any]) -> bytes:
        """The events that a ``chat.completion.chunk`` brings; may be empty.

        Raises:
            UpstreamError: it makes no sense after those before it.
        """
        ...

    def end(self) -> bytes:
        """The last events of a stream that is whole.

        Raises:
            UpstreamError: no chunk told a finish reason.
        """
        ...

    def fail(self, exc: SwarmGatewayError) -> bytes:
        """The last events of a stream that cannot go on, be it before its first chunk."""
        ...


class Dialect(Protocol):
    """One wire format, translated without I/O; an instance serves any number of requests.

    Attributes:
        path: of its address, the same here, at the episodes' addresses and at an upstream.
    """

    path: str

    def parse(self, data: Body) -> LLMRequest:
        """The internal form of a request body.

        Raises:
            RequestError: a field is missing, of the wrong type, or nothing that can be carried; ``param`` names it.
        """
        ...

    def answer(self, data: Mapping[str, Any], completion: Mapping[str, Any]) -> Body:
        """The body for a ``chat.completion``, the answer to request ``data``.

        Raises:
            UpstreamError: it is no chat completion.
        """
        ...

    def stream(self, data: Mapping[str, Any]) -> EventStream:
        """Makes the events of a streamed answer to request ``data``."""
        ...

    def error(self, exc: SwarmGatewayError) -> Body:
        """The error body for ``exc``."""
        ...


class Events(Protocol):
    """Makes the events of one streamed answer; each names itself by its ``type``. As :class:`EventStream`."""

    def take(self, chunk: Mapping[str, Any]) -> list[Body]: ...

    def end(self) -> list[Body]: ...

    def fail(self, exc: SwarmGatewayError) -> list[Body]: ...


class NamedEventStream:
    """The event stream of a dialect whose events have names.

    Args:
        events: makes them.
        keepalive: see :class:`EventStream`.
    """

    def __init__(self, events: Events, keepalive: bytes) -> None:
        self._events = events
        self.keepalive = keepalive

    def take(self, chunk: Mapping[str, Any]) -> bytes:
        return _encoded(self._events.take(chunk))

    def end(self) -> bytes:
        return _encoded(self._events.end())

    def fail(self, exc: SwarmGatewayError) -> bytes:
        return _encoded(self._events.fail(exc))


def _encoded(events: list[Body]) -> bytes:
    return b"".join([encode_named(event["type"], event) for event in events])
