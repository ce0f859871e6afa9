"""Sums of two numbers: tasks without end, others that are never trained on, and a workflow that asks once."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from openai import OpenAI

from swarm.types import Task, WorkflowOutput

_PAIRS = [(a, b) for a in range(1, 13) for b in range(1, 13)]
random.Random(0).shuffle(_PAIRS)
#: Pairs for validation, asked in both orders: a model that has learnt 3 + 4 by heart knows 4 + 3.
HELD_OUT = [pair for pair in _PAIRS if pair[0] < pair[1]][:12]


def sums() -> Iterator[Task]:
    yield from (task(pair) for pair in _PAIRS if tuple(sorted(pair)) not in HELD_OUT)


def held_out() -> Iterator[Task]:
    yield from (task(pair) for a, b in HELD_OUT for pair in ((a, b), (b, a)))


def task(pair: tuple[int, int]) -> Task:
    a, b = pair
    question = f"What is {a} + {b}? Answer with the number alone."
    return Task(task_id=f"{a}+{b}", main_query=question, metadata={"sum": a + b})


def solve(task: Task, client: OpenAI) -> WorkflowOutput:
    """1 for the right number alone, 0.5 if it is the last number of a longer answer, less the further off it is."""
    messages = [{"role": "user", "content": task.main_query}]
    answer = client.chat.completions.create(model="policy", messages=messages)  # type: ignore[arg-type]
    text = (answer.choices[0].message.content or "").strip()
    numbers = [int(found) for found in re.findall(r"\d{1,6}", text)]
    right = bool(numbers) and numbers[-1] == task.metadata["sum"]
    near = 0.0 if not numbers else 0.3 / (1 + abs(numbers[-1] - task.metadata["sum"]))
    reward = 1.0 if right and text == str(numbers[-1]) else 0.5 if right else near
    return WorkflowOutput(reward=reward, is_success=right, log_metrics={"characters": float(len(text))})
