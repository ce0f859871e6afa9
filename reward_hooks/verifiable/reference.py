"""The known answer of a task, which a submit hook put into ``task.metadata``.

Invariant: a task without one is an error with a reason, never a reward.

::

    # on_user_submit_new_requests.py
    def on_user_submit_new_requests(request, context):
        task = Task(task_id=request.request_id, metadata={"answer": look_up(request.body)})
        return Submission(task=task, requests=[dict(request.body) for _ in range(context.num_repeat)])
"""

from __future__ import annotations

from typing import Any, cast

from swarm.errors import HookError
from swarm.types import Task


def references(task: Task, key: str) -> list[str]:
    """The accepted answers ``task.metadata[key]``: a string or number, or a list of these.

    Raises:
        HookError: there is none (``no_reference``).
    """
    value = task.metadata.get(key)
    listed = cast("list[Any]", value) if isinstance(value, list) else [value]
    texts = [str(one) for one in listed if isinstance(one, str | int | float) and not isinstance(one, bool)]
    if not texts or len(texts) < len(listed) or not all(text.strip() for text in texts):
        raise HookError(
            f"task {task.task_id} has no metadata[{key!r}] that is an answer or a list of answers; let "
            "on_user_submit_new_requests return a Submission whose task has it",
            code="no_reference",
        )
    return texts
