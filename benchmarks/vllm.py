"""A vLLM that costs almost nothing: precomputed bytes of :mod:`tests.standins.vllm`'s answers, plain or streamed.

Token ids and log-probabilities come only with answers to requests that want them, as in vLLM: a plain proxy does not
carry them. Text is one word per token. It refuses nothing.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections.abc import Iterable
from typing import Any, cast

from tests.standins.vllm import chat_answer, chunks_of, entries, plain_choice

MODEL = "stand-in"
TOKENS = 200
PROMPT = list(range(1000, 1050))
_N = re.compile(rb'"n"\s*:\s*(\d+)')
_STREAM = re.compile(rb'"stream"\s*:\s*true')
_DETAILS = b"return_token_ids"
#: Seconds from a stream's first token to the rest of it, which comes at once.
_REST_AFTER = 0.02


def _answer(choices: int, tokens: int) -> dict[str, Any]:
    ids = [200 + (7 * place) % 1000 for place in range(tokens)]
    texts = [f"t{token} " for token in ids]
    message = {"role": "assistant", "content": "".join(texts), "tool_calls": []}
    found = [plain_choice(ids, index=index, message=message, logprobs=entries(ids, texts)) for index in range(choices)]
    return chat_answer(found, prompt=PROMPT) | {"model": MODEL}


def _encoded(body: dict[str, Any], details: bool) -> bytes:
    """JSON of an answer or a chunk, without token ids and log-probabilities unless ``details``."""
    if not details:
        choices = [{**choice, "logprobs": None} for choice in body["choices"]]
        for choice in choices:
            choice.pop("token_ids", None)
        body = {key: value for key, value in body.items() if key != "prompt_token_ids"} | {"choices": choices}
    return json.dumps({**body, "model": MODEL}).encode()


@functools.cache
def completion(choices: int, details: bool, tokens: int = TOKENS) -> bytes:
    """A plain chat answer with its HTTP head; ``details``: with token ids and log-probabilities."""
    body = _encoded(_answer(choices, tokens), details)
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


@functools.cache
def stream(choices: int, details: bool, tokens: int = TOKENS) -> tuple[bytes, bytes]:
    """A streamed answer: up to the first token of each choice, and the rest, one event per token, by turns."""
    chunks = list(chunks_of(_answer(choices, tokens)))
    # the role and a chunk per token of each choice, then the usage
    of_choice = tokens + 1
    turns = [chunks[index * of_choice + place] for place in range(of_choice) for index in range(choices)]
    first, rest = turns[: 2 * choices], [*turns[2 * choices :], chunks[-1]]
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
    encode = functools.partial(_encoded, details=details)
    return head + _framed(map(encode, first)), _framed([*map(encode, rest), b"[DONE]"]) + b"0\r\n\r\n"


def _framed(events: Iterable[bytes]) -> bytes:
    data = b"".join(b"data: %b\n\n" % event for event in events)
    return b"%x\r\n%b\r\n" % (len(data), data)


class ChatServer(asyncio.Protocol):
    """Answers every POST in the form it asks for, ``delay`` seconds after it came, and every GET with an empty 200."""

    #: Seconds to the first token, or to the whole of a plain answer.
    delay = 0.0

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
            self._transport.write(completion(choices, details))
            return
        first, rest = stream(choices, details)
        self._transport.write(first)
        asyncio.get_running_loop().call_later(_REST_AFTER, self._transport.write, rest)
