"""A stand-in engine: speaks the real link, "trains" each batch at once, and answers chat with 200 scripted tokens.

``python -m benchmarks.engine JOB.yaml``, started by the swarm server under measurement in place of the verl adapter.
What it costs is not the server's: its answers are precomputed bytes, and its process waits in between.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
from collections.abc import Callable
from typing import cast

from swarm.link.batches import BatchRequests
from swarm.link.engine import EngineEnd
from swarm.link.messages import BatchReady, Finished, Stop

MODEL = "stand-in"
TOKENS = 200
PROMPT = list(range(1000, 1050))
_N = re.compile(rb'"n"\s*:\s*(\d+)')


def completion(choices: int = 1, tokens: int = TOKENS) -> bytes:
    """A plain chat answer as vLLM 0.28 gives it when asked for token ids and log-probabilities."""
    ids = [200 + (7 * place) % 1000 for place in range(tokens)]
    entries = [
        {"token": f"t{token}", "logprob": -token / 5000, "bytes": list(f"t{token}".encode()), "top_logprobs": []}
        for token in ids
    ]
    answer = {
        "id": "chatcmpl-stand-in",
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", "content": " ".join(f"t{t}" for t in ids), "tool_calls": []},
                "logprobs": {"content": entries},
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": ids,
            }
            for index in range(choices)
        ],
        "usage": {
            "prompt_tokens": len(PROMPT),
            "completion_tokens": choices * tokens,
            "total_tokens": len(PROMPT) + choices * tokens,
        },
        "prompt_token_ids": PROMPT,
    }
    body = json.dumps(answer).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


class ChatServer(asyncio.Protocol):
    """Answers every POST with :func:`completion` of as many choices as it asks for, and every GET with an empty 200."""

    #: the answer with so many choices
    make: Callable[[int], bytes] = staticmethod(functools.cache(completion))

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
                continue
            found = _N.search(body)
            self._transport.write(self.make(int(found[1]) if found else 1))


async def main() -> None:
    server = await asyncio.get_running_loop().create_server(ChatServer, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    def die() -> None:
        os._exit(1)

    with (
        EngineEnd.from_environment("driver", on_lost=die) as driver,
        EngineEnd.from_environment("rollout", on_lost=die) as rollout,
    ):
        await asyncio.to_thread(train, address, driver, rollout)


def train(address: str, driver: EngineEnd, rollout: EngineEnd) -> None:
    """A step per batch until the server says Stop."""
    version = 0
    requests = BatchRequests(rollout)
    requests.ask([address], MODEL, version, version + 1)
    while True:
        match rollout.receive(timeout=1.0):
            case BatchReady() as message if requests.take(message):
                version += 1
                requests.report(version, {})
                requests.ask([address], MODEL, version, version + 1)
            case Stop():
                driver.send(Finished())
                return
            case _:
                pass


if __name__ == "__main__":
    asyncio.run(main())
