"""Wire formats of applications, one class per format, all translated to and from one internal form."""

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, cast

from adapters.dialects.chat import ChatDialect
from adapters.dialects.completions import CompletionsDialect
from adapters.dialects.dialect import (
    Body,
    Dialect,
    EventStream,
    LLMRequest,
    SampledAnswer,
    left_out_header,
    unreadable,
)
from adapters.dialects.jsons import to_json
from adapters.dialects.messages import MessagesDialect
from adapters.dialects.responses import ResponsesDialect
from adapters.dialects.sse import SseDecoder
from swarm.errors import RequestError

#: All formats: the gateway and every episode answer each of them at its ``path``.
DIALECTS: tuple[Dialect, ...] = (ChatDialect(), CompletionsDialect(), ResponsesDialect(), MessagesDialect())


def dialect_of(path: str, headers: Iterable[tuple[bytes, bytes]]) -> Dialect:
    """The format in which the sender of a request reads errors: the one that owns it, else OpenAI's."""
    headers = list(headers)
    return next((dialect for dialect in DIALECTS if dialect.owns(path, headers)), DIALECTS[0])


def answer_in(path: str, parts: Sequence[bytes], *, streamed: bool) -> SampledAnswer:
    """The first choice of an answer with status 200.

    Args:
        path: of the dialect, such as ``/v1/messages``.
        parts: the bytes of the body, cut anywhere.
        streamed: whether they are server-sent events.

    Raises:
        UpstreamError: it is not whole, no answer of that dialect, or of a dialect that is not read here.
    """
    dialect = next((dialect for dialect in DIALECTS if dialect.path == path), None)
    if dialect is None:
        raise unreadable(f"answers at {path} are not read")
    try:
        if not streamed:
            return dialect.read(_object(b"".join(parts)))
        decoder = SseDecoder()
        # the blank line that ends the last event may be missing
        events = [event for part in (*parts, b"\n\n") for event in decoder.feed(part)]
        return dialect.read_stream(_object(event) for event in events if event != "[DONE]")
    except (LookupError, TypeError, ValueError, AttributeError, RequestError) as exc:
        raise unreadable(f"it is malformed ({type(exc).__name__}: {exc})") from exc


def _object(text: bytes | str) -> Body:
    body: Any = None
    with suppress(ValueError, RecursionError):
        # orjson makes a float of an integer beyond 64 bits, as the arguments of a tool may have
        body = json.loads(text)
    if not isinstance(body, dict):
        raise unreadable("it is not a JSON object")
    return cast("Body", body)


__all__ = [
    "DIALECTS",
    "ChatDialect",
    "CompletionsDialect",
    "Dialect",
    "EventStream",
    "LLMRequest",
    "MessagesDialect",
    "ResponsesDialect",
    "SampledAnswer",
    "answer_in",
    "dialect_of",
    "left_out_header",
    "to_json",
]
