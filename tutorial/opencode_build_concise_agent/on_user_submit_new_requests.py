"""Every request of the app becomes N identical ones; the task is the question without the app's own instruction."""

from __future__ import annotations

from reward_hooks.contract import HookContext, Submission, UserRequest
from swarm.types import Task

INSTRUCTION = "Answer in one short sentence."


def on_user_submit_new_requests(request: UserRequest, context: HookContext) -> Submission:
    asked = str(request.body["messages"][-1]["content"])
    # words of the instruction must not count as the topic of the question
    question = asked.removesuffix(INSTRUCTION).strip()
    return Submission(
        # the request's own id: the same question asked again is a new group, sampled by newer weights
        task=Task(task_id=request.request_id, main_query=question),
        requests=[dict(request.body) for _ in range(context.num_repeat)],
    )
