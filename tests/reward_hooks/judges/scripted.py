"""A scripted judge on a real socket: it knows how good each answer is, and prefers places as much as it is told.

Answers are texts like ``answer 3 of quality 7.5``; the judge reads the quality out of the prompt it is sent, so what it
says depends on what the judges of ours really show.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from reward_hooks import Candidate, HookContext, Task
from tests.standins.vllm import listening

_SHOWN = re.compile(r"----- (\w{10}) begin answer (\S+)\n(.*?)\n----- \1 end answer", re.DOTALL)
_QUALITY = re.compile(r"quality (-?[\d.]+)")
TASK = Task(task_id="t", main_query="What is asked?")


def answers(*qualities: float) -> list[Candidate]:
    return [answer(f"answer {index} of quality {quality}", index) for index, quality in enumerate(qualities)]


def answer(text: str, index: int = 0) -> Candidate:
    return Candidate(index=index, message={"role": "assistant", "content": text}, text=text)


def context(group_id: str = "g", seconds: float = 300.0) -> HookContext:
    return HookContext(num_repeat=2, group_id=group_id, deadline_seconds=seconds)


class ScriptedJudge:
    """``bias(place, count)`` is added to the quality of the answer shown at ``place``, counted from 0."""

    def __init__(self, bias: Callable[[int, int], float] = lambda place, count: 0.0) -> None:
        self.bias = bias
        self.logprobs = False
        #: the replies to give first, each in place of a verdict
        self.replies: list[Response] = []
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.peers: set[tuple[str, int]] = set()
        self.in_flight = self.most_in_flight = 0
        #: awaited before each reply
        self.hold: Callable[[], Awaitable[None]] | None = None
        self.url = ""
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/score", self._score, methods=["POST"]),
                Route("/pooling", self._pooling, methods=["POST"]),
                Route("/mine", self._mine, methods=["POST"]),
            ]
        )

    @property
    def endpoint(self) -> dict[str, Any]:
        return {"base_url": f"{self.url}/v1", "model": "judge", "retry_base_seconds": 0.001}

    async def _begin(self, request: Request) -> tuple[dict[str, Any], Response | None]:
        assert request.client is not None
        self.peers.add((request.client.host, request.client.port))
        self.headers.append(dict(request.headers))
        body = await request.json()
        self.bodies.append(body)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            # one turn of the loop at least, so that calls that may overlap do
            await (self.hold() if self.hold is not None else asyncio.sleep(0))
        finally:
            self.in_flight -= 1
        return body, self.replies.pop(0) if self.replies else None

    async def _chat(self, request: Request) -> Response:
        body, scripted = await self._begin(request)
        if scripted is not None:
            return scripted
        shown = [(label, text) for _, label, text in _SHOWN.findall(body["messages"][-1]["content"])]
        felt = [_quality(text) + self.bias(place, len(shown)) for place, (_, text) in enumerate(shown)]
        properties = body["response_format"]["json_schema"]["schema"]["properties"]
        if "verdict" in properties:
            chances = {"A": _sigmoid(felt[0] - felt[1]), "B": _sigmoid(felt[1] - felt[0])}
            if felt[0] == felt[1]:
                chances = {"C": 1.0}
            said = [max(chances, key=chances.__getitem__)]
            text, distributions = json.dumps({"verdict": said[0]}), [chances]
        elif "verdicts" in properties:
            distributions = [_around(value) for value in felt]
            said = [max(chances, key=chances.__getitem__) for chances in distributions]
            text = json.dumps(
                {
                    "verdicts": [
                        {"answer": int(label), "explanation": f'the "score": of {label}', "score": int(digit)}
                        for (label, _), digit in zip(shown, said, strict=True)
                    ]
                }
            )
        else:
            names = properties["scores"]["items"]["properties"]["criterion"]["enum"]
            distributions = [_around(felt[0]) for _ in names]
            said = [max(chances, key=chances.__getitem__) for chances in distributions]
            scores = [{"criterion": name, "score": int(digit)} for name, digit in zip(names, said, strict=True)]
            text = json.dumps({"explanation": "so it is", "scores": scores})
        return JSONResponse(completion(text, _tokens(text, said, distributions) if self.logprobs else None))

    async def _score(self, request: Request) -> Response:
        body, scripted = await self._begin(request)
        data = [{"index": i, "score": _quality(text)} for i, text in enumerate(body["text_2"])]
        usage = {"prompt_tokens": 10, "total_tokens": 10}
        return scripted or JSONResponse({"data": data[::-1], "usage": usage})

    async def _pooling(self, request: Request) -> Response:
        body, scripted = await self._begin(request)
        value = _quality(body["messages"][-1]["content"])
        return scripted or JSONResponse({"data": [{"index": 0, "data": [[0.0], [value]]}]})

    async def _mine(self, request: Request) -> Response:
        body, scripted = await self._begin(request)
        if "all" in body:
            return scripted or JSONResponse({"out": [{"s": _quality(text)} for text in body["all"]]})
        return scripted or JSONResponse({"out": {"values": [-1, _quality(body["one"])]}})


def completion(text: str | None, tokens: list[dict[str, Any]] | None = None, **choice: Any) -> dict[str, Any]:
    logprobs = None if tokens is None else {"content": tokens}
    message = {"role": "assistant", "content": text}
    first = {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": "stop", **choice}
    return {"object": "chat.completion", "choices": [first], "usage": {"prompt_tokens": 100, "completion_tokens": 20}}


def _quality(text: str) -> float:
    found = _QUALITY.search(text)
    assert found, f"no quality in {text!r}"
    return float(found[1])


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def _around(value: float) -> dict[str, float]:
    """The digits beside ``value`` with the chances that make it their mean, as far as the scale goes."""
    value = min(9.0, max(0.0, value))
    low = min(8, int(value))
    return {str(low): 1 - (value - low), str(low + 1): value - low}


def _tokens(text: str, said: list[str], distributions: list[dict[str, float]]) -> list[dict[str, Any]]:
    """One token per character; each verdict's has its distribution, with a stranger among the alternatives."""
    places = [match.end() for match in re.finditer(r'(?<!\\)"(?:score|verdict)": "?', text)]
    chances = dict(zip(places, distributions, strict=True))
    tokens: list[dict[str, Any]] = []
    for place, character in enumerate(text):
        top = [{"token": name, "logprob": math.log(p) if p else -999.0} for name, p in chances.get(place, {}).items()]
        tokens.append({"token": character, "logprob": 0.0, "top_logprobs": [*top, {"token": " the", "logprob": -5.0}]})
    return tokens


@asynccontextmanager
async def judging(bias: Callable[[int, int], float] = lambda place, count: 0.0) -> AsyncIterator[ScriptedJudge]:
    judge = ScriptedJudge(bias)
    async with listening(judge.app) as url:
        judge.url = url
        yield judge
