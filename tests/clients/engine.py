"""The engine of the client suite: speaks the real link, takes batches, and serves :mod:`tests.clients.model` as vLLM
serves a model, plain and streamed.

``python -m tests.clients.engine JOB.yaml``, started by the swarm server in place of the verl adapter. The shapes are
those of vLLM 0.28; the tokens spell the text.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from benchmarks.engine import train
from swarm.link.engine import EngineEnd
from tests.clients.model import answer, given_up, text_of, waits_for
from tests.standins.vllm_rules import VllmRules
from tests.swarm.server.vllm import serving

NAME = "/models/of-the-engine"
_TOKEN = re.compile(r"\s*\w{1,6}|\s*[^\w\s]|\s+")


class Vocabulary:
    """Token ids by text, in order of their appearance."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def tokens(self, text: str) -> list[tuple[int, str]]:
        return [(self._ids.setdefault(piece, 100 + len(self._ids)), piece) for piece in _TOKEN.findall(text)]


class Served:
    """vLLM's server, as far as clients see it."""

    def __init__(self) -> None:
        self.rules = VllmRules()
        self._words = Vocabulary()
        self.app = Starlette(
            routes=[
                Route("/health", lambda request: Response()),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/tokenize", self._tokenize, methods=["POST"]),
            ]
        )

    def _prompt(self, body: dict[str, Any]) -> list[int]:
        if "prompt" in body:
            text = body["prompt"] if isinstance(body["prompt"], str) else json.dumps(body["prompt"])
        else:
            text = "".join(f"<{one.get('role')}>{text_of(one)}" for one in body["messages"])
        return [token for token, _ in self._words.tokens(text)]

    def _choices(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        good = answer(body)
        # of one alone nobody would see whether the better one is chosen
        messages = [
            given_up(good) if index % 2 == 0 and (body.get("n") or 1) > 1 else good
            for index in range(body.get("n") or 1)
        ]
        return [self._choice(index, message) for index, message in enumerate(messages)]

    def _choice(self, index: int, message: dict[str, Any]) -> dict[str, Any]:
        tokens = [token for _, text in _parts(message) for token in self._words.tokens(text)]
        return {
            "index": index,
            "message": message,
            "logprobs": {"content": [_entry(piece) for _, piece in tokens]},
            "finish_reason": "tool_calls" if message["tool_calls"] else "stop",
            "stop_reason": None,
            "token_ids": [token for token, _ in tokens],
        }

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        prompt = self._prompt(body)
        if refusal := self.rules.refusal(request.url.path, body, len(prompt)):
            return JSONResponse(refusal[1], refusal[0])
        if (path := waits_for(body)) is not None:
            await _waited(request, Path(path))
        choices = self._choices(body)
        head = {"id": "chatcmpl-1", "created": int(time.time()), "model": NAME}
        usage = _usage(prompt, choices)
        if body.get("stream"):
            return StreamingResponse(_events(head, prompt, choices, usage), media_type="text/event-stream")
        whole = {**head, "object": "chat.completion", "choices": choices, "usage": usage, "prompt_token_ids": prompt}
        return JSONResponse(whole)

    async def _completions(self, request: Request) -> Response:
        body = await request.json()
        prompt = self._prompt(body)
        if refusal := self.rules.refusal(request.url.path, body, len(prompt)):
            return JSONResponse(refusal[1], refusal[0])
        choices = self._choices(body)
        for choice in choices:
            choice["text"] = choice.pop("message")["content"]
            entries = choice["logprobs"]["content"]
            choice["prompt_token_ids"] = prompt
            choice["logprobs"] = {
                "tokens": [entry["token"] for entry in entries],
                "token_logprobs": [entry["logprob"] for entry in entries],
                "top_logprobs": None,
                "text_offset": [0 for _ in entries],
            }
        head = {"id": "cmpl-1", "object": "text_completion", "created": int(time.time()), "model": NAME}
        return JSONResponse({**head, "choices": choices, "usage": _usage(prompt, choices)})

    async def _tokenize(self, request: Request) -> Response:
        tokens = self._prompt(await request.json())
        return JSONResponse({"count": len(tokens), "max_model_len": 4096, "tokens": tokens})


async def _waited(request: Request, path: Path) -> None:
    """Tell beside the file that it is waited for (``.asked``), and whether whoever asks left meanwhile (``.left``)."""
    path.with_suffix(".asked").touch()
    while not path.exists():  # noqa: ASYNC240
        if await request.is_disconnected():
            path.with_suffix(".left").touch()
            return
        await asyncio.sleep(0.02)


def _parts(message: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """What the chunks of a streamed message bring, each with the text that its tokens spell."""
    parts: list[tuple[dict[str, Any], str]] = []
    if "reasoning" in message:
        parts.append(({"reasoning": message["reasoning"]}, message["reasoning"]))
    if calls := message["tool_calls"]:
        numbered = [{"index": number, **call} for number, call in enumerate(calls)]
        asked = json.dumps([call["function"] for call in calls])
        return [*parts, ({"content": message["content"], "tool_calls": numbered}, (message["content"] or "") + asked)]
    return [*parts, *(({"content": piece}, piece) for piece in _TOKEN.findall(message["content"]))]


def _entry(piece: str) -> dict[str, Any]:
    return {"token": piece, "logprob": -0.5, "bytes": list(piece.encode()), "top_logprobs": []}


def _usage(prompt: list[int], choices: list[dict[str, Any]]) -> dict[str, int]:
    sampled = sum(len(choice["token_ids"]) for choice in choices)
    return {"prompt_tokens": len(prompt), "completion_tokens": sampled, "total_tokens": len(prompt) + sampled}


async def _events(
    head: dict[str, Any], prompt: list[int], choices: list[dict[str, Any]], usage: dict[str, int]
) -> AsyncIterator[str]:
    """The role, a chunk per token, calls of tools whole, the finish, and the usage."""

    def event(found: list[dict[str, Any]], **more: Any) -> str:
        chunk = {**head, "object": "chat.completion.chunk", "choices": found, **more}
        return f"data: {json.dumps(chunk)}\n\n"

    for choice in choices:
        index, message = choice["index"], choice["message"]
        role = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        yield event([role], prompt_token_ids=prompt)
        entries, ids = choice["logprobs"]["content"], choice["token_ids"]
        parts = _parts(message)
        for number, (delta, text) in enumerate(parts):
            length = len(_TOKEN.findall(text))
            finish = choice["finish_reason"] if number == len(parts) - 1 else None
            part = {"index": index, "delta": delta, "logprobs": {"content": entries[:length]}, "finish_reason": finish}
            yield event([{**part, "token_ids": ids[:length]}])
            entries, ids = entries[length:], ids[length:]
    yield event([], usage=usage)
    yield "data: [DONE]\n\n"


async def main() -> None:
    def die() -> None:
        os._exit(1)

    async with serving(Served().app) as url:
        with (
            EngineEnd.from_environment("driver", on_lost=die) as driver,
            EngineEnd.from_environment("rollout", on_lost=die) as rollout,
        ):
            await asyncio.to_thread(train, url.removeprefix("http://"), NAME, driver, rollout)


if __name__ == "__main__":
    asyncio.run(main())
