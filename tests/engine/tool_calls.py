"""Agents that call a tool, each in a conversation of three calls of the model, at the swarm server that a test runs:
what is sampled and sent back in every form that clients use."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import anthropic
import openai

from swarm.client import SwarmClient
from swarm.types import Task, WorkflowOutput
from tests.engine.tiny_model import ANSWER, QUESTION, TOOL

MODEL, TOKENS = "tiny", 64
CHAT_TOOL: dict[str, Any] = {"type": "function", "function": TOOL}
MESSAGES_TOOL: dict[str, Any] = {
    "name": TOOL["name"],
    "description": TOOL["description"],
    "input_schema": TOOL["parameters"],
}
#: ``tool_choice`` and whether it is streamed, of each episode of a group
CHAT = (
    ("required", False),
    ({"type": "function", "function": {"name": TOOL["name"]}}, True),
    ("auto", True),
    ("required", True),
)
MESSAGES = (
    ({"type": "tool", "name": TOOL["name"]}, False),
    ({"type": "any"}, True),
    ({"type": "auto"}, True),
    (None, False),
)


def run_tool_calls(swarm: SwarmClient) -> None:
    """Run a group over Chat Completions and one over Messages; each episode's reward is the digit that it chose."""
    begun = {"chat": iter(range(len(CHAT))), "messages": iter(range(len(MESSAGES)))}
    lock = threading.Lock()

    def episode(task: Task) -> int:
        with lock:
            number = next(begun[task.task_id])
        with swarm.episode() as one:
            key, url = one.api_key, one.base_url
            if task.task_id == "chat":
                with openai.OpenAI(api_key=key, base_url=url, max_retries=0) as sdk:
                    digit = chat(sdk, number)
            else:
                with anthropic.Anthropic(api_key=key, base_url=url.removesuffix("/v1"), max_retries=0) as sdk:
                    digit = messages(sdk, number)
            assert one.end(task, WorkflowOutput(reward=digit / 9)) == "", "the server will not train it"
            return digit

    tasks = [Task(task_id=name) for name, ways in (("chat", CHAT), ("messages", MESSAGES)) for _ in ways]
    digits = swarm.run_episodes_until_all_complete(tasks, episode, auto_retry=False)
    assert all(digit is not None for digit in digits), digits


def chat(sdk: openai.OpenAI, number: int) -> int:
    choice, streams = CHAT[number]
    said: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
    first, finish = _chat_answer(sdk, streams, messages=said, tools=[CHAT_TOOL], tool_choice=choice)
    [call] = first["tool_calls"]
    # as OpenAI's: a call that is named by the request ends with "stop"
    assert finish == ("stop" if isinstance(choice, dict) else "tool_calls")
    digit = _digit(call["function"]["name"], json.loads(call["function"]["arguments"]))
    # the last client gives another text back than it got: what follows is no continuation of what was sampled
    content = "I count." if number == len(CHAT) - 1 else None
    arguments = json.dumps({"n": digit}, separators=(",", ":"))
    call = {"id": call["id"], "type": "function", "function": {"name": TOOL["name"], "arguments": arguments}}
    said += [
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": str(digit + 1)},
    ]
    second, finish = _chat_answer(sdk, streams, messages=said, tools=[CHAT_TOOL])
    if content is not None:
        return digit
    assert (second["content"], finish) == (ANSWER, "stop")
    # as a list of parts, which is another form of the same text
    said += [
        {"role": "assistant", "content": [{"type": "text", "text": ANSWER}]},
        {"role": "user", "content": QUESTION},
    ]
    third, finish = _chat_answer(sdk, streams, messages=said, tools=[CHAT_TOOL])
    [call] = third["tool_calls"]
    assert finish == "tool_calls"
    _digit(call["function"]["name"], json.loads(call["function"]["arguments"]))
    return digit


def _chat_answer(sdk: openai.OpenAI, streams: bool, **body: Any) -> tuple[dict[str, Any], str | None]:
    ask: Any = sdk.chat.completions.create
    if not streams:
        [choice] = ask(model=MODEL, **body).choices
        return choice.message.model_dump(), choice.finish_reason
    text, calls, finish = "", dict[int, dict[str, Any]](), None
    with ask(model=MODEL, stream=True, **body) as stream:
        for chunk in stream:
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
                for part in choice.delta.tool_calls or []:
                    call = calls.setdefault(part.index, {"id": part.id, "function": {"name": "", "arguments": ""}})
                    call["function"]["name"] += part.function.name or ""
                    call["function"]["arguments"] += part.function.arguments or ""
    return {"content": text or None, "tool_calls": list(calls.values())}, finish


def messages(sdk: anthropic.Anthropic, number: int) -> int:
    choice, streams = MESSAGES[number]
    said: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
    first = _message(sdk, streams, said, {} if choice is None else {"tool_choice": choice})
    [used] = [block for block in first.content if block.type == "tool_use"]
    assert first.stop_reason == "tool_use"
    digit = _digit(used.name, used.input)
    result = {"type": "tool_result", "tool_use_id": used.id, "content": str(digit + 1)}
    block = {"type": "tool_use", "id": used.id, "name": used.name, "input": used.input}
    said += [{"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]
    second = _message(sdk, streams, said, {})
    assert [block.text for block in second.content] == [ANSWER]
    assert second.stop_reason == "end_turn"
    said += [{"role": "assistant", "content": ANSWER}, {"role": "user", "content": QUESTION}]
    third = _message(sdk, streams, said, {})
    [used] = [block for block in third.content if block.type == "tool_use"]
    _digit(used.name, used.input)
    return digit


def _message(sdk: anthropic.Anthropic, streams: bool, said: list[dict[str, Any]], more: dict[str, Any]) -> Any:
    body: dict[str, Any] = {"model": MODEL, "max_tokens": TOKENS, "messages": said, "tools": [MESSAGES_TOOL], **more}
    if not streams:
        return sdk.messages.create(**body)
    with sdk.messages.stream(**body) as stream:
        return stream.get_final_message()


def _digit(name: str, arguments: Any) -> int:
    assert name == TOOL["name"]
    digit = arguments["n"]
    assert isinstance(digit, int) and 0 <= digit <= 9 and len(arguments) == 1
    return digit


def check_timelines(rows: list[dict[str, Any]], model: Path) -> None:
    """The timelines of the episodes say what was sampled and nothing else.

    Args:
        rows: of ``swarm export``, those of :func:`run_tool_calls`.
        model: folder of the tokenizer.
    """
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    assert len(rows) == len(CHAT) + len(MESSAGES)
    apart = 0
    for row in rows:
        call = {"name": TOOL["name"], "arguments": {"n": round(row["reward"] * 9)}}
        called = f"<tool_call>\n{json.dumps(call)}\n</tool_call><|im_end|>"
        sampled = [
            [token for token, own in zip(one["response_ids"], one["response_mask"], strict=True) if own]
            for one in row["timelines"]
        ]
        texts = [tokenizer.decode(ids) for ids in sampled]
        counts = row["tokens"]
        assert counts["sampled"] == counts["trained"] == sum(map(len, sampled))
        if row["num_calls"] == 3:
            # whatever spelling they came back in, the answers are one timeline in the very tokens that were sampled
            again = re.escape(called).replace(str(call["arguments"]["n"]), "[0-9]")
            assert len(texts) == 1, row["timelines"]
            assert re.fullmatch(re.escape(f"{called}{ANSWER}<|im_end|>") + again, texts[0]), texts
            assert sampled[0] != tokenizer.encode(texts[0], add_special_tokens=False), "it would come back alike anyway"
            assert (counts["kept"], counts["lost"], counts["edited"]) == (2, 0, 0)
        else:
            apart += 1
            assert (row["num_calls"], len(texts), texts[0]) == (2, 2, called), row["timelines"]
            assert (counts["kept"], counts["lost"], counts["edited"]) == (0, 0, 1)
    assert apart == 1
