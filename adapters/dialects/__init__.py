"""Wire formats of applications, one class per format, all translated to and from one internal form."""

from adapters.dialects.chat import ChatDialect
from adapters.dialects.forms import Answer, LLMRequest, to_json
from adapters.dialects.messages import MessagesDialect
from adapters.dialects.responses import ResponsesDialect

__all__ = ["Answer", "ChatDialect", "LLMRequest", "MessagesDialect", "ResponsesDialect", "to_json"]
