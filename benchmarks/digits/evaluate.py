"""How good a policy is: the share of right answers. Locked."""

from __future__ import annotations

from openai import OpenAI

from swarm.types import Task, WorkflowOutput


def score(task: Task, client: OpenAI) -> WorkflowOutput:
    """1 if the last digit is said again."""
    *earlier, last = task.main_query.split()
    messages = [{"role": role, "content": digit} for digit in earlier for role in ("user", "assistant")]
    messages.append({"role": "user", "content": last})
    completion = client.chat.completions.create(model="policy", messages=messages, max_tokens=1)
    said = completion.choices[0].message.content or ""
    return WorkflowOutput(reward=float(said.strip() == last))
