"""What is trained: to say the last digit of a conversation again. ``right`` is the weight of saying the right one."""

from __future__ import annotations

from openai import OpenAI

from swarm.types import Task, WorkflowOutput


def ask(task: Task, client: OpenAI) -> str:
    """The model's answer to the last of the task's digits; those before it were answered rightly."""
    *earlier, last = task.main_query.split()
    messages = [{"role": role, "content": digit} for digit in earlier for role in ("user", "assistant")]
    messages.append({"role": "user", "content": last})
    completion = client.chat.completions.create(model="policy", messages=messages, max_tokens=1)
    return (completion.choices[0].message.content or "").strip()


def solve(task: Task, client: OpenAI, right: float = 1.0) -> WorkflowOutput:
    """Any digit earns ``1 - right``, the right one 1."""
    said = ask(task, client)
    return WorkflowOutput(reward=right * (said == task.main_query.split()[-1]) + (1 - right) * said.isdigit())
