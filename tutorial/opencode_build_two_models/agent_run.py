"""One episode of each model: the planner writes a problem as a sum, the solver works the sum out.

    python agent_run.py "Anna has 4 apples, buys 5 more and gives away 3. How many apples does Anna have now?"

asks both models, as an application does, through the gateway, which trains nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from typing import Any

from openai import OpenAI, OpenAIError

from swarm.client import EpisodeEndpoint
from swarm.types import Task, WorkflowOutput

GATEWAY_URL = os.environ.get("GATEWAY_URL", "http://127.0.0.1:8000/v1")
PLANNER: list[Any] = [
    {"role": "system", "content": "You write a problem as a sum. You do not work it out."},
    {"role": "user", "content": "Tom has 3 pens, buys 4 more and gives away 2. How many pens does Tom have now?"},
    {"role": "assistant", "content": "3 + 4 - 2"},
    {"role": "user", "content": "Lena has 9 eggs, gives away 3 and buys 5 more. How many eggs does Lena have now?"},
    {"role": "assistant", "content": "9 - 3 + 5"},
]
SOLVER: list[Any] = [
    {"role": "system", "content": "You work out sums."},
    {"role": "user", "content": "3 + 4 - 2"},
    {"role": "assistant", "content": "7 - 2 = 5"},
    {"role": "user", "content": "9 - 3 + 5"},
    {"role": "assistant", "content": "6 + 5 = 11"},
]
MAX_TOKENS = 24
_SUM = re.compile(r"\d{1,3}(?:\s*[+-]\s*\d{1,3})+")
_NUMBER = re.compile(r"-?\d+")


def execute(task: Task, planner: EpisodeEndpoint, solver: EpisodeEndpoint) -> tuple[WorkflowOutput, WorkflowOutput]:
    """Run ``task`` in an episode of each; returns what each of them earned.

    The planner earns 1 for a sum that is worth the right answer, whatever the solver makes of it; the solver earns 1
    for working out the sum that it was given, be it the wrong one. Where there is none, it is given the problem.
    """
    right = int(task.metadata["answer"])
    plan = ask(planner, PLANNER, task.main_query)
    value = worth(plan)
    answer = ask(solver, SOLVER, task.main_query if value is None else plan)
    planned = value == right
    solved = last_number(answer) == (right if value is None else value)
    both = {"together": float(last_number(answer) == right)}
    return (
        WorkflowOutput(reward=float(planned), is_success=planned, log_metrics=both, metadata={"plan": plan}),
        WorkflowOutput(reward=float(solved), is_success=solved, log_metrics=both, metadata={"answer": answer}),
    )


def ask(api: EpisodeEndpoint, examples: list[Any], content: str, model: str = "policy") -> str:
    with OpenAI(base_url=api.base_url, api_key=api.api_key, timeout=300.0) as client:
        messages = [*examples, {"role": "user", "content": content}]
        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=MAX_TOKENS)
    return answer.choices[0].message.content or ""


def worth(plan: str) -> int | None:
    """What the first sum in ``plan`` comes to; ``None`` if it holds none."""
    found = _SUM.search(plan)
    return None if found is None else sum(int(one) for one in re.findall(r"[+-]?\d+", re.sub(r"\s", "", found[0])))


def last_number(answer: str) -> int | None:
    numbers = _NUMBER.findall(answer)
    return int(numbers[-1]) if numbers else None


def main() -> int:
    parser = argparse.ArgumentParser(description="Let the two models answer one question.")
    parser.add_argument("question")
    parser.add_argument("--gateway-url", default=GATEWAY_URL)
    arguments = parser.parse_args()
    gateway = EpisodeEndpoint(base_url=arguments.gateway_url, api_key="unused", episode_uuid="")
    try:
        plan = ask(gateway, PLANNER, arguments.question, "planner")
        print(f"plan:   {plan}")
        print(f"answer: {ask(gateway, SOLVER, plan, 'solver')}")
    except OpenAIError as exc:
        print(f"agent_run: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
