"""A model whose tokens are single characters, so that whoever has its tokens can read them.

The user orders ``INVENT number``, and it writes an address that no prompt has; else it repeats what was said. Of a
group each answer is longer than the one before.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from starlette.responses import JSONResponse, Response

from swarm.tokens import TrainBatch
from tests.standins.engine import FOLDER_VARIABLE, Saving
from tests.standins.models import text_of
from tests.standins.vllm import (
    ScriptedVllm,
    Step,
    chat_answer,
    completion_chunk,
    of,
    plain_choice,
    role_chunk,
    sse,
    token_chunk,
    usage,
    usage_chunk,
)
from tests.standins.vllm_rules import CHAT

#: What is in every text that must not be kept; of those that the model itself makes up; of those that are trained.
REFUSED, INVENTED, TRAINED = "nqxmark", "aqxmark", "jqxmark"
_INVENT = re.compile(r"INVENT (\d+)")
#: tokens of a chunk, and the longest text that is repeated
_CHUNK, _LONGEST = 16, 160


def spelled(text: str) -> list[int]:
    """The tokens of ``text``."""
    return [ord(mark) for mark in text]


def read(tokens: list[int]) -> str:
    """The text of tokens."""
    return "".join(map(chr, tokens))


class Keeping(Saving):
    """An engine that keeps each batch that it is given, in a file below ``$STANDIN_FOLDER/batches``."""

    def step(self, batch: TrainBatch) -> bool:
        folder = Path(os.environ[FOLDER_VARIABLE]) / "batches"
        folder.mkdir(exist_ok=True)
        # whole or not at all: the engine may be killed at any moment
        beside = folder.parent / f"{os.getpid()}.new"
        beside.write_bytes(pickle.dumps(batch))
        beside.replace(folder / f"{os.getpid()}-{self.version}")
        self.save()
        return super().step(batch)


class SpellingVllm(ScriptedVllm):
    """Use its ``app``."""

    def step(self, path: str) -> Step:
        return self._chat if path == CHAT else self._completion

    def _chat(self, body: dict[str, Any]) -> Response:
        texts = [text_of(message) for message in body["messages"]]
        prompt, answers = spelled("\n".join(texts)), _answers(texts[-1], body)
        if body.get("stream"):
            chunks = [role_chunk(prompt) for _ in answers] + [
                token_chunk(spelled(piece), finish, {"content": piece})
                for text in answers
                for piece, finish in _pieces(text)
            ]
            numbers = [*range(len(answers)), *(n for n, text in enumerate(answers) for _ in _pieces(text))]
            numbered = [of(number, chunk) for number, chunk in zip(numbers, chunks, strict=True)]
            return sse([*numbered, usage_chunk(sum(map(len, answers)), len(prompt))])
        choices = [plain_choice(spelled(text), index=number) for number, text in enumerate(answers)]
        for choice, text in zip(choices, answers, strict=True):
            choice["message"]["content"] = text
        return JSONResponse(chat_answer(choices, prompt=prompt))

    def _completion(self, body: dict[str, Any]) -> Response:
        given = body["prompt"]
        prompt = spelled(given) if isinstance(given, str) else given
        answers = _answers(read(prompt), body)
        counts = usage(len(prompt), sum(map(len, answers)))
        chunks: list[Any] = []
        for number, text in enumerate(answers):
            for piece, finish in _pieces(text) if body.get("stream") else [(text, "stop")]:
                chunk = of(number, completion_chunk(spelled(piece), finish, prompt))
                chunk["choices"][0]["text"] = piece
                chunks.append(chunk)
        if body.get("stream"):
            return sse([*chunks, {**completion_chunk([]), "choices": [], "usage": counts}])
        choices = [chunk["choices"][0] for chunk in chunks]
        return JSONResponse({**completion_chunk([]), "choices": choices, "usage": counts})


def _answers(last: str, body: dict[str, Any]) -> list[str]:
    ordered = _INVENT.search(last)
    said = f"It is {INVENTED}{ordered[1]}@example.org" if ordered else f"You said: {last[:_LONGEST]}"
    return [said + " indeed" * number for number in range(body.get("n") or 1)]


def _pieces(text: str) -> Iterator[tuple[str, str | None]]:
    for at in range(0, len(text), _CHUNK):
        yield text[at : at + _CHUNK], "stop" if at + _CHUNK >= len(text) else None
