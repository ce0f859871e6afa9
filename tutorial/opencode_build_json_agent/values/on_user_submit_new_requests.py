"""Every request becomes N identical ones; the task says whom the sentence is about, as ``train.jsonl`` knows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reward_hooks.contract import HookContext, Submission, UserRequest
from swarm.data import read_tasks
from swarm.errors import HookError
from swarm.types import Task

PEOPLE: dict[str, Any] = {
    task.main_query: task.metadata["person"] for task in read_tasks(Path(__file__).parents[1] / "train.jsonl")
}


def on_user_submit_new_requests(request: UserRequest, context: HookContext) -> Submission:
    asked = str(request.body["messages"][-1]["content"])
    if asked not in PEOPLE:
        raise HookError("nobody knows the right answer to this request", code="no_reference")
    return Submission(
        # the request's own id: the same sentence asked again is a new group, sampled by newer weights
        task=Task(task_id=request.request_id, main_query=asked, metadata={"person": PEOPLE[asked]}),
        requests=[dict(request.body) for _ in range(context.num_repeat)],
    )
