"""Chat answers for property tests, and any way to cut them into the chunks of a stream."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

HEAD = {"id": "chatcmpl-7", "created": 5, "model": "tiny"}
USAGE = {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6, "prompt_tokens_details": {"cached_tokens": 3}}

_ARGUMENTS = st.dictionaries(st.text(max_size=4), st.text(max_size=6) | st.integers() | st.none(), max_size=3)
_CALLS = st.lists(st.tuples(st.text("abc", min_size=1, max_size=4), _ARGUMENTS), max_size=3)


@st.composite
def messages(draw: st.DrawFn) -> dict[str, Any]:
    """An assistant message as vLLM gives it."""
    calls = [
        {
            "id": f"call-{k}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
        }
        for k, (name, arguments) in enumerate(draw(_CALLS))
    ]
    return {
        "role": "assistant",
        "content": draw(st.none() | st.text(max_size=20)),
        "reasoning": draw(st.none() | st.text(max_size=20)),
        "tool_calls": calls,
    }


def completion(message: dict[str, Any], finish: str = "stop", stop: int | str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "message": message, "finish_reason": finish, "stop_reason": stop, "logprobs": None}
    return {**HEAD, "object": "chat.completion", "choices": [choice], "usage": USAGE}


@st.composite
def pieces(draw: st.DrawFn, text: str) -> list[str]:
    """``text`` in pieces, empty ones among them."""
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=5)))
    return [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@st.composite
def chunks(draw: st.DrawFn, message: dict[str, Any], finish: str, stop: int | str | None = None) -> list[Any]:
    """The chunks of a stream that says ``message``."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    for name in ("reasoning", "content"):
        deltas += [{name: piece} for piece in draw(pieces(message[name] or ""))]
    for index, call in enumerate(message["tool_calls"]):
        first, *others = draw(pieces(call["function"]["arguments"]))
        opening = {**call, "index": index, "function": {**call["function"], "arguments": first}}
        deltas.append({"tool_calls": [opening]})
        deltas += [{"tool_calls": [{"index": index, "function": {"arguments": piece}}]} for piece in others]
    joined: list[dict[str, Any]] = [deltas[0]]
    for delta in deltas[1:]:
        # several fields, or several calls, in one chunk
        if not delta.keys() & joined[-1].keys() and draw(st.booleans()):
            joined[-1] |= delta
        elif delta.keys() == joined[-1].keys() == {"tool_calls"} and draw(st.booleans()):
            joined[-1] = {"tool_calls": joined[-1]["tool_calls"] + delta["tool_calls"]}
        else:
            joined.append(delta)
    choices: list[dict[str, Any]] = [{"index": 0, "delta": delta, "finish_reason": None} for delta in joined]
    ending = {"finish_reason": finish, "stop_reason": stop}
    if draw(st.booleans()):
        choices[-1] |= ending
    else:
        choices.append({"index": 0, "delta": {}, **ending})
    return [*({**HEAD, "choices": [choice]} for choice in choices), {**HEAD, "choices": [], "usage": USAGE}]
