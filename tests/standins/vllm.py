"""A scripted vLLM on a real socket: it answers each request with the next step of a script and records the requests.

Invariant: it refuses what vLLM refuses (:mod:`tests.standins.vllm_rules`), whatever the script says, and its
answers have vLLM's shapes: ``prompt_token_ids`` at the top (chat) or in the first choice (completions), the role in a
chunk of its own, token ids in each chunk, usage in a last chunk without choices.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from swarm.http.serve import bind
from tests.standins.vllm_rules import CHAT, COMPLETIONS, VllmRules

ENGINE_MODEL = "/models/engine-side-path"
PROMPT = [11, 12, 13]
#: A request with this word in it kills the core.
POISON = "POISON"
_HEAD = {"id": "chatcmpl-1", "created": 1, "model": ENGINE_MODEL}

#: Makes the response to a request body.
Step = Callable[[dict[str, Any]], Response | Awaitable[Response]]


def logprob(token: int) -> float:
    return -token / 128  # a float32, as vLLM's are


def entries(tokens: Sequence[int], texts: Sequence[str] | None = None) -> dict[str, Any]:
    """Log-probabilities of a chat answer; token ``7`` reads ``t7`` unless ``texts`` says otherwise."""
    texts = texts or [f"t{token}" for token in tokens]
    content = [
        {"token": text, "logprob": logprob(token), "bytes": list(text.encode()), "top_logprobs": []}
        for token, text in zip(tokens, texts, strict=True)
    ]
    return {"content": content}


def usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


# ---------------------------------------------------------------------- plain chat answers


def plain_choice(tokens: list[int], finish: str = "stop", index: int = 0, **changes: Any) -> dict[str, Any]:
    """A choice with the text ``t1 t2 ...``; ``changes`` replace fields."""
    return {
        "index": index,
        "message": {"role": "assistant", "content": " ".join(f"t{t}" for t in tokens), "tool_calls": []},
        "logprobs": entries(tokens),
        "finish_reason": finish,
        "stop_reason": None,
        "token_ids": tokens,
    } | changes


def chat_answer(
    choices: Sequence[dict[str, Any]], *, completion: int | None = None, prompt: list[int] = PROMPT
) -> dict[str, Any]:
    """A plain chat answer; ``completion`` replaces the number of completion tokens in ``usage``."""
    count = sum(len(choice["logprobs"]["content"]) for choice in choices) if completion is None else completion
    return {
        **_HEAD,
        "object": "chat.completion",
        "choices": list(choices),
        "usage": usage(len(prompt), count),
        "prompt_token_ids": prompt,
    }


def several(*choices: dict[str, Any], completion: int | None = None, prompt: list[int] = PROMPT) -> Step:
    """Answer with these choices in this order; see :func:`chat_answer`."""
    return lambda body: JSONResponse(chat_answer(choices, completion=completion, prompt=prompt))


def plain(tokens: list[int], finish: str = "stop", *, prompt: list[int] = PROMPT, **changes: Any) -> Step:
    """Answer with ``n`` equal choices; ``changes`` replace fields of the answer or of each choice."""

    def reply(body: dict[str, Any]) -> Response:
        choices = [plain_choice(tokens, finish, index) for index in range(body.get("n") or 1)]
        answer = chat_answer(choices, prompt=prompt)
        for key, value in changes.items():
            for part in [answer] if key in answer else choices:
                part[key] = value
        return JSONResponse(answer)

    return reply


def status(code: int, payload: Any) -> Step:
    return lambda body: JSONResponse(payload, status_code=code)


# ---------------------------------------------------------------------- streamed chat answers


def sse(chunks: list[dict[str, Any] | Callable[[], Awaitable[Any]]], done: bool = True) -> Response:
    """A stream of ``chunks``; a callable is awaited in its place and sends nothing."""

    async def body() -> AsyncIterator[str]:
        for chunk in chunks:
            if callable(chunk):
                await chunk()
            else:
                yield f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
        if done:
            yield "data: [DONE]\n\n"

    return StreamingResponse(body(), media_type="text/event-stream")


def streamed(*chunks: dict[str, Any] | Callable[[], Awaitable[Any]], done: bool = True) -> Step:
    return lambda body: sse(list(chunks), done)


def chat_chunk(choice: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    choices = [] if choice is None else [{"index": 0, "logprobs": None, "finish_reason": None} | choice]
    return {**_HEAD, "id": "chatcmpl-s", "object": "chat.completion.chunk", "choices": choices} | more


def role_chunk(prompt: list[int] = PROMPT) -> dict[str, Any]:
    return chat_chunk({"delta": {"role": "assistant", "content": ""}}, prompt_token_ids=prompt)


def token_chunk(tokens: list[int], finish: str | None = None, delta: dict[str, Any] | None = None) -> dict[str, Any]:
    text = {"content": "".join(f"t{t} " for t in tokens)}
    choice: dict[str, Any] = {"delta": text if delta is None else delta, "token_ids": tokens}
    return chat_chunk(choice | {"logprobs": entries(tokens), "finish_reason": finish})


def of(index: int, chunk: dict[str, Any]) -> dict[str, Any]:
    """``chunk`` for choice ``index``."""
    return chunk | {"choices": [choice | {"index": index} for choice in chunk["choices"]]}


def usage_chunk(completion: int, prompt: int = len(PROMPT)) -> dict[str, Any]:
    return chat_chunk(None, usage=usage(prompt, completion))


def spoken(answer: dict[str, Any], stream: bool, before: Callable[[], Awaitable[Any]] | None = None) -> Response:
    """A chat answer whose tokens spell its text, plain or streamed, once ``before`` has returned.

    ``before`` is cancelled when the caller leaves.
    """
    if stream:
        return sse([*([before] if before else ()), *chunks_of(answer)])
    if before is None:
        return JSONResponse(answer)

    async def body() -> AsyncIterator[bytes]:
        await before()
        yield json.dumps(answer).encode()

    return StreamingResponse(body(), media_type="application/json")


def chunks_of(answer: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The stream of a plain chat answer whose tokens spell its text: one chunk per token, tool calls in one chunk."""
    for choice in answer["choices"]:
        yield of(choice["index"], role_chunk(answer["prompt_token_ids"]))
        ids, listed = choice["token_ids"], choice["logprobs"]["content"]
        deltas = list(_deltas(choice["message"], [entry["token"] for entry in listed]))
        for place, (delta, length) in enumerate(deltas):
            finish = choice["finish_reason"] if place == len(deltas) - 1 else None
            part = {"delta": delta, "token_ids": ids[:length], "logprobs": {"content": listed[:length]}}
            yield of(choice["index"], chat_chunk(part | {"finish_reason": finish}))
            ids, listed = ids[length:], listed[length:]
    yield chat_chunk(None, usage=answer["usage"])


def _deltas(message: dict[str, Any], texts: Sequence[str]) -> Iterator[tuple[dict[str, Any], int]]:
    """Each delta of ``message`` and how many tokens it takes."""
    start = 0
    if thought := message.get("reasoning"):
        while sum(map(len, texts[:start])) < len(thought):
            start += 1
        yield {"reasoning": thought}, start
    if calls := message.get("tool_calls"):
        numbered = [{"index": number, **call} for number, call in enumerate(calls)]
        yield {"content": message["content"], "tool_calls": numbered}, len(texts) - start
        return
    for text in texts[start:]:
        yield {"content": text}, 1


# ---------------------------------------------------------------------- /v1/completions


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
    """Answer ``/v1/completions`` with these tokens; ``counted`` replaces the completion tokens in ``usage``."""
    choices = [
        {**completion_chunk(tokens, finish, PROMPT)["choices"][0], "index": index}
        for index, tokens in enumerate(answers)
    ]
    count = sum(map(len, answers)) if counted is None else counted
    answer = {**completion_chunk([]), "choices": choices, "usage": usage(len(PROMPT), count)}
    return lambda body: JSONResponse(answer)


# ---------------------------------------------------------------------- the servers


class ScriptedVllm:
    """Each request takes the next step of ``script``; ``default`` answers when the script is empty.

    Attributes:
        requests: path and body of each request.
        streaming: how many hanging answers have sent all that they were to send.
        dead: its core has died, of a request with :data:`POISON` in it, say: all calls fail, and ``/health`` says so.
        cancelled: set when a caller cancelled a hanging answer; ``cancellations`` has the loop's time of each.
    """

    def __init__(self, default: Step | None = None) -> None:
        self.rules = VllmRules()
        self.script: deque[Step] = deque()
        self.default: Step = default or plain([1, 2])
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.cancelled = asyncio.Event()
        self.cancellations: list[float] = []
        self.streaming = 0
        self.dead = asyncio.Event()
        posts = (CHAT, COMPLETIONS, "/v1/embeddings", "/tokenize", "/detokenize")
        routes = [Route(path, self._answer, methods=["POST"]) for path in posts]
        self.app = Starlette(routes=[Route("/health", self._health, methods=["GET"]), *routes])

    def hang(self, *before: dict[str, Any]) -> Step:
        """Stream ``before`` and then nothing until the caller leaves."""

        async def forever() -> None:
            self.streaming += 1
            try:
                await asyncio.Event().wait()
            finally:
                self.streaming -= 1
                self.cancellations.append(asyncio.get_running_loop().time())
                self.cancelled.set()

        return streamed(*before, forever)

    async def _health(self, request: Request) -> Response:
        return Response(status_code=503 if self.dead.is_set() else 200)

    def prompt_tokens(self, body: dict[str, Any]) -> int:
        """The length of the prompt for the context limit; a script counts no tokens."""
        return 0

    def step(self, path: str) -> Step:
        """What answers the next request to ``path``."""
        return self.script.popleft() if self.script else self.default

    async def _answer(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append((request.url.path, body))
        if refusal := self.rules.refusal(request.url.path, body, self.prompt_tokens(body)):
            return JSONResponse(refusal[1], refusal[0])
        if POISON in str(body):
            self.dead.set()
        if self.dead.is_set():
            return _core_died()
        reply = self.step(request.url.path)(body)
        if isinstance(reply, Response):
            return reply
        dying, replying = asyncio.ensure_future(self.dead.wait()), asyncio.ensure_future(reply)
        try:
            await asyncio.wait({dying, replying}, return_when=asyncio.FIRST_COMPLETED)
            return replying.result() if replying.done() else _core_died()
        finally:
            dying.cancel()
            replying.cancel()


def _core_died() -> Response:
    # verl's server lacks what vLLM's own handler looks for
    words = "'State' object has no attribute 'server'"
    error = {"message": words, "type": "InternalServerError", "param": None, "code": 500}
    return JSONResponse({"error": error}, 500)


class _Server(uvicorn.Server):
    """Leaves signals to the test run, and stops on events instead of at uvicorn's ticks of 0.1 s."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.over = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        await self.over.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        if self.server_state.tasks:
            _, late = await asyncio.wait(self.server_state.tasks, timeout=5)
            for task in late:
                task.cancel()
        await self.lifespan.shutdown()


@contextlib.asynccontextmanager
async def listening(app: ASGIApp, port: int = 0, keep_alive: int = 5) -> AsyncGenerator[str]:
    """Serve ``app`` on a loopback port, by default a free one, in this event loop; yields the URL. An idle connection
    is closed after ``keep_alive`` seconds, as uvicorn and vLLM do."""
    listener = bind("127.0.0.1", port)
    server = _Server(
        uvicorn.Config(app, log_config=None, log_level="warning", access_log=False, timeout_keep_alive=keep_alive)
    )
    running = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        # connections wait in the socket's backlog until the app has started
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.over.set()
        await running
