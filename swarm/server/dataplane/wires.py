"""How a call is spoken on the wire: chat completions as they are, or a dialect translated to and from them.

Invariant: what is sampled and recorded is a chat call whatever the wire, and a wire changes nothing about when it ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from starlette.responses import Response

from adapters.dialects import ChatDialect, Dialect
from adapters.dialects.jsons import decode, encode
from swarm.errors import SwarmGatewayError
from swarm.http.asgi import error_response

Body = dict[str, Any]


class Wire(Protocol):
    """One call on the wire. All methods that translate an answer raise :class:`UpstreamError` for one that makes no
    sense."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers of the answer, once the request was read."""
        ...

    def request(self, body: Body) -> Body:
        """The chat body that ``body`` asks for; raises :class:`RequestError` for what cannot be carried."""
        ...

    def answer(self, content: bytes) -> bytes:
        """The body of a plain answer, ``content`` being that of chat completions."""
        ...

    def chunk(self, chunk: Body) -> bytes:
        """The events for one chunk of a streamed chat answer; may be empty."""
        ...

    def end(self) -> bytes:
        """The last events of a stream that is whole."""
        ...

    def cut(self, exc: SwarmGatewayError) -> bytes:
        """The last events of a stream that is not."""
        ...

    def refusal(self, exc: SwarmGatewayError) -> Response:
        """The answer where there is no other."""
        ...


class DialectWire:
    """A dialect, translated."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._asked: Body = {}
        self.headers: Mapping[str, str] = {}
        self._events = dialect.stream({})

    def request(self, body: Body) -> Body:
        parsed = self._dialect.parse(body)
        self._asked, self.headers = body, parsed.answer_headers
        self._events = self._dialect.stream(body)
        return parsed.body

    def answer(self, content: bytes) -> bytes:
        return encode(self._dialect.answer(self._asked, decode(content)))

    def chunk(self, chunk: Body) -> bytes:
        return self._events.take(chunk)

    def end(self) -> bytes:
        return self._events.end()

    def cut(self, exc: SwarmGatewayError) -> bytes:
        return self._events.fail(exc)

    def refusal(self, exc: SwarmGatewayError) -> Response:
        plain = error_response(exc)
        kept = {name: value for name, value in plain.headers.items() if name != "content-length"}
        return Response(encode(self._dialect.error(exc)), status_code=exc.status, headers=kept)


class ChatWire(DialectWire):
    """Chat completions, and raw prompts: the answer needs no translation."""

    def __init__(self) -> None:
        super().__init__(ChatDialect())

    def request(self, body: Body) -> Body:
        return body if "prompt" in body else super().request(body)

    def answer(self, content: bytes) -> bytes:
        return content
