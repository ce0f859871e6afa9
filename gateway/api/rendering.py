"""One answer in the dialect it was asked in: a whole body, the events of a stream, or an error.

Invariant: a caller sees one dialect, whatever happens to its request.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from adapters.dialects import Dialect, EventStream
from adapters.dialects.jsons import encode
from gateway.types import Decided, Live
from swarm.errors import SwarmGatewayError
from swarm.http.asgi import error_response

#: Chunks of an answer that is there that go out in one write: a long answer is thousands of them.
_CHUNKS_PER_WRITE = 16


@dataclass(frozen=True)
class Rendering:
    """How one request is answered.

    Attributes:
        dialect: of the request.
        data: its body, as the dialect reads it.
        streamed: whether it asked for a stream.
        more_headers: of every answer.
    """

    dialect: Dialect
    data: Mapping[str, Any]
    streamed: bool
    more_headers: Mapping[str, str]

    def events(self) -> EventStream:
        """Makes the events of the answer; asked for once."""
        return self.dialect.stream(self.data)

    def body(self, completion: Mapping[str, Any]) -> bytes:
        """The plain body of a ``chat.completion``.

        Raises:
            UpstreamError: it is none.
        """
        return encode(self.dialect.answer(self.data, completion))

    def refusal(self, exc: SwarmGatewayError) -> Response:
        """The answer where there is no other."""
        return refusal(self.dialect, exc, self.more_headers)


def refusal(dialect: Dialect, exc: SwarmGatewayError, more_headers: Mapping[str, str]) -> Response:
    """``exc`` as ``dialect`` says it, with ``x-should-retry`` and, where a retry helps, ``retry-after``."""
    plain = error_response(exc)
    kept = {name: value for name, value in plain.headers.items() if name != "content-length"}
    return Response(encode(dialect.error(exc)), status_code=exc.status, headers={**kept, **more_headers})


async def parts_of(outcome: Decided | Live, events: EventStream) -> AsyncIterator[bytes]:
    """The bytes of a streamed answer: what is being sampled at once, what is there in larger parts.

    Raises:
        SwarmGatewayError: the answer breaks off.
    """
    if isinstance(outcome, Live):
        async for chunk in outcome.chunks:
            if part := events.take(chunk):
                yield part
        yield events.end()
        return
    gathered: list[bytes] = []
    async for chunk in outcome.chunks():
        gathered.append(events.take(chunk))
        if len(gathered) == _CHUNKS_PER_WRITE:
            yield b"".join(gathered)
            gathered.clear()
    yield b"".join([*gathered, events.end()])
