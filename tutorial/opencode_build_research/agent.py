"""What is trained: one question, one short answer. ``brevity`` is the weight of its length in the reward."""

from __future__ import annotations

from openai import OpenAI

from reward_hooks.builtin.rules import Concise
from reward_hooks.contract import Candidate
from swarm.types import Task, WorkflowOutput

STYLE = "Answer in one short sentence."
RULE = Concise()


def ask(task: Task, client: OpenAI) -> Candidate:
    """The model's answer to the question of ``task``."""
    completion = client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": f"{task.main_query} {STYLE}"}], max_tokens=48
    )
    choice = completion.choices[0]
    message = {"role": "assistant", "content": choice.message.content or ""}
    return Candidate(index=0, message=message, text=message["content"], finish_reason=choice.finish_reason)


def solve(task: Task, client: OpenAI, brevity: float = 0.0) -> WorkflowOutput:
    """The product of the rule's six factors, that of the length to the power of ``brevity``."""
    answer = ask(task, client)
    reward = 1.0
    for name, factor in RULE.judge(task, answer).components.items():
        reward *= factor ** (brevity if name == "concise" else 1.0)
    return WorkflowOutput(reward=reward, log_metrics={"words": float(len(answer.text.split()))})
