"""Reward hooks: user code that shapes requests and scores answers relative to each other.

:mod:`reward_hooks.contract` documents what a hook receives and returns; :func:`load_hooks` reads a hook folder or a
``module:attribute``; :class:`HookRunner` calls hooks behind a deadline and an error boundary.
"""

from reward_hooks.contract import (
    Candidate,
    Feedback,
    GroupScore,
    HookContext,
    Hooks,
    PassThrough,
    Reward,
    Session,
    Submission,
    Turn,
    UserRequest,
)
from reward_hooks.loader import load_hooks
from reward_hooks.runner import HookRunner
from swarm.types import Task

__all__ = [
    "Candidate",
    "Feedback",
    "GroupScore",
    "HookContext",
    "HookRunner",
    "Hooks",
    "PassThrough",
    "Reward",
    "Session",
    "Submission",
    "Task",
    "Turn",
    "UserRequest",
    "load_hooks",
]
