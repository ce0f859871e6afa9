"""Another server's answer in its own wire format, read back to the internal form: what a user got, as a candidate.

Invariant: the first choice of a whole answer, or an error; half an answer is never taken for a whole one.
"""

from __future__ import annotations

from collections.abc import Sequence

from adapters.dialects import DIALECTS
from adapters.dialects.dialect import Body, SampledAnswer, unreadable
from adapters.dialects.jsons import object_in
from adapters.dialects.sse import SseDecoder
from swarm.errors import RequestError


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
    if (body := object_in(text)) is None:
        raise unreadable("it is not a JSON object")
    return body
