"""Wire formats of applications, one class per format, all translated to and from one internal form."""

from adapters.dialects.chat import ChatDialect
from adapters.dialects.completions import CompletionsDialect
from adapters.dialects.dialect import Answer, Dialect, EventStream, LLMRequest, left_out_header
from adapters.dialects.jsons import to_json
from adapters.dialects.messages import MessagesDialect
from adapters.dialects.responses import ResponsesDialect

__all__ = [
    "Answer",
    "ChatDialect",
    "CompletionsDialect",
    "Dialect",
    "EventStream",
    "LLMRequest",
    "MessagesDialect",
    "ResponsesDialect",
    "left_out_header",
    "to_json",
]
