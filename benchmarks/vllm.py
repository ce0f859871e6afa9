"""A stand-in for vLLM's chat route that costs almost nothing: precomputed answers, plain or streamed.

Token ids and log-probabilities come only with answers that were asked for them, as in vLLM: a plain proxy is not made
to carry them. Text is one word per token.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
from typing import Any, cast

MODEL = "stand-in"
TOKENS = 200
PROMPT = list(range(1000, 1050))
_N = re.compile(rb'"n"\s*:\s*(\d+)')
_STREAM = re.compile(rb'"stream"\s*:\s*true')
_DETAILS = b"return_token_ids"
_HEAD = {"id": "chatcmpl-stand-in", "created": 1, "model": MODEL}
#: Seconds from a stream's first token to the rest of it, which comes at once.
_REST_AFTER = 0.02


@functools.cache
def completion(choices: int, details: bool, tokens: int = TOKENS) -> bytes:
    """A plain chat answer as vLLM 0.28 gives it, with its head; ``details``: token ids and log-probabilities."""
    ids = _ids(tokens)
    choice = {"message": {"role": "assistant", "content": "".join(map(_text, ids)), "tool_calls": []}}
    choice |= {"finish_reason": "stop", "stop_reason": None, "logprobs": None}
    if details:
        choice |= {"logprobs": {"content": [_entry(token) for token in ids]}, "token_ids": ids}
    count = choices * tokens
    answer = {
        **_HEAD,
        "object": "chat.completion",
        "choices": [{"index": index, **choice} for index in range(choices)],
        "usage": {
            "prompt_tokens": len(PROMPT),
            "completion_tokens": count,
            "total_tokens": len(PROMPT) + count,
        },
    } | ({"prompt_token_ids": PROMPT} if details else {})
    body = json.dumps(answer).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


@functools.cache
def stream(choices: int, details: bool, tokens: int = TOKENS) -> tuple[bytes, bytes]:
    """A streamed answer: up to the first token of each choice, and the rest, one event per token."""
    ids = _ids(tokens)
    first = [_chunk({"delta": {"role": "assistant", "content": ""}}, index, details) for index in range(choices)]
    first += [_token_chunk(ids[0], index, details) for index in range(choices)]
    rest = [_token_chunk(token, index, details) for token in ids[1:] for index in range(choices)]
    rest += [_chunk({"delta": {}, "finish_reason": "stop"}, index, False) for index in range(choices)]
    count = choices * tokens
    usage = {"prompt_tokens": len(PROMPT), "completion_tokens": count, "total_tokens": len(PROMPT) + count}
    rest.append({**_HEAD, "object": "chat.completion.chunk", "choices": [], "usage": usage})
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + _framed(first), _framed(rest, b"data: [DONE]\n\n") + b"0\r\n\r\n"


def _framed(chunks: list[dict[str, Any]], end: bytes = b"") -> bytes:
    data = b"".join(b"data: %b\n\n" % json.dumps(chunk).encode() for chunk in chunks) + end
    return b"%x\r\n%b\r\n" % (len(data), data)


def _token_chunk(token: int, index: int, details: bool) -> dict[str, Any]:
    more = {"logprobs": {"content": [_entry(token)]}, "token_ids": [token]} if details else {}
    return _chunk({"delta": {"content": _text(token)}, **more}, index, False)


def _chunk(choice: dict[str, Any], index: int, with_prompt: bool) -> dict[str, Any]:
    choice = {"index": index, "logprobs": None, "finish_reason": None} | choice
    prompt = {"prompt_token_ids": PROMPT} if with_prompt else {}
    return {**_HEAD, "object": "chat.completion.chunk", "choices": [choice], **prompt}


def _ids(tokens: int) -> list[int]:
    return [200 + (7 * place) % 1000 for place in range(tokens)]


def _text(token: int) -> str:
    return f"t{token} "


def _entry(token: int) -> dict[str, Any]:
    text = _text(token)
    return {"token": text, "logprob": -token / 5000, "bytes": list(text.encode()), "top_logprobs": []}


class ChatServer(asyncio.Protocol):
    """Answers every POST in the form it asks for, ``delay`` seconds after it came, and every GET with an empty 200."""

    #: seconds to the first token, or to the whole of a plain answer
    delay = 0.0
    #: of each choice
    tokens = TOKENS

    def __init__(self) -> None:
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from asyncio's
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (head := self._received.find(b"\r\n\r\n")) >= 0:
            lowered = self._received[:head].lower()
            start = lowered.find(b"content-length:")
            length = int(lowered[start + 15 :].split(b"\r\n", 1)[0]) if start >= 0 else 0
            end = head + 4 + length
            if len(self._received) < end:
                return
            body, self._received = self._received[head + 4 : end], self._received[end:]
            if not body:
                self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            elif self.delay:
                asyncio.get_running_loop().call_later(self.delay, self._answer, body)
            else:
                self._answer(body)

    def _answer(self, body: bytes) -> None:
        found = _N.search(body)
        choices, details = int(found[1]) if found else 1, _DETAILS in body
        if not _STREAM.search(body):
            self._transport.write(completion(choices, details, self.tokens))
            return
        first, rest = stream(choices, details, self.tokens)
        self._transport.write(first)
        asyncio.get_running_loop().call_later(_REST_AFTER, self._transport.write, rest)
