"""Wire formats of applications, one class per format, all translated to and from one internal form."""

from adapters.dialects.chat import ChatDialect
from adapters.dialects.forms import Answer, LLMRequest, to_json

__all__ = ["Answer", "ChatDialect", "LLMRequest", "to_json"]
