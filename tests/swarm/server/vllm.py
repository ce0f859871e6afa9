"""A stand-in for vLLM's OpenAI server: answers what a test scripts, and remembers what it was asked.

It refuses what vLLM refuses (:mod:`tests.standins.vllm_rules`), whatever the script says.

The shapes are those of vLLM 0.28: ``prompt_token_ids`` at the top (chat) or in the first choice (completions), the role
in a chunk of its own, token ids per chunk, usage in a last chunk without choices.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from swarm.http.serve import bind
from tests.standins.vllm_rules import VllmRules

ENGINE_MODEL = "/models/engine-side-path"
PROMPT = [11, 12, 13]

Step = Callable[[dict[str, Any]], Response | Awaitable[Response]]


def logprob(token: int) -> float:
    return -token / 128  # a float32, as vLLM's are


def entries(tokens: list[int]) -> dict[str, Any]:
    return {"content": [{"token": f"t{t}", "logprob": logprob(t), "bytes": [t], "top_logprobs": []} for t in tokens]}


def plain_choice(tokens: list[int], finish: str = "stop", index: int = 0, **changes: Any) -> dict[str, Any]:
    """A choice of a plain answer, whose text is ``t1 t2 ...``; ``changes`` replace fields."""
    return {
        "index": index,
        "message": {"role": "assistant", "content": " ".join(f"t{t}" for t in tokens), "tool_calls": []},
        "logprobs": entries(tokens),
        "finish_reason": finish,
        "stop_reason": None,
        "token_ids": tokens,
    } | changes


def several(*choices: dict[str, Any], completion: int | None = None, prompt: list[int] = PROMPT) -> Step:
    """A plain chat answer with these choices in this order; ``completion`` replaces the tokens that usage tells."""
    count = sum(len(choice["logprobs"]["content"]) for choice in choices) if completion is None else completion
    answer = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": ENGINE_MODEL,
        "choices": list(choices),
        "usage": {"prompt_tokens": len(prompt), "completion_tokens": count, "total_tokens": len(prompt) + count},
        "prompt_token_ids": prompt,
    }
    return lambda body: JSONResponse(answer)


def plain(tokens: list[int], finish: str = "stop", *, prompt: list[int] = PROMPT, **changes: Any) -> Step:
    """A plain chat answer whose text is ``t1 t2 ...``, as often as ``n`` of the request asks for it; ``changes``
    replace fields of the choice or of the answer."""

    def reply(body: dict[str, Any]) -> Response:
        count = body.get("n") or 1
        answer: dict[str, Any] = {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": ENGINE_MODEL,
            "choices": [plain_choice(tokens, finish, index) for index in range(count)],
            "usage": {
                "prompt_tokens": len(prompt),
                "completion_tokens": len(tokens) * count,
                "total_tokens": len(prompt) + len(tokens) * count,
            },
            "prompt_token_ids": prompt,
        }
        for key, value in changes.items():
            for part in [answer] if key in answer else answer["choices"]:
                part[key] = value
        return JSONResponse(answer)

    return reply


def sse(chunks: list[dict[str, Any] | Callable[[], Awaitable[Any]]], done: bool = True) -> Response:
    async def body() -> AsyncIterator[str]:
        for chunk in chunks:
            if callable(chunk):
                await chunk()
            else:
                yield f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
        if done:
            yield "data: [DONE]\n\n"

    return StreamingResponse(body(), media_type="text/event-stream")


def chat_chunk(choice: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    choices = [] if choice is None else [{"index": 0, "logprobs": None, "finish_reason": None} | choice]
    return {
        "id": "chatcmpl-s",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": ENGINE_MODEL,
        "choices": choices,
    } | more


def role_chunk() -> dict[str, Any]:
    return chat_chunk({"delta": {"role": "assistant", "content": ""}}, prompt_token_ids=PROMPT)


def token_chunk(tokens: list[int], finish: str | None = None, delta: dict[str, Any] | None = None) -> dict[str, Any]:
    text = {"content": "".join(f"t{t} " for t in tokens)}
    choice: dict[str, Any] = {"delta": text if delta is None else delta, "token_ids": tokens}
    return chat_chunk(choice | {"logprobs": entries(tokens), "finish_reason": finish})


def of(index: int, chunk: dict[str, Any]) -> dict[str, Any]:
    """``chunk`` of choice ``index``."""
    return chunk | {"choices": [choice | {"index": index} for choice in chunk["choices"]]}


def usage_chunk(completion: int, prompt: int = len(PROMPT)) -> dict[str, Any]:
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return chat_chunk(None, usage=usage)


def streamed(*chunks: dict[str, Any] | Callable[[], Awaitable[Any]], done: bool = True) -> Step:
    return lambda body: sse(list(chunks), done)


def completion_chunk(tokens: list[int], finish: str | None = None, prompt: list[int] | None = None) -> dict[str, Any]:
    choice = {
        "index": 0,
        "text": "".join(f"t{t} " for t in tokens),
        "logprobs": {
            "text_offset": [0] * len(tokens),
            "token_logprobs": [logprob(t) for t in tokens],
            "tokens": [f"t{t}" for t in tokens],
            "top_logprobs": [{f"t{t}": logprob(t)} for t in tokens],
        },
        "finish_reason": finish,
        "stop_reason": None,
        "prompt_token_ids": prompt,
        "token_ids": tokens,
    }
    return {"id": "cmpl-1", "object": "text_completion", "created": 2, "model": ENGINE_MODEL, "choices": [choice]}


def told(*answers: list[int], finish: str = "stop", counted: int | None = None) -> Step:
    """A plain answer of /v1/completions with these tokens; ``counted`` replaces what usage tells."""
    choices = [
        {**completion_chunk(tokens, finish, PROMPT)["choices"][0], "index": index}
        for index, tokens in enumerate(answers)
    ]
    count = sum(map(len, answers)) if counted is None else counted
    usage = {"prompt_tokens": len(PROMPT), "completion_tokens": count, "total_tokens": len(PROMPT) + count}
    return lambda body: JSONResponse({**completion_chunk([]), "choices": choices, "usage": usage})


def status(code: int, payload: Any) -> Step:
    return lambda body: JSONResponse(payload, status_code=code)


class ScriptedVllm:
    """Each request takes the next step of the script; ``default`` answers when the script is empty."""

    def __init__(self) -> None:
        self.rules = VllmRules()
        self.script: deque[Step] = deque()
        self.default: Step = plain([1, 2])
        self.requests: list[tuple[str, dict[str, Any]]] = []
        #: set when a hanging answer was cancelled by its caller
        self.cancelled = asyncio.Event()
        #: the loop's time of each such cancellation
        self.cancellations: list[float] = []
        #: hanging answers that have sent what they were to send
        self.streaming = 0
        self.app = Starlette(
            routes=[
                Route("/health", lambda request: Response(), methods=["GET"]),
                Route("/v1/chat/completions", self._answer, methods=["POST"]),
                Route("/v1/completions", self._answer, methods=["POST"]),
                Route("/v1/embeddings", self._answer, methods=["POST"]),
                Route("/tokenize", self._answer, methods=["POST"]),
                Route("/detokenize", self._answer, methods=["POST"]),
            ]
        )

    def hang(self, *before: dict[str, Any]) -> Step:
        """Send ``before`` (a stream) and then nothing, until the caller leaves."""

        async def forever() -> None:
            self.streaming += 1
            try:
                await asyncio.Event().wait()
            finally:
                self.streaming -= 1
                self.cancellations.append(asyncio.get_running_loop().time())
                self.cancelled.set()

        return streamed(*before, forever)

    async def _answer(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append((request.url.path, body))
        if refusal := self.rules.refusal(request.url.path, body):
            return JSONResponse(refusal[1], refusal[0])
        step = self.script.popleft() if self.script else self.default
        reply = step(body)
        return reply if isinstance(reply, Response) else await reply


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, port: int = 0) -> AsyncGenerator[str]:
    """``app`` behind a real socket on a loopback port, any free one by default; the URL."""
    listener = bind("127.0.0.1", port)
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="warning", access_log=False, lifespan="on", timeout_graceful_shutdown=2)
    )
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
