"""How good a policy is: the rule of the concise agent as it ships, on questions that are never trained on. Locked."""

from __future__ import annotations

from openai import OpenAI

from reward_hooks.builtin.rules import Concise
from reward_hooks.contract import Candidate
from swarm.types import Task, WorkflowOutput

STYLE = "Answer in one short sentence."
RULE = Concise()


def score(task: Task, client: OpenAI) -> WorkflowOutput:
    """The rule's reward of one answer, sampled at the temperature of training."""
    completion = client.chat.completions.create(
        model="policy",
        messages=[{"role": "user", "content": f"{task.main_query} {STYLE}"}],
        max_tokens=48,
        temperature=1.0,
    )
    choice = completion.choices[0]
    message = {"role": "assistant", "content": choice.message.content or ""}
    answer = Candidate(index=0, message=message, text=message["content"], finish_reason=choice.finish_reason)
    return WorkflowOutput(reward=RULE.judge(task, answer).value)
