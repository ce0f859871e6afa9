"""The engine of the resilience tests: speaks the real link, answers like vLLM at its own pace, and trains in no time.

``python -m tests.gateway.resilience.engine JOB.yaml``; appends to ``$RESILIENCE_FOLDER/engine.jsonl`` a line
``{"started": pid, "address": "host:port"}`` and ``{"step": n}`` per weight sync, and to ``calls.jsonl`` a line
``{"asked": text, "ended": "served" or "cancelled", "at": seconds}`` per call, on the clock of all processes here.
``GET /counts`` of its address tells how many of its calls run, and how many were given up by their callers.

A prompt with ``LONG`` in it is answered until its caller leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import time
from collections.abc import AsyncIterator, Generator
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from benchmarks.engine import MODEL
from swarm.link.batches import BatchRequests
from swarm.link.engine import ADDRESS_VARIABLE, TOKEN_VARIABLE, EngineEnd
from swarm.link.messages import BatchReady, Finished, Stop
from tests.kill.engine import Log
from tests.swarm.server.vllm import of, plain, role_chunk, serving, token_chunk, usage_chunk

#: Seconds that a sync takes.
SYNC = (0.02, 0.08)
#: Seconds until the first token, between two, and between two of an answer without an end.
FIRST, NEXT, NEXT_OF_LONG = (0.005, 0.03), 0.004, 0.05
TOKENS = (2, 40)
#: A killed server's engine leaves soon, so that not many are there at a time.
_SERVER_TIMEOUT = 3.0


class PacedVllm:
    """Answers plain and streamed chats; counts what runs."""

    def __init__(self, calls: Log) -> None:
        self.running = 0
        self.ended = {"served": 0, "cancelled": 0}
        self._calls = calls
        self.app = Starlette(
            routes=[
                Route("/health", lambda request: Response(), methods=["GET"]),
                Route("/counts", self._counts, methods=["GET"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ]
        )

    async def _counts(self, request: Request) -> Response:
        return JSONResponse({"running": self.running, **self.ended})

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        text = str(body["messages"][-1]["content"])
        count = random.randint(*TOKENS)
        if body.get("stream"):
            return StreamingResponse(self._stream(text, count, body.get("n") or 1), media_type="text/event-stream")
        with self._call(text) as served:
            pause = 3600.0 if "LONG" in text else random.uniform(*FIRST) + NEXT * count
            sampling = asyncio.ensure_future(asyncio.sleep(pause))
            hangup = asyncio.ensure_future(request.receive())
            try:
                await asyncio.wait({sampling, hangup}, return_when=asyncio.FIRST_COMPLETED)
                if sampling.done():
                    served()
            finally:
                sampling.cancel()
                hangup.cancel()
        answer = plain(_tokens(count))(body)
        assert isinstance(answer, Response)
        return answer

    async def _stream(self, text: str, count: int, choices: int) -> AsyncIterator[bytes]:
        long = "LONG" in text
        with self._call(text) as served:
            await asyncio.sleep(random.uniform(*FIRST))
            for index in range(choices):
                yield event(of(index, role_chunk()))
            for place in itertools.count() if long else range(count):
                await asyncio.sleep(NEXT_OF_LONG if long else NEXT)
                finish = "stop" if place == count - 1 and not long else None
                for index in range(choices):
                    yield event(of(index, token_chunk(_tokens(1), finish)))
            yield event(usage_chunk(count * choices))
            yield b"data: [DONE]\n\n"
            served()

    @contextlib.contextmanager
    def _call(self, text: str) -> Generator[Any]:
        ended = "cancelled"

        def served() -> None:
            nonlocal ended
            ended = "served"

        self.running += 1
        try:
            yield served
        finally:
            self.running -= 1
            self.ended[ended] += 1
            self._calls.write(asked=text, ended=ended, at=time.monotonic())


def _tokens(count: int) -> list[int]:
    return [random.randint(1, 99) for _ in range(count)]


def event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


async def main() -> None:
    link, token = os.environ[ADDRESS_VARIABLE], os.environ[TOKEN_VARIABLE]
    folder = Path(os.environ["RESILIENCE_FOLDER"])
    async with serving(PacedVllm(Log(folder / "calls.jsonl")).app) as url:
        address = url.removeprefix("http://")
        log = Log(folder / "engine.jsonl")

        def die() -> None:
            os._exit(1)

        with (
            EngineEnd("driver", link, token, server_timeout=_SERVER_TIMEOUT, on_lost=die) as driver,
            EngineEnd("rollout", link, token, server_timeout=_SERVER_TIMEOUT, on_lost=die) as rollout,
        ):
            log.write(started=os.getpid(), address=address)
            await asyncio.to_thread(train, address, driver, rollout, log)


def train(address: str, driver: EngineEnd, rollout: EngineEnd, log: Log) -> None:
    """A step and a weight sync per batch until the server says Stop."""
    version = 0
    requests = BatchRequests(rollout)
    requests.ask([address], MODEL, version, version + 1)
    while True:
        match rollout.receive(timeout=1.0):
            case BatchReady() as message if requests.take(message):
                version += 1
                time.sleep(random.uniform(*SYNC))
                requests.report(version, {})
                requests.ask([address], MODEL, version, version + 1)
                log.write(step=version)
            case Stop():
                driver.send(Finished())
                return
            case _:
                pass


if __name__ == "__main__":
    asyncio.run(main())
