"""Another server's answer in its own wire format, read back to the internal form: what a user got, as a candidate.

Invariant: the first choice of a whole answer, or an error; half an answer is never taken for a whole one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

from adapters.dialects.assembly import Assembly
from adapters.dialects.chat import ChatDialect
from adapters.dialects.completions import CompletionsDialect
from adapters.dialects.dialect import Body, SampledAnswer
from adapters.dialects.jsons import object_in
from adapters.dialects.messages import MessagesDialect
from adapters.dialects.responses import ResponsesDialect
from adapters.dialects.sse import SseDecoder
from swarm.errors import RequestError, UpstreamError

_STOPS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}
_INCOMPLETE = {"max_output_tokens": "length", "content_filter": "content_filter"}


def answer_in(path: str, parts: Sequence[bytes], *, streamed: bool) -> SampledAnswer:
    """The first choice of an answer with status 200.

    Args:
        path: of the dialect, such as ``/v1/messages``.
        parts: the bytes of the body, cut anywhere.
        streamed: whether they are server-sent events.

    Raises:
        UpstreamError: it is not whole, no answer of that dialect, or of a dialect that is not read here.
    """
    if path not in _READERS:
        raise _unread(f"answers at {path} are not read")
    whole, stream = _READERS[path]
    try:
        if not streamed:
            return whole(_object(b"".join(parts)))
        decoder = SseDecoder()
        # the blank line that ends the last event may be missing
        events = [event for part in (*parts, b"\n\n") for event in decoder.feed(part)]
        return stream(_object(event) for event in events if event != "[DONE]")
    except (LookupError, TypeError, ValueError, AttributeError, RequestError) as exc:
        raise _unread(f"it is malformed ({type(exc).__name__}: {exc})") from exc


def answer_of_chunks(chunks: Iterable[Body]) -> SampledAnswer:
    """The first choice of the whole stream of ``chat.completion.chunk`` bodies.

    Raises:
        UpstreamError: it has no end.
    """
    assembly = Assembly()
    for chunk in chunks:
        choices = cast("list[Body]", chunk.get("choices") or [])
        assembly.take({**chunk, "choices": [choice for choice in choices if not choice.get("index")]})
    return assembly.answer()


def _unread(why: str) -> UpstreamError:
    return UpstreamError(f"the answer cannot be read: {why}", code="malformed_answer")


def _object(text: bytes | str) -> Body:
    if (body := object_in(text)) is None:
        raise _unread("it is not a JSON object")
    return body


# ------------------------------------------------------------------ completions


def _completion(body: Body) -> SampledAnswer:
    return _text_answer(body, body["choices"][0]["text"], body["choices"][0].get("finish_reason"), body.get("usage"))


def _completion_chunks(chunks: Iterable[Body]) -> SampledAnswer:
    texts: list[str] = []
    finish: str | None = None
    usage: Body = {}
    last: Body = {}
    for last in chunks:
        usage = last.get("usage") or usage
        for choice in last.get("choices") or ():
            if not choice.get("index"):
                texts.append(choice.get("text") or "")
                finish = choice.get("finish_reason") or finish
    return _text_answer(last, "".join(texts), finish, usage)


def _text_answer(body: Body, text: str, finish: str | None, usage: Body | None) -> SampledAnswer:
    if not finish:
        raise _unread("it has no end")
    return SampledAnswer(str(body.get("model") or ""), {"role": "assistant", "content": text}, finish, usage or {})


# ------------------------------------------------------------------ Anthropic's messages


def _message(body: Body) -> SampledAnswer:
    stop, usage = body.get("stop_reason"), body.get("usage") or {}
    if not stop:
        raise _unread("it has no stop_reason")
    user: Body = {"role": "user", "content": "."}
    # a turn of the user follows, for a last one of the assistant would be continued
    turns = [user, {"role": "assistant", "content": body["content"]}, user]
    request = MessagesDialect().parse({"model": "any", "max_tokens": 1, "messages": turns})
    prompt, completion = (int(usage.get(name) or 0) for name in ("input_tokens", "output_tokens"))
    message = next((turn for turn in request.messages if turn["role"] == "assistant"), _EMPTY)
    return SampledAnswer(
        str(body.get("model") or ""), message, _STOPS.get(stop) or str(stop), _usage(prompt, completion)
    )


def _message_events(events: Iterable[Body]) -> SampledAnswer:
    message: Body = {"content": []}
    blocks: dict[int, Body] = {}
    ended = False
    for event in events:
        match event:
            case {"type": "message_start", "message": head}:
                message |= cast("Body", head)
            case {"type": "content_block_start", "index": index, "content_block": block}:
                blocks[index] = dict(cast("Body", block))
            case {"type": "content_block_delta", "index": index, "delta": delta}:
                _extend(blocks[index], cast("Body", delta))
            case {"type": "message_delta", "delta": delta}:
                usage = {**(message.get("usage") or {}), **(event.get("usage") or {})}
                message |= {**cast("Body", delta), "usage": usage}
            case {"type": "message_stop"}:
                ended = True
            case _:
                pass
    if not ended:
        raise _unread("the stream broke off")
    content = [blocks[index] for index in sorted(blocks)]
    for block in content:
        if (written := block.pop("written", None)) is not None:
            block["input"] = json.loads(written or "{}")
    return _message({**message, "content": content})


def _extend(block: Body, delta: Body) -> None:
    match delta:
        case {"type": "input_json_delta", "partial_json": str(more)}:
            block["written"] = block.get("written", "") + more
        case {"type": "text_delta", "text": str(more)}:
            block["text"] = block.get("text", "") + more
        case {"type": "thinking_delta", "thinking": str(more)}:
            block["thinking"] = block.get("thinking", "") + more
        case _:
            pass


# ------------------------------------------------------------------ responses


def _response(body: Body) -> SampledAnswer:
    usage, output = body.get("usage") or {}, cast("list[Body]", body["output"])
    if (status := body.get("status")) not in ("completed", "incomplete"):
        raise _unread(f"its status is {status}")
    request = ResponsesDialect().parse({"model": "any", "input": output}) if output else None
    message = request.messages[-1] if request is not None and request.messages else _EMPTY
    finish = "tool_calls" if message.get("tool_calls") else "stop"
    if status == "incomplete":
        reason = str((body.get("incomplete_details") or {}).get("reason"))
        finish = _INCOMPLETE.get(reason) or reason
    prompt, completion = (int(usage.get(name) or 0) for name in ("input_tokens", "output_tokens"))
    return SampledAnswer(str(body.get("model") or ""), message, finish, _usage(prompt, completion))


def _response_events(events: Iterable[Body]) -> SampledAnswer:
    ends = [event for event in events if event.get("type") in ("response.completed", "response.incomplete")]
    if not ends:
        raise _unread("the stream broke off")
    return _response(ends[-1]["response"])


_EMPTY: Body = {"role": "assistant", "content": ""}


def _usage(prompt: int, completion: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


#: By path: how a whole answer is read, and how the events of a stream.
_READERS: dict[str, tuple[Callable[[Body], SampledAnswer], Callable[[Iterable[Body]], SampledAnswer]]] = {
    ChatDialect().path: (SampledAnswer.from_completion, answer_of_chunks),
    CompletionsDialect().path: (_completion, _completion_chunks),
    MessagesDialect().path: (_message, _message_events),
    ResponsesDialect().path: (_response, _response_events),
}
