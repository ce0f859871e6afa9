"""Models for a scripted vLLM: one that follows a user's orders, and one that takes its time."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import os
import random
import re
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from starlette.responses import JSONResponse, Response, StreamingResponse

from tests.standins.vllm import (
    ScriptedVllm,
    Step,
    chat_answer,
    completion_chunk,
    entries,
    of,
    plain_choice,
    role_chunk,
    spoken,
    token_chunk,
    usage,
    usage_chunk,
)
from tests.standins.vllm_rules import CHAT, COMPLETIONS

GIVES_UP = "I do not know."
_TOKEN = re.compile(r"\s*\w{1,6}|\s*[^\w\s]|\s+")
_ORDERS = {name: re.compile(rf"^{name} (.*)$", re.MULTILINE) for name in ("THINK", "WAIT", "SAY")}
_CALL = re.compile(r"^CALL (\S+) (\{.*\})$", re.MULTILINE)
#: A value for a field of a schema, by the field's type.
_FILL: dict[str, Any] = {"integer": 7, "number": 7.5, "boolean": True, "null": None}

Message = dict[str, Any]


# ---------------------------------------------------------------------- a model that follows orders


class ObedientVllm(ScriptedVllm):
    """Gives a sensible answer to any client, plain and streamed, whose tokens spell its text.

    The user gives orders by lines of the last message: ``CALL tool {"its": "arguments"}``, ``SAY text``, ``THINK text``
    before the answer, and ``WAIT path``: wait until the file exists (``.asked`` beside it says that the model waits,
    ``.left`` that the caller left meanwhile).

    Every other sample of a group gives up (:data:`GIVES_UP`): a user who sees the sensible answer got the better one.
    It makes the same tool calls, with ``other`` for ``chosen`` in their arguments.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ids: dict[str, int] = {}

    def step(self, path: str) -> Step:
        return {CHAT: self._chat, COMPLETIONS: self._completions, "/tokenize": self._tokenize}[path]

    def prompt_tokens(self, body: dict[str, Any]) -> int:
        return len(self._prompt(body))

    def _tokens(self, text: str) -> list[tuple[int, str]]:
        """Ids in order of appearance, each with its text."""
        return [(self._ids.setdefault(piece, 100 + len(self._ids)), piece) for piece in _TOKEN.findall(text)]

    def _prompt(self, body: dict[str, Any]) -> list[int]:
        if "prompt" in body:
            text = body["prompt"] if isinstance(body["prompt"], str) else json.dumps(body["prompt"])
        else:
            text = "".join(f"<{one.get('role')}>{text_of(one)}" for one in body["messages"])
        return [token for token, _ in self._tokens(text)]

    def _message(self, good: Message, index: int, count: int) -> Message:
        # with one sample alone no user could see whether the better one is chosen
        return given_up(good) if count > 1 and index % 2 == 0 else good

    def _choice(self, good: Message, index: int, count: int) -> dict[str, Any]:
        message = self._message(good, index, count)
        asked = json.dumps([call["function"] for call in message["tool_calls"]]) if message["tool_calls"] else ""
        texts = [message.get("reasoning", ""), (message["content"] or "") + asked]
        tokens = [token for text in texts for token in self._tokens(text)]
        ids = [token for token, _ in tokens]
        finish = "tool_calls" if message["tool_calls"] else "stop"
        return plain_choice(ids, finish, index, message=message, logprobs=entries(ids, [text for _, text in tokens]))

    def _chat(self, body: dict[str, Any]) -> Response:
        good, count = answer(body), body.get("n") or 1
        choices = [self._choice(good, index, count) for index in range(count)]
        waits = _ordered("WAIT", body["messages"])
        before = functools.partial(_file, Path(waits)) if waits else None
        return spoken(chat_answer(choices, prompt=self._prompt(body)), bool(body.get("stream")), before)

    def _completions(self, body: dict[str, Any]) -> Response:
        prompt, good = self._prompt(body), said(f" goes on after {body['prompt']!r}")
        choices: list[dict[str, Any]] = []
        for index in range(count := body.get("n") or 1):
            message = self._message(good, index, count)
            ids = [token for token, _ in self._tokens(message["content"])]
            choice = completion_chunk(ids, "stop", prompt)["choices"][0]
            choices.append(choice | {"index": index, "text": message["content"]})
        sampled = sum(len(choice["token_ids"]) for choice in choices)
        return JSONResponse({**completion_chunk([]), "choices": choices, "usage": usage(len(prompt), sampled)})

    def _tokenize(self, body: dict[str, Any]) -> Response:
        tokens = self._prompt(body)
        return JSONResponse({"count": len(tokens), "max_model_len": 4096, "tokens": tokens})


async def _file(path: Path) -> None:
    path.with_suffix(".asked").touch()
    try:
        while not path.exists():  # noqa: ASYNC110, ASYNC240
            await asyncio.sleep(0.02)
    except asyncio.CancelledError:
        path.with_suffix(".left").touch()
        raise


def answer(body: dict[str, Any]) -> Message:
    """The good answer to a chat."""
    thought = _ordered("THINK", body["messages"])
    return _answer(body) | ({"reasoning": thought} if thought else {})


def _answer(body: dict[str, Any]) -> Message:
    messages, tools = body["messages"], body.get("tools") and body.get("tool_choice") != "none"
    form = (body.get("response_format") or {}).get("json_schema")
    results = [text_of(one) for one in _since_last_answer(messages) if one["role"] == "tool"]
    if results and form is None:
        return said(f"The tools say: {', '.join(results)}.")
    if text := _ordered("SAY", messages):
        return said(text)
    if tools and (calls := _CALL.findall(_orders(messages))):
        return called(messages, calls)
    last = text_of(messages[-1])
    if tools and not results:
        cities = [city for city in ("Rome", "Oslo") if city in last] or ["Rome"]
        function = body["tools"][0]["function"]
        schema = function["parameters"]
        return called(messages, [(function["name"], json.dumps(filled(schema, schema, city))) for city in cities])
    if form is not None:
        return said(json.dumps(filled(form["schema"], form["schema"])))
    if "Say farewell in hello.py" in last:  # an editing client, which wants the whole file
        return said('Here it is.\n\nhello.py\n```\ndef greet():\n    return "farewell"\n```\n')
    return said(f"You said: {last}")


def given_up(message: Message) -> Message:
    """The bad answer beside the good ``message``."""
    return {**said(GIVES_UP), "tool_calls": json.loads(json.dumps(message["tool_calls"]).replace("chosen", "other"))}


def said(text: str) -> Message:
    return {"role": "assistant", "content": text, "tool_calls": []}


def called(messages: Sequence[Message], calls: Sequence[tuple[str, str]]) -> Message:
    """Tool calls by name and arguments; their ids are unique in the conversation."""
    before = sum(len(one.get("tool_calls") or []) for one in messages)
    listed = [
        {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(calls, before)
    ]
    return {"role": "assistant", "content": None, "tool_calls": listed}


def text_of(message: Message, between: str = "") -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    return between.join(part["text"] if part["type"] == "text" else f"[{part['type']}]" for part in content or [])


def filled(schema: dict[str, Any], root: dict[str, Any], text: str = "Rome") -> Any:
    """A value that fits ``schema``; references are to ``$defs`` of ``root``."""
    if "$ref" in schema:
        return filled(root["$defs"][schema["$ref"].rpartition("/")[2]], root, text)
    if "enum" in schema:
        return schema["enum"][0]
    if schema.get("type") == "array":
        return [filled(schema.get("items", {}), root, text)]
    if schema.get("type") == "object" or "properties" in schema:
        return {name: filled(one, root, text) for name, one in schema.get("properties", {}).items()}
    return _FILL.get(schema.get("type", "string"), text)


def _ordered(name: str, messages: Sequence[Message]) -> str | None:
    found = _ORDERS[name].findall(_orders(messages))
    return found[-1] if found else None


def _orders(messages: Sequence[Message]) -> str:
    users = [one for one in _since_last_answer(messages) if one["role"] == "user"]
    return text_of(users[-1], "\n") if users else ""


def _since_last_answer(messages: Sequence[Message]) -> Sequence[Message]:
    answered = [index for index, one in enumerate(messages) if one["role"] == "assistant"]
    return messages[answered[-1] + 1 :] if answered else messages


# ---------------------------------------------------------------------- a model that takes its time


class PacedModel:
    """Samples at a pace, counts the calls that run, and notes each call that ended.

    A prompt with ``LONG`` in it is answered until its caller leaves; one with ``LETHAL`` kills the process.

    Args:
        note: called with the prompt's last text and how its answer ended, ``served`` or ``cancelled``.
    """

    #: Seconds to the first token, between two, and between two of an answer without an end.
    FIRST, NEXT, NEXT_OF_LONG = (0.005, 0.03), 0.004, 0.05
    TOKENS = (2, 40)

    def __init__(self, note: Callable[[str, str], None]) -> None:
        self.running = 0
        self._note = note

    def answer(self, body: dict[str, Any]) -> Response:
        media_type = "text/event-stream" if body.get("stream") else "application/json"
        return StreamingResponse(self._noted(body), media_type=media_type)

    async def _noted(self, body: dict[str, Any]) -> AsyncIterator[str]:
        text, ended = str(body["messages"][-1]["content"]), "cancelled"
        self.running += 1
        try:
            await asyncio.sleep(random.uniform(*self.FIRST))
            if "LETHAL" in text:
                os.kill(os.getpid(), signal.SIGKILL)
            async for part in (self._streamed if body.get("stream") else self._plain)(body, "LONG" in text):
                yield part
            ended = "served"
        finally:
            self.running -= 1
            self._note(text, ended)

    async def _plain(self, body: dict[str, Any], long: bool) -> AsyncIterator[str]:
        tokens = [random.randint(1, 99) for _ in range(random.randint(*self.TOKENS))]
        await asyncio.sleep(3600 if long else self.NEXT * len(tokens))
        yield json.dumps(chat_answer([plain_choice(tokens, index=index) for index in range(body.get("n") or 1)]))

    async def _streamed(self, body: dict[str, Any], long: bool) -> AsyncIterator[str]:
        choices, count = range(body.get("n") or 1), random.randint(*self.TOKENS)
        for index in choices:
            yield _event(of(index, role_chunk()))
        for place in itertools.count() if long else range(count):
            await asyncio.sleep(self.NEXT_OF_LONG if long else self.NEXT)
            finish = "stop" if place == count - 1 and not long else None
            for index in choices:
                yield _event(of(index, token_chunk([random.randint(1, 99)], finish)))
        yield _event(usage_chunk(count * len(choices)))
        yield "data: [DONE]\n\n"


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"
