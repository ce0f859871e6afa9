"""Chat answers for property tests, and any way to cut them into the chunks of a stream."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from adapters.dialects.sse import SseDecoder

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


def sent(data: bytes) -> list[dict[str, Any]]:
    """The events in the bytes of a stream; each names itself by its ``type``."""
    events = [json.loads(event) for event in SseDecoder().feed(data)]
    names = [line for line in data.decode().split("\n") if line.startswith("event: ")]
    assert names == [f"event: {event['type']}" for event in events]
    return events


_BROKEN = st.sampled_from(["", "{", '{"a', "[1]", "null", "NaN", '{"a": NaN}', '{"input": "x"}', '{"input": 3}'])


_NAMES = st.text("abc", min_size=1, max_size=4)


@st.composite
def deltas(draw: st.DrawFn, names: st.SearchStrategy[str] = _NAMES) -> list[Any]:
    """What a stream may bring, in any order: reasoning, text, and calls in pieces, broken ones among them."""
    found: list[dict[str, Any]] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["reasoning", "content", "call"]), max_size=6)):
        if kind != "call":
            found.append({kind: draw(st.text(max_size=6))})
            continue
        arguments = draw(_BROKEN | _ARGUMENTS.map(json.dumps))
        opening = {"id": f"call-{calls}", "type": "function", "function": {"name": draw(names), "arguments": ""}}
        found.append({"tool_calls": [{**opening, "index": calls}]})
        found += [
            {"tool_calls": [{"index": calls, "function": {"arguments": piece}}]} for piece in draw(pieces(arguments))
        ]
        calls += 1
    return found


def streamed(deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The chunks that bring ``deltas``."""
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": "stop"})
    return [{**HEAD, "choices": [choice]} for choice in choices]


def whole(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client assembles from deltas."""
    message: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        for name, value in delta.items():
            if isinstance(value, str) and name != "role":
                message[name] = (message.get(name) or "") + value
            elif name != "tool_calls":
                message[name] = value
        for place, call in enumerate(delta.get("tool_calls") or []):
            index = call.get("index", place)
            if index in calls:
                calls[index]["function"]["arguments"] += call["function"]["arguments"]
            else:
                calls[index] = {**call, "function": {**call["function"]}}
                calls[index].pop("index", None)
    return message | ({"tool_calls": list(calls.values())} if calls else {})


def joined(deltas: list[dict[str, Any]], free: str = "-") -> tuple[str, str, list[Any]]:
    """The reasoning, the text and the calls of deltas, or of a message, with parsed arguments. Tools whose name ends
    with ``free`` take free input."""
    message = whole(deltas)
    calls: list[Any] = []
    for call in message.get("tool_calls", []):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        value = meant(arguments)
        if name.endswith(free):
            value = {"input": value["input"] if isinstance(value.get("input"), str) else arguments}
        calls.append([call["id"], name, value])
    return message.get("reasoning") or "", message.get("content") or "", calls


def meant(arguments: str) -> Any:
    """Arguments as an object; what is none is wrapped in one, which vLLM takes back."""
    try:
        value = json.loads(arguments or "{}")
        value = {} if value is None else value
        json.dumps(value, allow_nan=False)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": arguments}
