"""One episode: an agent answers a word problem, with a calculator if it may use one; right is 1, wrong is 0.

    python agent_run.py "Anna has 4 apples and buys 5 more. How many apples does Anna have now?"

asks the model that trains (or has just been trained) in an eval episode, which trains nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from typing import Any

from openai import OpenAI, OpenAIError

from swarm.client import EpisodeEndpoint, SwarmClient
from swarm.errors import SwarmGatewayError
from swarm.types import Task, WorkflowOutput

SWARM_URL = os.environ.get("SWARM_URL", "http://127.0.0.1:10086")
STYLE = "Answer with one number."
TURNS = 3  # model calls of one episode, at most
_NUMBER = re.compile(r"-?\d+")
CALCULATOR: Any = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Adds or subtracts two whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer"},
                "sign": {"type": "string", "enum": ["+", "-"]},
                "b": {"type": "integer"},
            },
            "required": ["a", "sign", "b"],
        },
    },
}


def execute(task: Task, api: EpisodeEndpoint, tools: bool = False) -> WorkflowOutput:
    """The episode at ``api``: the agent's answer to ``task``, and its reward."""
    with OpenAI(base_url=api.base_url, api_key=api.api_key, timeout=300.0) as client:
        answer, calls = solve(task.main_query, client, tools)
    reward = judge(answer, task.metadata.get("answer"))
    return WorkflowOutput(
        reward=reward,
        is_success=reward == 1.0,
        log_metrics={"calls": float(calls), "words": float(len(answer.split()))},
        metadata={"answer": answer},
    )


def solve(question: str, client: OpenAI, tools: bool) -> tuple[str, int]:
    """The agent's last words, and how often it called the model."""
    messages: list[Any] = [{"role": "user", "content": f"{question} {STYLE}"}]
    offered: dict[str, Any] = {"tools": [CALCULATOR]} if tools else {}
    for turn in range(1, TURNS + 1):
        message = client.chat.completions.create(model="smollm2-135m", messages=messages, **offered).choices[0].message
        if not message.tool_calls:
            return message.content or "", turn
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            arguments = call.function.arguments if call.type == "function" else ""
            messages.append({"role": "tool", "tool_call_id": call.id, "content": calculate(arguments)})
    return "", TURNS


def calculate(arguments: str) -> str:
    """The calculator: a result, or what is wrong, for the model to read."""
    try:
        given = json.loads(arguments)
        a, sign, b = int(given["a"]), given["sign"], int(given["b"])
    except (ValueError, LookupError, TypeError):
        return 'error: call it with {"a": 4, "sign": "+", "b": 5}'
    return str(a + b if sign == "+" else a - b)


def judge(answer: str, right: object) -> float:
    """1 if the last number of ``answer`` is ``right``, else 0."""
    numbers = _NUMBER.findall(answer)
    return float(bool(numbers) and numbers[-1] == str(right))


def main() -> int:
    parser = argparse.ArgumentParser(description="Ask the agent one question.")
    parser.add_argument("question")
    parser.add_argument("--swarm-url", default=SWARM_URL)
    parser.add_argument("--tools", action="store_true", help="offer the calculator; the chat template must know tools")
    arguments = parser.parse_args()
    try:
        with SwarmClient(arguments.swarm_url) as client, client.episode(episode_type="eval") as episode:
            output = execute(Task(task_id="asked", main_query=arguments.question), episode.endpoint, arguments.tools)
            episode.end("asked", output)
    except (SwarmGatewayError, OpenAIError) as exc:
        print(f"agent_run: {exc}", file=sys.stderr)
        return 1
    print(output.metadata["answer"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
