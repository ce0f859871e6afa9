"""Wire formats of applications, one class per format, all translated to and from one internal form."""

from collections.abc import Iterable

from adapters.dialects.chat import ChatDialect
from adapters.dialects.completions import CompletionsDialect
from adapters.dialects.dialect import Dialect, EventStream, LLMRequest, SampledAnswer, left_out_header
from adapters.dialects.jsons import to_json
from adapters.dialects.messages import MessagesDialect
from adapters.dialects.responses import ResponsesDialect

#: All formats: the gateway and every episode answer each of them at its ``path``.
DIALECTS: tuple[Dialect, ...] = (ChatDialect(), CompletionsDialect(), ResponsesDialect(), MessagesDialect())


def dialect_of(path: str, headers: Iterable[tuple[bytes, bytes]]) -> Dialect:
    """The format in which the sender of a request reads errors: the one that owns it, else OpenAI's."""
    headers = list(headers)
    return next((dialect for dialect in DIALECTS if dialect.owns(path, headers)), DIALECTS[0])


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
    "dialect_of",
    "left_out_header",
    "to_json",
]
