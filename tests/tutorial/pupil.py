"""The engine of the tutorials' tests: an engine without a trainer, whose model has one weight that learns.

The weight is the share of good answers. What is good depends on the tutorial, which the prompt tells
(:func:`_answers`); a step moves the weight towards the kind of answer that had the higher mean reward.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import threading
from pathlib import Path
from statistics import fmean
from typing import Any

from starlette.responses import JSONResponse, Response

from swarm.job import TrainJob, parse_job
from swarm.tokens import Timeline, TrainBatch
from tests.standins.engine import Engine
from tests.standins.vllm import ScriptedVllm, chat_answer, entries, listening, plain_choice

#: starts the engine; the server appends the path of the job
COMMAND = (sys.executable, "-P", __file__)
_PIECE = re.compile(r"<\w+>|\s*\w+|\s*[^\w\s]|\s+")


class Pupil:
    """Its tokens spell its text, so that an answer that comes back in the next prompt continues its timeline."""

    def __init__(self) -> None:
        self.share = 0.4
        self._random = random.Random(0)
        self._ids: dict[str, int] = {}
        self._good: dict[tuple[int, ...], bool] = {}
        self._lock = threading.Lock()

    def answer(self, body: dict[str, Any]) -> Response:
        prompt = "".join(f"<{one['role']}>{_text(one)}" for one in body["messages"]) + "<assistant>"
        with self._lock:
            choices = [self._choice(index, body) for index in range(body.get("n") or 1)]
            return JSONResponse(chat_answer(choices, prompt=self._tokens(prompt)))

    def _choice(self, index: int, body: dict[str, Any]) -> dict[str, Any]:
        good = self._random.random() < self.share
        message = _message(body, good)
        text = message["content"] or json.dumps(message["tool_calls"])
        tokens = self._tokens(text)
        self._good[tuple(tokens)] = good
        finish = "tool_calls" if message["tool_calls"] else "stop" if good else "length"
        return plain_choice(tokens, finish, index, message=message, logprobs=entries(tokens, _PIECE.findall(text)))

    def _tokens(self, text: str) -> list[int]:
        return [self._ids.setdefault(piece, 100 + len(self._ids)) for piece in _PIECE.findall(text)]

    def learn(self, batch: TrainBatch) -> None:
        for group in batch.groups:
            kinds: dict[bool, list[float]] = {True: [], False: []}
            for one in group.trajectories:
                with self._lock:
                    kinds[self._good[_first_answer(one.timelines[0])]].append(one.reward)
            if all(kinds.values()):
                better = fmean(kinds[True]) > fmean(kinds[False])
                with self._lock:
                    self.share = min(0.95, max(0.05, self.share + (0.1 if better else -0.1)))


def _first_answer(timeline: Timeline) -> tuple[int, ...]:
    mask = [bool(one) for one in timeline.response_mask]
    end = mask.index(False) if False in mask else len(mask)
    return tuple(int(token) for token in timeline.response_ids[:end])


def _text(message: dict[str, Any]) -> str:
    return message.get("content") or json.dumps(message.get("tool_calls"))


def _message(body: dict[str, Any], good: bool) -> dict[str, Any]:
    last = _text(body["messages"][-1])
    message: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": []}
    if body["messages"][-1]["role"] == "tool":
        return message | {"content": f"The calculator says {last}."}
    if body.get("tools"):
        a, b = re.findall(r"\d+", last)[:2]
        sign = "+" if "buys" in last else "-"
        arguments = json.dumps({"a": int(a), "sign": sign, "b": int(b)}) if good else "{}"
        call = {"id": "call_0", "type": "function", "function": {"name": "calculate", "arguments": arguments}}
        return message | {"tool_calls": [call]}
    return message | {"content": _answers(last)[0 if good else 1]}


def _answers(asked: str) -> tuple[str, str]:
    """A good and a bad answer."""
    if "How many" in asked:
        a, b = (int(number) for number in re.findall(r"\d+", asked)[:2])
        return f"{a + b if 'buys' in asked else a - b}", "It is about 77, or more"
    question = asked.removesuffix("Answer in one short sentence.").strip(" ?")
    return f"It is about {question} in the language.", "word " * 60


async def _serve(job: TrainJob) -> None:
    model = Pupil()
    vllm = ScriptedVllm(model.answer)

    class Learning(Engine):
        def step(self, batch: TrainBatch) -> bool:
            model.learn(batch)
            return super().step(batch)

    async with listening(vllm.app) as url:
        await asyncio.to_thread(Learning(job, url.removeprefix("http://")).run)


if __name__ == "__main__":
    asyncio.run(_serve(parse_job(Path(sys.argv[1]).read_text())))
