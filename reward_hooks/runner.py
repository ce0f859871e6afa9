"""Run hooks inside a deadline and an error boundary: whatever user code does, the caller gets a result or HookError."""

from __future__ import annotations

from collections.abc import Sequence

from reward_hooks.contract import Candidate, GroupScore, HookContext, Hooks, Submission, UserRequest
from swarm.types import Task


class HookRunner:
    """Calls one set of hooks; safe for concurrent use from one event loop."""

    def __init__(self, hooks: Hooks, timeout: float = 30.0, *, max_threads: int = 16) -> None:
        raise NotImplementedError

    async def submit(self, request: UserRequest, context: HookContext) -> Submission:
        """Shape ``request`` into ``context.num_repeat`` request bodies of one task.

        Raises:
            HookError: the hook failed; ``code`` is ``hook_timeout``, ``hook_raised``, ``hook_result`` or ``hook_busy``.
        """
        raise NotImplementedError

    async def score(self, task: Task, candidates: Sequence[Candidate], context: HookContext) -> GroupScore:
        """Score ``candidates`` relative to each other.

        Raises:
            HookError: the hook failed; see :meth:`submit`. The group must not be trained.
        """
        raise NotImplementedError
